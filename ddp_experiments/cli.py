"""From the command line to a checked config, and errors a person can use. No torch until a run starts.

Hydra composes the config; `Preflight` checks it, for a sweep every job, before any group or folder exists.
"""

import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from omegaconf.resolvers import oc

from ddp_experiments import config as schema
from ddp_experiments import environment, identity, launch
from ddp_experiments.errors import Exit, Refused

SECRET = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|(auth|access|api|hf|bearer)_(token|key)|api_?key)$|^token$"
)
SAVED = "saved_run"  # the name under which --from-run gives a saved config to Hydra
FROM_RUN = {"--from-run": "from_run", "--continue": "resume.run"}  # option: the setting that keeps its folder
PRESETS = ("experiment", "debug")
OTHER_NAMES = {  # what people coming from elsewhere type
    "batch_size": "train.global_batch_size",
    "device": "mode.device",
    "dropout": "model.dropout",
    "epochs": "train.max_epochs",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "num_epochs": "train.max_epochs",
    "num_workers": "train.num_workers",
    "steps": "train.max_steps",
    "weight_decay": "optimizer.weight_decay",
    "workers": "train.num_workers",
}
OF_HYDRA = ("mode", "launcher", "sweeper", "searchpath", "verbose")  # what may be set of Hydra's own settings


# ---- what is wrong with a composed config


def near(word: str, names: Iterable[str]) -> str:
    """A 'did you mean' for a mistyped name, or nothing."""
    if word in OTHER_NAMES:
        return f" Did you mean {OTHER_NAMES[word]}?"
    names = list(names)
    last = word.rpartition(".")[2]
    swapped = [n for n in names if sorted(n) == sorted(word)]  # two letters changed places
    hit = swapped or get_close_matches(word, names, 1) or [n for n in names if n.rpartition(".")[2] == last]
    return f" Did you mean {hit[0]}?" if hit else ""


def leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, str]]:
    """Yield (dotted key, parent node, last key) of all entries, without resolving anything."""
    for key in list(node):
        name, child = str(key), node._get_node(key)
        yield f"{prefix}{name}", node, name
        if isinstance(child, DictConfig) and not (
            child._is_missing() or child._is_none() or child._is_interpolation()
        ):
            yield from leaves(child, f"{prefix}{name}.")


def faults(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Everything wrong with a composed config, a line each. Imports torch only when the rest is right.

    Args:
        words: what made it, for the line to type instead.
    """
    known = [key for key, _ in schema.walk()]
    said = []
    for path, parent, key in leaves(cfg):
        declared = getattr(OmegaConf.get_type(parent), "__dataclass_fields__", None)
        if declared is not None and key not in declared:
            said.append(f"{path}: no such setting.{near(path, known)} Allowed: {', '.join(declared)}")
            continue
        try:
            if OmegaConf.is_missing(parent, key):
                said.append(f"{path} has no value; give {path}=...")
            elif (
                SECRET.search(key)
                and not OmegaConf.is_interpolation(parent, key)
                and isinstance(parent[key], str | int | float)
                and not isinstance(parent[key], bool)
            ):
                said.append(f"{path}: a secret must not be written down; use '{path}=${{oc.env:NAME}}'")
            else:
                parent[key]  # resolves it
        except OmegaConfBaseException as error:
            said.append(f"{path}: {unresolved(error)}")
    if said:
        return said
    config = typed(cfg)
    said += schema.conflicts(config)
    said += launch.faults(config, environment.read(), words)
    return said or launch.target_faults(config)


def unresolved(error: OmegaConfBaseException) -> str:
    """Why a value with `${...}` can't be had."""
    text = str(error).splitlines()[0]
    if found := re.search(r"Environment variable '(\w+)' not found", text):
        name = found[1]
        return f"the environment variable {name} is not set; export it, or give ${{oc.env:{name},DEFAULT}}"
    return text


def typed(cfg: DictConfig) -> schema.Config:
    """The typed config; DictConfig ends here."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, schema.Config)
    return config


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


def slips(words: Iterable[str]) -> Iterator[str]:
    """Mistakes that Hydra lets pass or tells badly: a key given twice, one removed, a number as option."""
    given = [w for w in words if w.startswith("~") or ("=" in w and not w.startswith("-"))]
    try:
        overrides = OverridesParser.create().parse_overrides(given)
    except HydraException:
        return  # Hydra says it
    keys = [o.key_or_group for o in overrides if not o.is_delete()]
    yield from (f"{k} is given twice; leave one" for k in dict.fromkeys(keys) if keys.count(k) > 1)
    declared = dict(schema.walk())
    for o in overrides:
        key, value = o.key_or_group, o.value()
        plain = isinstance(value, int | float)
        head, _, rest = key.replace("/", ".").partition(".")
        if head == "hydra" and rest.split(".")[0] not in OF_HYDRA:
            allowed = ", ".join(f"hydra.{name}" for name in OF_HYDRA)
            yield f"{o.input_line}: the run folder and its log are the program's own; allowed are {allowed}"
        elif o.is_delete():
            yield f"{o.input_line}: nothing may be removed; choose an option, or {key}=null if it allows that"
        elif key in (*schema.GROUPS, *PRESETS) and (plain or value is None):
            yield f"{o.input_line}: want the name of an option; python train.py --help lists them"
        elif key in declared and declared[key].type is bool and plain and not isinstance(value, bool):
            yield f"{o.input_line}: want true or false"


def orphans(overrides: Sequence[str], choices: Mapping[str, Any]) -> Iterator[str]:
    """A preset's value for a group that the command line replaces: it would tune another class."""
    given = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
    repository = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
    for preset in PRESETS:
        option = given.get(preset, choices.get(preset))
        found = repository.load_config(f"{preset}/{option}") if option else None
        if found is None:
            continue
        own = {
            d.group.lstrip("/"): d.value
            for d in found.defaults_list
            if isinstance(d, GroupDefault) and d.group
        }
        for group in schema.OPEN_GROUPS:
            left = [k for k in found.config.get(group) or {} if f"{group}.{k}" not in given]
            if left and given.get(group, own.get(group)) != own.get(group):
                yield (
                    f"{preset}={option} sets {group}.{left[0]}={found.config[group][left[0]]} for "
                    f"{group}={own.get(group)}, but the command line says {group}={given[group]}; "
                    f"give {group}.{left[0]}=... too, or {preset}=none"
                )


def explain(error: Exception) -> str:
    """One line for an error of Hydra or OmegaConf, with what is allowed and the nearest known name."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(error.options)
        return f"{group}={name}: no such option.{near(name, error.options)} Allowed: {options}"
    if isinstance(error, OverrideParseException):
        lines = [
            line for line in error.message.splitlines() if not line.startswith(("Error parsing", "See "))
        ]
        reason = lines[0].split(" expecting ")[0] if lines else "not understood"
        return (
            f"{error.override}: want key=value ({reason}); quote a value with odd characters: 'key=\"a, b\"'"
        )
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        key, names = str(cause.full_key), [str(k) for k in cause.parent_node if k != "hydra"]
        section = key.rpartition(".")[0]
        if not names:
            return f"{key}: {section} is a value and has no parts; set {section}=... itself"
        full = [f"{section}.{n}" if section else n for n in names]
        return f"{key}: no such setting.{near(key, full)} Allowed: {', '.join(names)}"
    text = _joined(error, cause)
    if isinstance(cause, ValidationError) and text.startswith(merging := "Error merging override "):
        declared = dict(schema.walk())
        if str(cause.full_key) in declared:
            given = str(error).splitlines()[0].removeprefix(merging)
            return f"{given}: want {schema.wanted(declared[str(cause.full_key)].type)}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)'(?= |$)", text):
        return f"{ambiguous[1]} has several values: add -m for a sweep, or write a list as [a,b]"
    if double := re.match(r"Multiple values for (\w+)\.", text):
        return f"+{double[1]}=...: {double[1]} is chosen already; leave out the +"
    if "No match in the defaults list" in text and SAVED in " ".join(sys.argv):
        return f"{text.split('.')[0]}: --from-run and --continue take single settings, not other groups"
    return text


def _joined(error: Exception, cause: BaseException | None) -> str:
    """The texts of an error and its cause as one line, without what helps only programmers."""
    noise = ("full_key", "object_type", "reference_type", "Set the environment variable HYDRA_FULL_ERROR")
    lines = [line.strip() for line in f"{error}\n{cause or ''}".splitlines() if line.strip()]
    return " ".join(line for line in dict.fromkeys(lines) if not line.startswith(noise))


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
                    found += [*slips(job), *launch.sweep_faults(environment.read(), job)]
                found = found or list(orphans(job, choices))
                if not found:
                    found += faults(_compose(config_name, job), job if sweep else launch.typed_words())
            except Refused as refusal:
                found += refusal.faults
            except (HydraException, OmegaConfBaseException) as error:
                found.append(explain(error))
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
    ConfigStore.instance().store(SAVED, node)
    setting = FROM_RUN[given[0]] + "='" + str(folder.resolve()).replace("'", r"\'") + "'"
    return ["--config-name", SAVED, *words[:at], setting, *words[at + 2 :]]


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
        elif word.startswith("--") and (name in OTHER_NAMES or name in dict(schema.walk()) or "." in name):
            raise Refused(f"{word}: settings are typed without dashes, {OTHER_NAMES.get(name, name)}=VALUE")
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
        if said := list(slips(sys.argv[1:])):
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
        launch.refuse([explain(error)])
