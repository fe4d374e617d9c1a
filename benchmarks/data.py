"""python -m benchmarks.data: getting batches, against the usual ways.

1. Epochs of the article's job, training included: its own loader (8 workers, started anew each epoch), a
   DataLoader without workers, and ours, in turns.
2. Batches of 60000×784 float32: DataLoader's per-sample path against ours.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_experiments.data import Batches, TensorData
from ddp_experiments.data.synthetic import article


class PerSample(Dataset[Any]):
    """The data as a map-style data set without batched fetch."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def our_batches(data: TensorData, batch_size: int) -> Callable[[], Iterable[Any]]:
    """Our batches, an epoch at a call."""
    batches = Batches(
        data,
        global_batch_size=batch_size,
        accumulation_steps=1,
        drop_last=False,
        seed=0,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    stream = batches.starting_at(0, 0)

    def epoch() -> Iterable[Any]:
        for batch in stream:
            yield batch.microbatches[0][:2]
            if batch.ends_epoch:
                return

    return epoch


def article_epochs() -> None:
    data = article().train
    assert isinstance(data, TensorData)
    shared = {"batch_size": 128, "shuffle": True}
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "the article's loader, 8 workers": lambda: DataLoader(PerSample(data), num_workers=8, **shared),  # type: ignore[arg-type]
        "DataLoader, no workers": lambda: DataLoader(PerSample(data), **shared),  # type: ignore[arg-type]
        "ours": our_batches(data, 128),
    }
    rounds = {"the article's loader, 8 workers": 1, "DataLoader, no workers": 20, "ours": 20}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for turn in range(9):
        for name, epoch in ways.items():
            before = time.perf_counter()
            for _ in range(rounds[name]):
                for inputs, targets in epoch():
                    optimizer.zero_grad(set_to_none=True)
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
            if turn:  # the first is to warm up
                seconds[name].append((time.perf_counter() - before) / rounds[name])
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print("an epoch of the article's job: 1000×10, batch 128")
    for name, value in median.items():
        print(f"  {name:32} {value * 1e3:8.2f} ms   ours / it {median['ours'] / value:.3f}")


def gather() -> None:
    data = TensorData(torch.randn(60_000, 784), torch.randint(10, (60_000,)))
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "DataLoader, per sample": lambda: DataLoader(PerSample(data), batch_size=256, shuffle=True),
        "ours": our_batches(data, 256),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, epoch in ways.items():
            times = []
            before = time.perf_counter()
            for _ in epoch():
                now = time.perf_counter()
                times.append(now - before)
                before = now
            rates[name].append(256 / statistics.median(times))
    median = {name: statistics.median(values) for name, values in rates.items()}
    print("samples a second from 60000×784 float32, batch 256")
    for name, value in median.items():
        print(f"  {name:32} {value:12,.0f}   ours / it {median['ours'] / value:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    article_epochs()
    gather()


if __name__ == "__main__":
    main()
