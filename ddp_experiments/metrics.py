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
        self.values: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add to the sums; a name not seen before starts at 0."""
        for name, value in values.items():
            number = torch.as_tensor(value, device=self.device).detach().to(self.dtype)
            self.values[name] = self.values[name] + number if name in self.values else number

    def reduce(self, world: World) -> dict[str, float]:
        """Sums over all ranks, with one packed reduction. Collective: all ranks must call, with the same names."""
        names = sorted(self.values)
        packed = torch.stack([self.values[n] for n in names])
        world.all_reduce_sum(packed)
        return dict(zip(names, packed.tolist(), strict=True))  # host sync
