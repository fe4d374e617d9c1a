"""The check before anything starts, inside Hydra: of a run, or of every job of a sweep.

Hydra composes the config; `Preflight` looks at it before any group or folder exists. No torch until all is
well so far.
"""

import copy
import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_experiments import check, environment, launch, sweep
from ddp_experiments import config as schema
from ddp_experiments.errors import Exit, Refused
from ddp_experiments.identity import Origin, saved_form
from ddp_experiments.targets import has_horizon


class Preflight(Callback):
    """Checks a run, or every job of a sweep, before Hydra makes a folder.

    It must leave by SystemExit: Hydra turns other exceptions of a callback into a warning and starts the run.
    """

    passed = False
    folder: sweep.Folder | None = None  # of the sweep

    @classmethod
    def reset(cls) -> None:
        """Nothing has been checked yet."""
        cls.passed, cls.folder = False, None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        words = launch.overrides(config.hydra)

        def look() -> list[str]:
            found = list(check.orphans(words, config.hydra.runtime.choices))
            return found or check.faults(_compose(kwargs["config_name"], words), launch.typed_words())

        if found := _found(look):
            launch.refuse(found)
        Preflight.passed = True

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        made: list[Checked] = []

        def look() -> list[str]:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            made.append(
                Checked(config, kwargs["config_name"], parser.parse_overrides(launch.overrides(config.hydra)))
            )
            if found := made[0].faults():
                return found
            Preflight.folder = sweep.together(made[0].config, made[0].plan, environment.read())
            return []

        if found := _found(look):
            launch.refuse(found)
        Preflight.passed = True
        assert Preflight.folder is not None
        path = Preflight.folder.path.resolve()
        if made[0].is_basic:  # Hydra composes a job three times, keeps all results, and tells one failure
            try:
                code = launch.run_sweep(path, made[0].origins())
            except Exception:
                traceback.print_exc()
                code = Exit.FAILED
            sys.exit(code)
        config.hydra.sweep.dir = str(path)  # and for every job, wherever it is composed:
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={sweep.quoted(str(path))}")


class Checked:
    """The jobs of a sweep: their check, one after the other, and the plan that comes of it."""

    config: schema.Config  # of the first job

    def __init__(self, config: DictConfig, config_name: str, given: Sequence[Override]) -> None:
        self.choices, self.compose = config.hydra.runtime.choices, Composer(config_name)
        self.sweeper = str(config.hydra.sweeper._target_)
        launcher = str(config.hydra.launcher._target_)
        self.knows_all = self.sweeper.endswith(sweep.BASIC[0])
        self.is_basic = self.knows_all and launcher.endswith(sweep.BASIC[1])
        self.swept = [o.key_or_group for o in given if o.is_sweep_override()]
        if self.knows_all:
            self.jobs = list(sweep.combinations(given))
        else:  # it draws values as it goes: what stays the same is checked now
            self.jobs = [[str(o.input_line) for o in given if not o.is_sweep_override()]]
        self.plan = sweep.Plan(
            command=shlex.join(launch.typed_words()),
            given=[o.key_or_group for o in given if not o.is_sweep_override()],
        )
        self.width = max(2, len(str(len(self.jobs) - 1)))
        self.known: dict[str, int] = {}  # job by what it trains
        self.general: list[str] = []  # what is wrong with the sweep as such
        self.slips = functools.cache(lambda *words: list(check.slips(words)))

    def _varied(self, job: Sequence[str]) -> list[str]:
        return [o for o in job if sweep.split(o)[0] in self.swept]

    def origins(self) -> Iterator[tuple[schema.Config, Origin]]:
        """What each job is, ready to run."""
        for job in self.jobs:
            cfg = self.compose(job, self._varied(job))
            yield schema.typed(cfg), Origin(saved_form(cfg), job, f"python train.py {shlex.join(job)}")

    def faults(self) -> list[str]:
        """Everything wrong, a line each, with the first job that has it unless all have."""
        where: dict[str, list[int]] = {}
        for number, job in enumerate(self.jobs):
            for fault in dict.fromkeys(_found(functools.partial(self._job, number, job))):
                where.setdefault(fault, []).append(number)
            if self.general:
                return self.general
        return [self._in_jobs(fault, numbers) for fault, numbers in where.items()]

    def _job(self, number: int, job: Sequence[str]) -> list[str]:
        varied = self._varied(job)
        found = self.slips(*job) if number == 0 else [s for o in varied for s in self.slips(o)]
        if not found and not self.compose.is_quick(varied):
            found = list(check.orphans(job, self.choices))
        if found:
            return found
        cfg = self.compose(job, varied)
        if found := check.faults(cfg, job):
            return found
        config = schema.typed(cfg)
        if number == 0:
            self.config = config
            self.general += launch.sweep_faults(config, environment.read(), self.swept, self.sweeper)
        if self.knows_all:
            key = sweep.key_of(saved_form(cfg), varied, has_horizon(config.scheduler))
            if key in self.known:
                return [f"trains the same as job {self.known[key]}: leave one of them out"]
            self.known[key] = number
            self.plan.add(key, varied, self.width)
        return []

    def _in_jobs(self, fault: str, numbers: Sequence[int]) -> str:
        if len(numbers) == len(self.jobs):
            return fault
        more = f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else ""
        return f"job {numbers[0]}, {' '.join(self._varied(self.jobs[numbers[0]]))}{more}: {fault}"


class Composer:
    """Composes the jobs of a sweep. Where plain values vary it changes a copy: 80 ms become 5."""

    def __init__(self, config_name: str) -> None:
        self.config_name = config_name
        self.first: DictConfig | None = None
        self.parsed = functools.cache(lambda word: OverridesParser.create().parse_override(word).value())

    def is_quick(self, varied: Sequence[str]) -> bool:
        """Tell whether all that varies is plain values that the first job has, too."""
        return self.first is not None and all(
            not o.startswith("+") and _is_leaf(self.first, sweep.split(o)[0]) for o in varied
        )

    def __call__(self, job: Sequence[str], varied: Sequence[str]) -> DictConfig:
        if self.first is None or not self.is_quick(varied):
            cfg = _compose(self.config_name, job)
            self.first = self.first or copy.deepcopy(cfg)
            return cfg
        copied: DictConfig = copy.deepcopy(self.first)
        for o in varied:
            OmegaConf.update(copied, sweep.split(o)[0], self.parsed(o))
        return copied


def _is_leaf(cfg: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, section) if section else cfg
    return isinstance(node, DictConfig) and name in node and not isinstance(node._get_node(name), Container)


def _found(look: Callable[[], list[str]]) -> list[str]:
    """What a check finds, or why it could not look."""
    try:
        return look()
    except Refused as refusal:
        return list(refusal.faults)
    except (HydraException, OmegaConfBaseException) as error:
        return [check.explain(error)]
    except Exception as error:  # Hydra would turn it into a warning and go on
        traceback.print_exc()
        return [f"the check itself failed: {type(error).__name__}: {error}"]


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config of a job, with `${hydra:...}` at work."""
    cfg = hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg
