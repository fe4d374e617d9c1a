"""Exact sums on the device, reduced once and divided once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ddp_experiments.world import World


def exact_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sums:
    """Named sums that stay on the device until they are reduced."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, exact_dtype(device)
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}  # known on the host: they cost no operation of the device

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add to the sums; a name not seen before starts at 0."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                exact = value.detach().to(self.dtype)
                before = self.tensors.get(name, self.numbers.pop(name, None))
                self.tensors[name] = exact if before is None else before + exact
            elif name in self.tensors:
                self.tensors[name] = self.tensors[name] + value
            else:
                self.numbers[name] = self.numbers.get(name, 0.0) + value

    def reduce(self, world: World) -> dict[str, float]:
        """Sums over all ranks, with one packed reduction.

        Collective: all ranks must call, with the same names.
        """
        names, known = sorted(self.tensors), sorted(self.numbers)
        host = [self.numbers[n] for n in known]
        packed = torch.tensor(host, dtype=self.dtype, device=self.device)
        if names:
            packed = torch.cat([torch.stack([self.tensors[n] for n in names]), packed])
        world.all_reduce_sum(packed)
        return dict(zip([*names, *known], packed.tolist(), strict=True))  # host sync
