"""From the global order to the microbatches of one rank.

Data in memory is gathered by index, several steps at a time; any other map-style data set goes through a
DataLoader.
Shape suffixes: B = samples of a microbatch.
"""

import functools
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ddp_experiments.data import order
from ddp_experiments.data.sets import TensorData
from ddp_experiments.process import die_with_parent

CHUNK_BYTES = 1 << 20  # gathered at once: as many steps as fit, at least one
DEVICE_SHARE = 4  # data in memory goes to an accelerator if it needs at most a quarter of the free memory


class Microbatch(NamedTuple):
    """What one forward pass gets. `weight_B` is None, or 0 where a sample only pads an empty microbatch."""

    inputs: Any
    targets: Any
    weight_B: Tensor | None


@dataclass(slots=True)
class Batch:
    """One rank's part of a global batch."""

    microbatches: list[Microbatch]
    count: int  # samples of the whole global batch
    epoch: int
    samples: int  # samples of the epoch consumed once this batch is trained
    ends_epoch: bool


class Batches:
    """The global batches of the training part, cut for one rank.

    Args:
        dataset: map-style, items (input, target). One that draws random numbers gets them per item from
            (seed, epoch, index). With `__getitems__` it is asked for whole microbatches, if it draws none.
        dtype: what floating-point inputs and targets are converted to.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        accumulation_steps: int,
        drop_last: bool,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
        num_workers: int = 0,
        overfit_one_batch: bool = False,
    ) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]
        self.batch_size, self.drop_last = min(global_batch_size, self.length), drop_last
        if drop_last and global_batch_size > self.length:
            raise ValueError(
                f"train.drop_last=true leaves no batch: train.global_batch_size={global_batch_size} but the "
                f"training part has {self.length} samples; try train.global_batch_size={self.length}"
            )
        self.seed, self.device, self.dtype = seed, device, dtype
        self.overfit, self.num_workers = overfit_one_batch, num_workers
        self.rank, self.world_size, self.accumulation_steps = rank, world_size, accumulation_steps
        self.dataset = in_memory(dataset, device, dtype)
        self._cuts: dict[int, list[tuple[int, int]]] = {}

    @property
    def steps_per_epoch(self) -> int:
        return 1 if self.overfit else sum(1 for _ in self._starts(0))

    def steps_from(self, samples: int) -> int:
        """Steps of an epoch from this sample on."""
        return 1 if self.overfit else sum(1 for _ in self._starts(samples))

    def sizes(self) -> list[int]:
        """The different sizes of global batches that an epoch has."""
        return sorted({size for _, size in self._starts(0)})

    def starting_at(self, epoch: int, samples: int) -> Iterator[Batch]:
        """Yield batches without end, from sample number `samples` of an epoch on."""
        if type(self.dataset) is TensorData:
            return self._gathered(self.dataset, epoch, samples)
        return self._loaded(self.dataset, epoch, samples)

    def _starts(self, samples: int) -> Iterator[tuple[int, int]]:
        if self.overfit:
            return iter([(0, self.batch_size)])
        size, drop = self.batch_size, self.drop_last
        return order.batch_starts(self.length, batch_size=size, drop_last=drop, start=samples)

    def _plan(self, epoch: int, samples: int) -> Iterator[tuple[int, int, int]]:
        """Yield (epoch, first sample, samples) of every global batch, epoch after epoch."""
        while True:
            for first, size in self._starts(samples):
                yield epoch, first, size
            epoch, samples = epoch + 1, 0

    def _order(self, epoch: int) -> Tensor:
        return order.permutation(self.length, seed=self.seed, epoch=0 if self.overfit else epoch)

    def _pieces(self, size: int) -> list[tuple[int, int]]:
        """This rank's microbatches in a global batch; someone else's sample stands in for an empty one."""
        if size not in self._cuts:
            self._cuts[size] = order.microbatch_bounds(
                size, rank=self.rank, world_size=self.world_size, accumulation_steps=self.accumulation_steps
            )
        return self._cuts[size]

    def _batch(self, parts: Iterator[tuple[Any, Any]], epoch: int, first: int, size: int) -> Batch:
        microbatches = []
        for low, high in self._pieces(size):
            inputs, targets = next(parts)
            weight_B = torch.zeros(1, device=self.device, dtype=self.dtype) if low == high else None
            microbatches.append(Microbatch(inputs, targets, weight_B))
        done = first + size
        ends = self.overfit or done + (self.batch_size if self.drop_last else 1) > self.length
        return Batch(microbatches, size, epoch, 0 if ends else done, ends)

    def _gathered(self, data: TensorData, epoch: int, samples: int) -> Iterator[Batch]:
        """Gather the rows of several steps with one call each for inputs and targets, then hand out views."""
        row_bytes = data.inputs[0].numel() * data.inputs.element_size()
        rows = max(1, CHUNK_BYTES // max(1, row_bytes))
        while True:
            indices = self._order(epoch).to(self.device)
            steps = list(self._starts(samples))
            at_once = max(1, rows // max(1, self.batch_size // self.world_size))
            for i in range(0, len(steps), at_once):
                chunk = steps[i : i + at_once]
                cuts = [(f + low, f + max(high, low + 1)) for f, n in chunk for low, high in self._padded(n)]
                index = (
                    torch.cat([indices[a:b] for a, b in cuts])
                    if len(cuts) > 1
                    else indices[cuts[0][0] : cuts[0][1]]
                )
                lengths = [b - a for a, b in cuts]
                inputs = torch.split(data.inputs.index_select(0, index), lengths)
                targets = torch.split(data.targets.index_select(0, index), lengths)
                parts = zip(inputs, targets, strict=True)
                for first, size in chunk:
                    yield self._batch(parts, epoch, first, size)
            epoch, samples = epoch + 1, 0

    def _padded(self, size: int) -> list[tuple[int, int]]:
        """The pieces of a global batch, with an empty one moved to where a sample is."""
        return [(low, high) if high > low else (min(low, size - 1),) * 2 for low, high in self._pieces(size)]

    def _loaded(self, dataset: Dataset[Any], epoch: int, samples: int) -> Iterator[Batch]:
        loader = make_loader(
            dataset, _Keys(self, epoch, samples), seed=self.seed, device=self.device, workers=self.num_workers
        )
        parts = (to_device(part, self.device, self.dtype) for part in loader)
        for epoch_, first, size in self._plan(epoch, samples):
            yield self._batch(parts, epoch_, first, size)


class _Keys:
    """A batch sampler without end: the (epoch, index) keys of each microbatch of one rank."""

    def __init__(self, batches: Batches, epoch: int, samples: int) -> None:
        self.batches, self.epoch, self.samples = batches, epoch, samples

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        current, indices = -1, torch.empty(0)
        for epoch, first, size in self.batches._plan(self.epoch, self.samples):
            if epoch != current:
                current, indices = epoch, self.batches._order(epoch)
            for low, high in self.batches._padded(size):
                yield [(epoch, i) for i in indices[first + low : first + max(high, low + 1)].tolist()]


def said_by(dataset: Dataset[Any], name: str, default: Any) -> Any:
    """What a data set says of itself, also behind a Subset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, name, default)


class SeededItems(Dataset[Any]):
    """Gives every item random numbers of its own, from (seed, epoch, index), whoever loads it.

    A data set with `__getitems__` is asked for many items at once and must not draw random numbers then;
    one that does says so by an attribute `random_items = True` and is asked item by item.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed, self.proven = dataset, seed, False
        batched = said_by(dataset, "__getitems__", None) is not None
        self.batched = batched and not said_by(dataset, "random_items", False)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        if not self.batched:
            return [self._item(epoch, index) for epoch, index in keys]
        before = None if self.proven else _random_state()
        items: list[Any] = self.dataset.__getitems__([index for _, index in keys])  # type: ignore[attr-defined]
        if before is not None and before != _random_state():
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ draws random numbers, so its items would depend "
                "on the number of ranks; set its attribute random_items = True: it is then asked item by item"
            )
        self.proven = True
        return items

    def _item(self, epoch: int, index: int) -> Any:
        order.seed_host(order.mix(self.seed, epoch, index, 2))
        return self.dataset[index]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]


def _random_state() -> tuple[Any, ...]:
    legacy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numbers = (legacy["state"]["key"].tobytes(), legacy["state"]["pos"], legacy["has_gauss"])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers


def _stay(rank_process: int, worker: int) -> None:
    """Signals reach the loader's processes, too, but it is the rank that ends them; they never outlive it."""
    if multiprocessing.get_start_method() != "forkserver":  # whose processes have another parent
        die_with_parent(rank_process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def make_loader(
    dataset: Dataset[Any], keys: Any, *, seed: int, device: torch.device, workers: int
) -> DataLoader[Any]:
    """A DataLoader over lists of (epoch, index) keys."""
    return DataLoader(
        SeededItems(dataset, seed),
        batch_sampler=keys,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=functools.partial(_stay, os.getpid()),
        generator=torch.Generator().manual_seed(seed),  # else it draws from the global one
        collate_fn=said_by(dataset, "collate", default_collate),
    )


def to_device(part: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move nested tensors to the device; floating-point ones to `dtype` as well."""
    if isinstance(part, Tensor):
        wanted = dtype if part.is_floating_point() else part.dtype
        return part.to(device, wanted, non_blocking=True)  # from pinned memory: no wait
    if isinstance(part, Mapping):
        return {k: to_device(v, device, dtype) for k, v in part.items()}
    if isinstance(part, list | tuple):
        moved = [to_device(v, device, dtype) for v in part]
        return type(part)(*moved) if hasattr(part, "_fields") else tuple(moved)
    return part


def in_memory(dataset: Dataset[Any], device: torch.device, dtype: torch.dtype) -> Dataset[Any]:
    """Tensors in memory as TensorData on the device, once for the whole run; anything else as it is."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        dataset = TensorData(*dataset.tensors)
    if type(dataset) is not TensorData:
        return dataset  # a class derived from it may have items of its own
    tensors = (dataset.inputs, dataset.targets)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if sum(t.numel() * t.element_size() for t in tensors) > free // DEVICE_SHARE:
            return _OnHost(dataset)
    return TensorData(*(to_device(t, device, dtype) for t in tensors))


class _OnHost(Dataset[Any]):
    """Data in memory that is too large for the device: fetched in whole microbatches by the loader."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        index = torch.as_tensor(indices)
        return [(self.data.inputs.index_select(0, index), self.data.targets.index_select(0, index))]

    @staticmethod
    def collate(items: list[Any]) -> Any:
        return items[0]


class EvaluationBatches:
    """This rank's share of a part, as often as asked: each sample once over all ranks, in file order.

    Every microbatch but the last of a rank has the same size on every world size. A rank without a share gets
    one sample of weight 0, so that it has the same metrics as the others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        microbatch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
        num_workers: int = 0,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.dataset = in_memory(dataset, device, dtype)
        low, high = order.bounds(len(dataset), rank, world_size)  # type: ignore[arg-type]
        self.weight_B = torch.zeros(1, device=device, dtype=dtype) if low == high else None
        if low == high:
            low, high = 0, 1
        starts = range(low, high, microbatch_size)
        self.pieces = [range(start, min(start + microbatch_size, high)) for start in starts]
        self.loader: DataLoader[Any] | None = None
        if type(self.dataset) is not TensorData:
            keys = [[(-1, i) for i in piece] for piece in self.pieces]
            self.loader = make_loader(self.dataset, keys, seed=seed, device=device, workers=num_workers)

    def __iter__(self) -> Iterator[Microbatch]:
        for part in self.loader if self.loader is not None else self._slices():
            inputs, targets = to_device(part, self.device, self.dtype)
            yield Microbatch(inputs, targets, self.weight_B)

    def _slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(self.dataset, TensorData)
        for piece in self.pieces:
            yield (
                self.dataset.inputs[piece.start : piece.stop],
                self.dataset.targets[piece.start : piece.stop],
            )
