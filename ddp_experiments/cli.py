"""From the command line to a checked config, and errors a person can use. No torch until a run starts.

Hydra composes the config; `Preflight` checks it, for a sweep every job, before any group or folder exists.
"""

import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_experiments import check, environment, identity, launch
from ddp_experiments import config as schema
from ddp_experiments.errors import Exit, Refused

FROM_RUN = {"--from-run": "from_run", "--continue": "resume.run"}  # option: the setting that keeps its folder


# ---- the config as it is written down


def saved_form(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, to be written down: resolved, but `${oc.env:...}` stays as it is."""
    raw = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    OmegaConf.register_new_resolver("oc.env", _as_typed, replace=True)
    try:
        plain = _plain(raw)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert isinstance(plain, dict)
    return plain


def _as_typed(name: str, *default: Any) -> str:
    """What was typed to get an environment value, in place of the value: it may be a secret."""
    quoted = ["null" if d is None else repr(d) if isinstance(d, str) else str(d) for d in default]
    return f"${{oc.env:{','.join([name, *quoted])}}}"


def _plain(node: Container) -> Any:
    """Plain values, resolved; what needs the environment to be found at all stays as it is."""

    def entry(key: Any) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException:
            return node._get_node(key)._value()  # type: ignore[union-attr]
        return _plain(value) if isinstance(value, Container) else value

    if isinstance(node, ListConfig):
        return [entry(i) for i in range(len(node))]
    return {str(key): entry(key) for key in node}


def job_folder() -> Path | None:
    """The folder that Hydra has made for this job of a sweep; None outside of sweeps."""
    job = HydraConfig.get()
    return Path(job.runtime.output_dir) if job.mode is RunMode.MULTIRUN else None


# ---- the check, inside Hydra


class Preflight(Callback):
    """Checks a run, or every job of a sweep, before Hydra makes a folder.

    It must leave by SystemExit: Hydra turns other exceptions of a callback into a warning and starts the run.
    """

    passed = False
    sweep_folder: Path | None = None
    swept: tuple[str, ...] = ()
    jobs = 1

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check([_task_overrides(config)], config, kwargs["config_name"])

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        given = OverridesParser.create().parse_overrides(_task_overrides(config))
        Preflight.swept = tuple(o.key_or_group for o in given if o.is_sweep_override())
        if "basic_sweeper" in str(config.hydra.sweeper._target_):
            jobs = list(_jobs(given))
        else:  # a sweeper that draws values as it goes: what stays the same is checked now
            jobs = [[str(o.input_line) for o in given if not o.is_sweep_override()]]
        Preflight.jobs = len(jobs)
        self._check(jobs, config, kwargs["config_name"], sweep=True)
        try:
            Preflight.sweep_folder = identity.new_folder(Path("outputs") / str(config.name))
        except Refused as refusal:
            launch.refuse(refusal.faults)

    def _check(
        self, jobs: Sequence[Sequence[str]], config: DictConfig, config_name: str, sweep: bool = False
    ) -> None:
        choices, where = config.hydra.runtime.choices, dict[str, list[int]]()  # fault: the jobs that have it
        for number, job in enumerate(jobs):
            found: list[str] = []
            try:
                if sweep:
                    found += [*check.slips(job), *launch.sweep_faults(environment.read(), job)]
                found = found or list(check.orphans(job, choices))
                if not found:
                    found += check.faults(_compose(config_name, job), job if sweep else launch.typed_words())
            except Refused as refusal:
                found += refusal.faults
            except (HydraException, OmegaConfBaseException) as error:
                found.append(check.explain(error))
            except Exception as error:  # Hydra would turn it into a warning and go on
                traceback.print_exc()
                found.append(f"the check itself failed: {type(error).__name__}: {error}")
            for fault in dict.fromkeys(found):
                where.setdefault(fault, []).append(number)
        if where:
            launch.refuse(self._in_jobs(jobs, fault, numbers) for fault, numbers in where.items())
        Preflight.passed = True

    def _in_jobs(self, jobs: Sequence[Sequence[str]], fault: str, numbers: Sequence[int]) -> str:
        """A fault with the first job that has it, unless all have."""
        if len(numbers) == len(jobs):
            return fault
        values = " ".join(o for o in jobs[numbers[0]] if o.lstrip("+").split("=")[0] in self.swept)
        more = f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else ""
        return f"job {numbers[0]}, {values}{more}: {fault}"


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config of a job, with `${hydra:...}` at work."""
    cfg = hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _task_overrides(config: DictConfig) -> list[str]:
    overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # they may hold ${...}
    assert isinstance(overrides, list)
    return [str(o) for o in overrides]


def _jobs(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """The overrides of each job, in the order of Hydra's basic sweeper."""
    choices = []
    for o in overrides:
        key = o.get_key_element()
        values = o.sweep_string_iterator() if o.is_sweep_override() else [o.get_value_element_as_str()]
        choices.append([f"{key}={v}" for v in values])
    yield from (list(job) for job in itertools.product(*choices))


def job_name() -> str:
    """`00_lr=0.001,model=cnn`: the job's number, then what the sweep varies, in the shortest unique form."""
    job = HydraConfig.get()
    if OmegaConf.is_missing(job.job, "num"):  # --cfg hydra --resolve
        return "JOB"
    value = dict(o.lstrip("+").split("=", 1) for o in job.overrides.task if "=" in o)
    last = [key.rpartition(".")[2] for key in Preflight.swept]
    width = max(2, len(str(Preflight.jobs - 1)))
    parts = []
    for key, short in zip(Preflight.swept, last, strict=True):
        text = value.get(key, "").strip("[]{}'\"")
        with suppress(ValueError):
            text = text if text.lstrip("+-").isdigit() else f"{float(text):g}"
        parts.append(f"{short if last.count(short) == 1 else key}={text}")
    name = f"{job.job.num:0{width}d}_" + ",".join(parts)
    return re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", name)[:120].rstrip("-_,.")


# ---- the entry point


def take_saved_config(argv: list[str]) -> list[str]:
    """Replace `--from-run DIR` and `--continue DIR` by the saved config of that run, under a name for Hydra.

    Raises:
        Refused: there is no saved config, or both options are given.
    """
    words = [
        part
        for word in argv
        for part in (word.split("=", 1) if word.split("=", 1)[0] in FROM_RUN else [word])
    ]
    given = [option for option in FROM_RUN if option in words]
    if not given:
        return own_targets(argv)
    at = words.index(given[0])
    if len(given) > 1 or words.count(given[0]) > 1 or at + 1 >= len(words):
        raise Refused(f"type one of {' DIR, '.join(FROM_RUN)} DIR, once, with the folder of a run")
    folder = Path(words[at + 1])
    saved = identity.load_config(folder)
    settings = ["run_id", "from_run", "resume"]  # of that start, not of the experiment
    if "eval_only=true" in words:
        settings.append("init_from")  # the weights are those that the run ended with
    places = [g for g in ("mode", "strategy") if any(w.startswith(f"{g}=") for w in words)]  # chosen anew
    node: dict[str, Any] = {k: v for k, v in saved.items() if k not in (*settings, *places)}
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    node["defaults"] = ["schema", "hydra_settings", *({g: "single"} for g in places), "_self_", *quiet]
    ConfigStore.instance().store(schema.SAVED, node)
    setting = FROM_RUN[given[0]] + "='" + str(folder.resolve()).replace("'", r"\'") + "'"
    return ["--config-name", schema.SAVED, *words[:at], setting, *words[at + 2 :]]


def flags_first(argv: list[str]) -> list[str]:
    """Put -m and --config-dir before the overrides: between them Hydra doesn't understand them.

    Raises:
        Refused: a setting written in another way than key=value.
    """
    flags, rest, words = [], [], iter(argv)
    for word in words:
        name = word.strip("-").partition("=")[0]
        if word in ("-m", "--multirun") or word.startswith("--config-dir="):
            flags.append(word)
        elif word in ("--config-dir", "-cd"):
            flags += [word, next(words, "")]
        elif word == "=":
            raise Refused("no blanks around =, please: type key=value")
        elif word.startswith("--") and (
            name in check.OTHER_NAMES or name in dict(schema.walk()) or "." in name
        ):
            raise Refused(
                f"{word}: settings are typed without dashes, {check.OTHER_NAMES.get(name, name)}=VALUE"
            )
        else:
            rest.append(word)
    return [*flags, *rest]


def own_targets(argv: list[str]) -> list[str]:
    """Where a group's `_target_` is typed but no option, leave out the arguments of the default option."""
    chosen = {word.partition("=")[0] for word in argv}
    groups = {g for g in schema.OPEN_GROUPS if f"{g}._target_" in chosen and g not in chosen}

    def words(word: str) -> list[str]:
        group, _, argument = word.partition("=")[0].partition(".")
        if group not in groups or not argument:
            return [word]
        return [f"{group}=own", word] if argument == "_target_" else [f"++{word}"]

    return [new for word in argv for new in words(word)]


def entry(main: Callable[[], Any]) -> None:
    """Run a @hydra.main function: one line for each mistake, the exit codes of `errors.py`."""
    schema.register()
    Preflight.passed, Preflight.sweep_folder = False, None
    resolvers: Mapping[str, Callable[..., Any]] = {
        "ddpx.sweep_dir": lambda: str(Preflight.sweep_folder or "outputs/SWEEP"),
        "ddpx.job": job_name,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving
    try:
        sys.argv[1:] = take_saved_config(flags_first(sys.argv[1:]))
        if said := list(check.slips(sys.argv[1:])):
            launch.refuse(said)
        main()
    except Refused as refusal:
        launch.refuse(refusal.faults)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:
        if Preflight.passed:  # a failed job of a sweep
            traceback.print_exc()
            sys.exit(Exit.FAILED)
        if wants_traceback:
            raise
        launch.refuse([check.explain(error)])
