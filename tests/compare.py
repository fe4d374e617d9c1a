"""Reading two runs and comparing them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_experiments.checkpoint import directories
from ddp_experiments.tracking import read_metrics

WALL_CLOCK = "perf/"


def last(folder: Path) -> Path:
    found = directories.newest(folder / "checkpoints")
    assert found is not None
    return found


def weights(folder: Path, *kinds: str) -> dict[str, Tensor]:
    """Everything learnt, from the newest checkpoint: model, optimizer and averages."""
    return {
        f"{k}/{n}": t
        for k in kinds or ("model", "optimizer", "ema")
        for n, t in directories.tensors(last(folder), k).items()
    }


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def assert_bitwise_equal(a: Path, b: Path) -> None:
    """Weights, optimizer, averages, step and every logged value but wall-clock ones."""
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert [k for k in left if not torch.equal(left[k], right[k])] == []
    assert (
        directories.read_json(last(a) / "state.json")["state"]
        == directories.read_json(last(b) / "state.json")["state"]
    )
    assert points(a) == points(b)


def points(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without wall-clock values."""
    return [{k: v for k, v in line.items() if not k.startswith(WALL_CLOCK)} for line in read_metrics(folder)]


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in points(folder) if "train/loss" in line]


def trains(folder: Path) -> bool:
    """Tell whether a run has logged a loss."""
    return (folder / "metrics.jsonl").exists() and bool(losses(folder))
