"""The order of samples as a pure function of (seed, epoch): no rank, device or restart can change it."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to a seed below 2**63, by the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1


def seed_host(seed: int) -> None:
    """Seed the generators of this process that data may draw from: torch's on the CPU, Python's, numpy's."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 400 times as long
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def permutation(length: int, *, seed: int, epoch: int) -> Tensor:
    """The order of all samples in an epoch.

    Shape: (length,), int64, on the CPU.
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch, 1))
    return torch.randperm(length, generator=generator)


def bounds(size: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of one of `parts` slices of `size` samples; sizes differ by at most one."""
    return size * part // parts, size * (part + 1) // parts


def microbatch_bounds(
    size: int, *, rank: int, world_size: int, accumulation_steps: int
) -> list[tuple[int, int]]:
    """Where the microbatches of a rank lie in a global batch; an empty one has start == end."""
    low, high = bounds(size, rank, world_size)
    pieces = (bounds(high - low, i, accumulation_steps) for i in range(accumulation_steps))
    return [(low + start, low + end) for start, end in pieces]


def batch_starts(
    length: int, *, batch_size: int, drop_last: bool, start: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (first sample, samples) of each global batch of an epoch from sample `start` on."""
    for first in range(start, length, batch_size):
        size = min(batch_size, length - first)
        if size == batch_size or not drop_last:
            yield first, size


def smallest_share(sizes: Sequence[int], *, world_size: int, accumulation_steps: int) -> int:
    """The fewest samples that any microbatch of any rank gets, over global batches of these sizes."""
    return min(size // world_size // accumulation_steps for size in sizes)
