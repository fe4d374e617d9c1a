"""What is wrong with a command line or a composed config, in one line a fault.

No torch until the rest is right.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.core.default_element import GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from ddp_experiments import config as schema
from ddp_experiments import environment, launch

SECRET = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|(auth|access|api|hf|bearer)_(token|key)|api_?key)$|^token$"
)
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
    config = schema.typed(cfg)
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
    if "No match in the defaults list" in text and schema.SAVED in " ".join(sys.argv):
        return f"{text.split('.')[0]}: --from-run and --continue take single settings, not other groups"
    return text


def _joined(error: Exception, cause: BaseException | None) -> str:
    """The texts of an error and its cause as one line, without what helps only programmers."""
    noise = ("full_key", "object_type", "reference_type", "Set the environment variable HYDRA_FULL_ERROR")
    lines = [line.strip() for line in f"{error}\n{cause or ''}".splitlines() if line.strip()]
    return " ".join(line for line in dict.fromkeys(lines) if not line.startswith(noise))
