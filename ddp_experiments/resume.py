"""What continuing needs: the state that goes into a checkpoint, and the way back."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_experiments.checkpoint import directories
from ddp_experiments.checkpoint.names import load, model_tensors, optimizer_state, restore_optimizer
from ddp_experiments.checkpoint.tensors import cast, copy_into
from ddp_experiments.errors import Refused
from ddp_experiments.loop import Parts, State
from ddp_experiments.meeting import Meeting

logger = logging.getLogger("ddp_experiments")


def saved_form(
    parts: Parts, state: State, length: int
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """Tensors by kind and name, and everything else as plain values.

    Args:
        length: samples of the training part.
    """
    tensors, plain = optimizer_state(parts.module, parts.optimizer)
    kinds: dict[str, Mapping[str, Tensor]] = {"model": model_tensors(parts.module), "optimizer": tensors}
    if parts.ema is not None:
        kinds["ema"] = parts.ema.average
    return kinds, {
        "state": asdict(state),
        "data_length": length,
        "world_size": parts.world.world_size,
        "threads": parts.world.threads,
        "optimizer": plain,
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
    }


def find_checkpoint(folder: Path, meeting: Meeting) -> Path | None:
    """The checkpoint to go on from; None for a fresh start. All ranks must call.

    Raises:
        NoUsableCheckpoint: the run has checkpoints, but none is sound.
    """

    def newest() -> str | None:
        found = directories.newest(folder / "checkpoints")
        return str(found) if found else None

    found = meeting.rank0_decides("checkpoint", newest)
    return Path(found) if found else None


def read_state(checkpoint: Path | None, length: int) -> State:
    """Where the run stands.

    Raises:
        Refused: the data has another length than when the checkpoint was written.
    """
    if checkpoint is None:
        return State()
    saved = directories.read_json(checkpoint / "state.json")
    if saved["data_length"] != length:
        raise Refused(
            f"{checkpoint} was trained on {saved['data_length']} samples, but data has {length}; "
            "start a new run"
        )
    return State(**saved["state"])


def restore(parts: Parts, checkpoint: Path, state: State) -> None:
    """Give the parts what they had learnt. The schedule is walked, not read: it follows from the step."""
    saved = directories.read_json(checkpoint / "state.json")
    load(parts.module, directories.tensors(checkpoint, "model"), str(checkpoint))
    restore_optimizer(
        parts.module, parts.optimizer, directories.tensors(checkpoint, "optimizer"), saved["optimizer"]
    )
    if parts.ema is not None:
        averages = directories.tensors(checkpoint, "ema") or parts.ema.parameters
        copy_into(cast(averages, parts.ema.average), parts.ema.average, str(checkpoint))
    if parts.scaler is not None and saved["scaler"] is not None:
        parts.scaler.load_state_dict(saved["scaler"])
    elif parts.scaler is not None:
        logger.warning("%s has no loss scale of fp16; starting from the first one", checkpoint)
    for _ in range(state.step):
        parts.scheduler.step()
    here = {"world_size": parts.world.world_size, "threads": parts.world.threads}
    for key, now in here.items():
        if saved[key] != now and parts.world.is_rank0:
            logger.warning(
                "%s was %s, now %s: the same experiment, but no longer bit for bit", key, saved[key], now
            )
