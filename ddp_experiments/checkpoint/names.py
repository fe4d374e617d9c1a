"""Model and optimizer state as tensors by parameter name, and plain values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_experiments.checkpoint.tensors import cast, copy_into

PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name.

    Raises:
        ValueError: the model has state that is no tensor, which can't be saved without pickle.
    """
    state = model.state_dict()
    if odd := [k for k, v in state.items() if not isinstance(v, Tensor)]:
        raise ValueError(f"{odd[0]} in the model's state is no tensor; keep it in a buffer, or leave it out")
    return state


def load(model: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Overwrite parameters and buffers by name.

    Raises:
        ValueError: names or shapes differ; nothing was copied.
    """
    wanted = model_tensors(model)
    copy_into(cast(tensors, wanted), wanted, what)


def strip_prefixes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Names without the prefixes of wrappers, and the prefixes that were found."""
    found: set[str] = set()

    def bare(name: str) -> str:
        for prefix in PREFIXES:
            if name.startswith(prefix) or f".{prefix}" in name:
                found.add(prefix)
        for prefix in PREFIXES * 2:
            name = name.removeprefix(prefix)
        return name.replace("._orig_mod.", ".")

    all_wrapped = all(n.startswith(PREFIXES) for n in tensors)
    if not all_wrapped and not any("_orig_mod." in n for n in tensors):
        return dict(tensors), []  # a model may have a part that is called module
    return {bare(name): t for name, t in tensors.items()}, sorted(found)


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state: tensors by `parameter.key`, and plain values by the same names."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[parameter]}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                plain[name] = value
    return tensors, plain


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Give the optimizer its saved state; its groups stay as the config made them.

    Raises:
        ValueError: state of a parameter that the optimizer doesn't have.
    """
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in {**tensors, **plain}.items():
        parameter, _, key = name.rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = value.clone() if isinstance(value, Tensor) else value
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    if unknown := sorted(by_parameter.keys() - set(ordered)):
        raise ValueError(f"the checkpoint has optimizer state of {unknown[0]}, which is not trained here")
    state = {i: by_parameter[name] for i, name in enumerate(ordered) if name in by_parameter}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
