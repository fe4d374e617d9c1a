"""Sums on the device."""

import torch

from ddp_experiments.metrics import Sums, exact_dtype
from ddp_experiments.world import World

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, 0, CPU, None, 1)


def test_sums_are_exact_where_float32_would_lose_the_small_number() -> None:
    sums = Sums(CPU)
    sums.add({"loss": torch.tensor(2.0**24), "accuracy": 1})
    sums.add({"loss": torch.tensor(1.0), "accuracy": torch.tensor(2)})
    assert sums.reduce(ALONE) == {"loss": 2.0**24 + 1, "accuracy": 3.0}
    assert exact_dtype(torch.device("mps")) == torch.float32  # it has no float64


def test_sums_keep_no_graph() -> None:
    sums = Sums(CPU)
    sums.add({"loss": torch.ones((), requires_grad=True) * 2})
    assert not sums.tensors["loss"].requires_grad
