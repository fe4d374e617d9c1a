"""Weights out of a run, and weights into a model. No torch.distributed."""

import logging
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ddp_experiments.checkpoint import directories
from ddp_experiments.checkpoint.names import load, model_tensors, strip_prefixes
from ddp_experiments.checkpoint.tensors import read, save
from ddp_experiments.errors import NoUsableCheckpoint, Refused

logger = logging.getLogger("ddp_experiments")
INSIDE = ("model_state_dict", "state_dict", "model")  # where plain checkpoint files keep the weights


def checkpoint_of(run: Path, weights: Literal["best", "last"]) -> Path:
    """The folder of a run's best or last checkpoint, verified.

    Raises:
        NoUsableCheckpoint: there is none, or it is damaged.
    """
    root = run / "checkpoints"
    found = directories.best(root) if weights == "best" else None
    if found is not None:
        try:
            directories.verify(found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoUsableCheckpoint(
                f"the best checkpoint of {run} is damaged: {error}; eval.weights=last"
            ) from None
        return found
    found = directories.newest(root)
    if found is None:
        raise NoUsableCheckpoint(f"{run} has no checkpoint yet")
    return found


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint as evaluations use them: averages if the run kept some."""
    return {**directories.tensors(checkpoint, "model"), **directories.tensors(checkpoint, "ema")}


def find_weights(path: Path, weights: Literal["best", "last"] = "best") -> dict[str, Tensor]:
    """Weights from a run, a checkpoint, a .safetensors file, or a .pt file with a plain state dict.

    Raises:
        Refused: there is no such file, or it holds something else.
        NoUsableCheckpoint: the run has no sound checkpoint.
    """
    if (path / "manifest.json").is_file():
        try:
            directories.verify(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoUsableCheckpoint(f"{path}: {error}") from None
        return weights_in(path)
    if path.is_dir():
        return weights_in(checkpoint_of(path, weights))
    if not path.is_file():
        raise Refused(
            f"{path}: no such file or folder; give a run, a checkpoint, .safetensors or .pt with weights"
        )
    try:
        return read(path) if path.suffix == ".safetensors" else _from_pickle(path)
    except ValueError as error:
        raise Refused(str(error)) from None


def _from_pickle(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler says, the file is not used
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: torch.load(weights_only=True) refuses it: {reason}") from None
    for key in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()
    ):
        where = f"at the top or under {', '.join(INSIDE)}"
        raise ValueError(f"{path} holds no state dict: want names and tensors, {where}")
    return found


def load_weights(model: nn.Module, path: Path, weights: Literal["best", "last"] = "best") -> None:
    """Overwrite a model's parameters and buffers.

    Raises:
        Refused: names, shapes or dtypes differ.
    """
    wanted, found = model_tensors(model), find_weights(path, weights)
    if found.keys() != wanted.keys():  # else a part of the model may be called like a wrapper
        found, prefixes = strip_prefixes(found)
        if prefixes:
            logger.info("%s: prefix %s taken off the names", path, ", ".join(prefixes))
    try:
        load(model, found, str(path))
    except ValueError as error:
        raise Refused(str(error)) from None


def export(run: Path, out: Path, weights: Literal["best", "last"] = "best") -> None:
    """Write a run's weights as one plain safetensors file.

    Raises:
        Refused: the file exists, or can't be written.
        NoUsableCheckpoint: the run has no sound checkpoint.
    """
    if out.exists():
        raise Refused(f"{out} exists; nothing is overwritten, give another name")
    found = find_weights(run, weights)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        save(found, temporary)
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Refused(f"can't write {out}: {error.strerror}") from None
