"""The only place where a name in a config becomes an object.

A `_target_` is taken from libraries we trust by name and from the project's own code, and only when it makes
an object of its group's kind. DDPX_TRUST=package in the environment, never in a config, trusts one more.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

LIBRARIES = frozenset({"ddp_experiments", "timm", "torch", "torchmetrics", "torchvision", "transformers"})
PROJECT = Path(__file__).resolve().parent.parent
FILLED_IN = {  # arguments that the program gives, by group; the optional ones only if the signature has them
    "optimizer": {"params"},
    "scheduler": {"optimizer", "total_steps"},
}
OPTIONAL = {"split", "total_steps"}


def kinds(group: str) -> tuple[type, ...]:
    """What a group's target has to make."""
    import torch
    from torch.utils.data import Dataset

    from ddp_experiments.data import Splits
    from ddp_experiments.tasks import Task

    return {
        "model": (torch.nn.Module,),
        "data": (Splits, Dataset),
        "task": (Task,),
        "optimizer": (torch.optim.Optimizer,),
        "scheduler": (torch.optim.lr_scheduler.LRScheduler,),
    }[group]


def is_trusted(root: str) -> bool:
    """Tell whether a top-level package is a trusted library or lies in the project; imports nothing."""
    if root in LIBRARIES or root in os.environ.get("DDPX_TRUST", "").split(","):
        return True
    spec = None if root in sys.stdlib_module_names else importlib.util.find_spec(root)
    if spec is None or not spec.has_location or not spec.origin:
        return False
    origin = Path(spec.origin).resolve()
    own = any(f in origin.parents for f in (PROJECT, Path.cwd().resolve()))
    return own and not {"site-packages", "dist-packages"} & set(origin.parts)


def resolve(name: object, key: str) -> Any:
    """Import the object called `name`; `key` is where it stands in the config.

    Raises:
        ValueError: it is not of a trusted origin or can't be found.
    """
    wanted, parts = f"{key}._target_={name}: ", str(name).split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not p.startswith("_") for p in parts):
        raise ValueError(wanted + "want package.module.Class, without private parts")
    if not is_trusted(parts[0]):
        raise ValueError(
            wanted + f"{parts[0]!r} is neither in this project nor one of {', '.join(sorted(LIBRARIES))}; "
            f"put the file beside train.py, or set DDPX_TRUST={parts[0]} in the environment"
        )
    for i in range(len(parts) - 1, 0, -1):  # the longest module first
        module = ".".join(parts[:i])
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise ValueError(wanted + f"importing {module}: {error}") from error
        except (ImportError, RuntimeError) as error:  # a binary package that doesn't fit the installed torch
            raise ValueError(wanted + f"importing {module}: {error}") from error
    else:
        raise ValueError(wanted + f"no module named {parts[0]!r} is installed")
    for part in parts[i:]:
        if not hasattr(found, part):
            names = [k for k, v in vars(found).items() if inspect.isclass(v) or inspect.isfunction(v)]
            close = get_close_matches(part, names, 1)
            raise ValueError(
                wanted + f"no {part!r} in {found.__name__}" + (f"; did you mean {close[0]}?" if close else "")
            )
        found = getattr(found, part)
    defined_in = str(getattr(found, "__module__", "builtins"))
    if not is_trusted(defined_in.split(".")[0]):
        raise ValueError(wanted + f"it is defined in {defined_in}, which is not trusted")
    return found


def made_by(target: Any) -> Any:
    """The class of what a target makes: itself, or a function's annotated return; None if unknown."""
    if inspect.isclass(target):
        return target
    if not inspect.isfunction(target):
        return None
    returned = typing.get_type_hints(target).get("return")
    origin = typing.get_origin(returned)
    return None if origin in (typing.Union, types.UnionType) else origin or returned


def of_kind(name: object, group: str) -> Any:
    """The group's target, which must make an object of the group's kind."""
    target, wanted = resolve(name, group), kinds(group)
    made = made_by(target)
    if not (inspect.isclass(made) and issubclass(made, wanted)) or (
        made in wanted and inspect.isclass(target)
    ):
        names = " or ".join(k.__name__ for k in wanted)
        raise ValueError(
            f"{group}._target_={name}: want a subclass of {names}, or a function annotated to return one"
        )
    return target


def part_of(name: object, key: str) -> Any:
    """A nested target: a module or data set of a trusted origin, a transform, or any class of the project."""
    import torch
    from torch.utils.data import Dataset

    target = resolve(name, key)
    made, module = made_by(target), str(target.__module__)
    plain = module.startswith("torchvision.transforms") or module.split(".")[0] not in LIBRARIES
    if not inspect.isclass(made) or not (issubclass(made, torch.nn.Module | Dataset) or plain):
        raise ValueError(
            f"{key}._target_={name}: want a module, a data set or a transform inside another target"
        )
    return target


def arguments(
    node: Mapping[str, Any], target: Any, key: str, filled_in: frozenset[str] | set[str]
) -> dict[str, Any]:
    """The keyword arguments of a node, checked against the target's signature; makes nothing.

    Raises:
        ValueError: an unknown, missing or wrongly typed argument.
    """
    given = {k: v for k, v in node.items() if k != "_target_"}
    if odd := [k for k in given if k.startswith("_")]:
        raise ValueError(f"{key}.{odd[0]} is not supported; build such parts inside a class of your own")
    signature, called = inspect.signature(target), getattr(target, "__qualname__", str(target))
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in signature.parameters.values() if p.kind in by_name]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in given.items():
        if name in filled_in:
            raise ValueError(f"{key}.{name} is filled in by the program; leave it out")
        if name not in names and not open_ended:
            allowed = [n for n in names if n not in filled_in]
            close = get_close_matches(name, allowed, 1)
            hint = f"did you mean {key}.{close[0]}? " if close else ""
            raise ValueError(
                f"{key}.{name}: {called} has no such argument; {hint}allowed: {', '.join(allowed)}"
            )
        if not is_nested(value) and not fits(value, hints.get(name, Any)):
            hint = f"; without quotes it is one: {key}.{name}={value}" if _is_number(value) else ""
            raise ValueError(f"{key}.{name}={value!r}: {called} wants {readable(hints[name])}{hint}")
    required = [n for n in filled_in if n not in OPTIONAL or n in names]
    try:
        signature.bind(**given, **dict.fromkeys(required))
    except TypeError as error:
        raise ValueError(f"{key}: {called}: {error}; give {key}.<argument>=...") from None
    return given


def check(node: object, group: str) -> None:
    """Find what is wrong with an open group without making anything; nested targets included.

    Raises:
        ValueError: in one line, with the key and what is allowed.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ValueError(
            f"{group}={node!r} is no option and has no _target_; choose an option, e.g. {group}=NAME"
        )
    target = of_kind(node["_target_"], group)
    for path, part in nested(arguments(node, target, group, _filled_in(node, group)), group):
        arguments(part, part_of(part["_target_"], path), path, set())
    if needed := _needed_by_step(target) if group in FILLED_IN else []:
        raise ValueError(
            f"{group}._target_={node['_target_']}: its step() needs {needed[0]}, which the loop doesn't give"
        )


def _needed_by_step(target: Any) -> list[str]:
    """Arguments without which the `step` of an optimizer or scheduler can't be called."""
    parameters = list(inspect.signature(getattr(target, "step", lambda self: None)).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def build(node: Mapping[str, Any], group: str, **runtime: Any) -> Any:
    """Make the object of an open group. Optional runtime arguments go in only where the signature has one."""
    target = of_kind(node["_target_"], group)
    given = arguments(node, target, group, _filled_in(node, group))
    names = inspect.signature(target).parameters
    runtime = {k: v for k, v in runtime.items() if k not in OPTIONAL or k in names}
    return target(**{k: _make(v, f"{group}.{k}") for k, v in given.items()}, **runtime)


def _filled_in(node: Mapping[str, Any], group: str) -> set[str]:
    """The arguments that the program gives: a data set without its parts is made once for each `split`."""
    if group == "data" and "split" not in node and makes_dataset(node):
        return {"split"}
    return FILLED_IN.get(group, set())


def takes(node: Mapping[str, Any], group: str, name: str) -> bool:
    """Tell whether the group's target has an argument of that name."""
    return name in inspect.signature(of_kind(node["_target_"], group)).parameters


def has_horizon(scheduler: Mapping[str, Any]) -> bool:
    """Tell whether the learning rate follows from the length of the run."""
    return takes(scheduler, "scheduler", "total_steps")


def makes_dataset(node: Mapping[str, Any]) -> bool:
    """Tell whether the data's target makes one data set, not all parts at once."""
    from torch.utils.data import Dataset

    return issubclass(made_by(of_kind(node["_target_"], "data")), Dataset)


def is_nested(value: object) -> bool:
    return any(True for _ in nested(value, ""))


def nested(value: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (key, node) of every node with a `_target_` inside a value, the outer one first."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield path, value
        for k, v in value.items():
            yield from nested(v, f"{path}.{k}")
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from nested(v, f"{path}.{i}")


def _make(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        if "_target_" not in value:
            return {k: _make(v, f"{path}.{k}") for k, v in value.items()}
        target = part_of(value["_target_"], path)
        return target(
            **{k: _make(v, f"{path}.{k}") for k, v in arguments(value, target, path, set()).items()}
        )
    if isinstance(value, list | tuple):
        return [_make(v, f"{path}.{i}") for i, v in enumerate(value)]
    return value


def readable(hint: Any) -> str:
    """A type as it is written in code, without what YAML can't make."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    names = ["None" if p is type(None) else getattr(p, "__name__", str(p)) for p in parts if not _of_torch(p)]
    return " or ".join(names) or str(hint)


def _of_torch(hint: Any) -> bool:
    return inspect.isclass(hint) and hint.__module__.split(".")[0] == "torch"


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(float(value) + 1)
    except ValueError:
        return False


def fits(value: object, hint: Any) -> bool:
    """Tell whether a plain value may be a `hint`: False only when it surely is not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is typing.Literal:
        return value in args
    hint = origin or hint
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (tuple, list):
        return isinstance(value, tuple | list)
    if hint in (bool, str, dict, type(None)):
        return isinstance(value, hint)
    return not _of_torch(hint)  # YAML can't make a tensor
