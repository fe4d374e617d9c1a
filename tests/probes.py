"""Parts for configs in tests: they record what happens and inject faults, told by the environment.

TEST_RECORD=FOLDER   where records go, a file a rank
TEST_FAULT=KIND@STEP[:RANK]   a signal's name, raise, exit, sleepSECONDS, warn or nan at an optimizer step, on
                              one rank or all
TEST_FAULT_ONCE=FILE   only as long as the file is not there; it is made then
TEST_PAUSE=SECONDS   each optimizer step, and making the schedule, takes so much longer
TEST_GO=FILE   the data of `indexed` comes only once the file is there; "ready" is recorded before
"""

import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, StepLR
from torch.utils.data import Dataset

from ddp_experiments.data import Splits, TensorData
from ddp_experiments.data.order import mix
from ddp_experiments.data.synthetic import teacher
from ddp_experiments.optim import WarmupCosine
from ddp_experiments.tasks import Classification, Regression

EVALUATED = 100_000  # indices of validation samples start here


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def sound(
    samples: int = 256, features: int = 64, outputs: int = 10, noise: float = 0.1, data_seed: int = 0
) -> Splits:
    """Images' worth of random classes; a fault at step 0 comes while the data is made."""
    kind = fault(0) or ""
    if kind == "data":
        raise RuntimeError("injected")
    if kind.startswith("sleep"):
        time.sleep(float(kind[5:]))
    if kind == "die":
        os._exit(5)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    generator = torch.Generator().manual_seed(data_seed)

    def part(n: int) -> TensorData:
        inputs = torch.randn(n, features, generator=generator)
        return TensorData(inputs, torch.randint(outputs, (n,), generator=generator))

    return Splits(part(samples), part(64))


def of_this_rank(samples: int = 64) -> Splits:
    """Data that differs between ranks."""
    inputs = torch.full((samples, 64), float(rank()))
    return Splits(TensorData(inputs, torch.zeros(samples, dtype=torch.long)))


def record(kind: str, line: str) -> None:
    folder = os.environ.get("TEST_RECORD")
    if folder:
        with (Path(folder) / f"{kind}.{rank()}").open("a") as file:
            file.write(line + "\n")


def fault(step: int) -> str | None:
    """The fault that is due on this rank at this step."""
    kind, _, rest = os.environ.get("TEST_FAULT", "").partition("@")
    at, _, who = rest.partition(":")
    if not kind or int(at) != step or who not in ("", str(rank())):
        return None
    once = os.environ.get("TEST_FAULT_ONCE")
    if once is not None:
        if Path(once).exists():
            return None
        Path(once).touch()
    return kind


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Data in memory behind items that draw random numbers, so that it goes through a loader."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn_like(inputs), target


def indexed(samples: int = 40, validation: int = 23, noisy: bool = False) -> Splits:
    """Regression data whose target is the sample's number; inputs are fixed random features."""
    if "TEST_GO" in os.environ:
        record("ready", "")
        while not Path(os.environ["TEST_GO"]).exists():
            time.sleep(0.001)

    def part(n: int, first: int) -> TensorData:
        generator = torch.Generator().manual_seed(mix(n, first))
        return TensorData(
            torch.randn(n, 64, generator=generator), torch.arange(first, first + n).float().unsqueeze(1)
        )

    train = part(samples, 0)
    return Splits(Noisy(train) if noisy else train, part(validation, EVALUATED) if validation else None)


def without_validation(
    samples: int = 40, features: int = 10, outputs: int = 1, noise: float = 0.1, data_seed: int = 0
) -> Splits:
    """The teacher's data, with a validation part of no samples."""
    parts = teacher(samples, features, outputs, noise, data_seed)
    return Splits(parts.train, TensorData(torch.empty(0, features), torch.empty(0, outputs)))


class Recording(Regression):
    """Writes down which samples each logged step and each evaluation saw. Loss on target / 100."""

    def loss_B(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss_B(outputs, (targets % EVALUATED) / 100)

    def sums(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> dict[str, Tensor]:
        numbers = [int(t) for t in targets.flatten().tolist()]
        real = (
            numbers if weight_B is None else [n for n, w in zip(numbers, weight_B.tolist(), strict=True) if w]
        )
        record("eval" if numbers[0] >= EVALUATED else "train", " ".join(map(str, real)))
        return super().sums(outputs, targets, weight_B)


class Faulty:
    """A schedule that at its step injects the fault, and records a checksum of the parameters."""

    optimizer: torch.optim.Optimizer
    last_epoch: int

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)  # type: ignore[misc]
        parameters = [p.detach().double().flatten() for g in self.optimizer.param_groups for p in g["params"]]
        record("parameters", repr(torch.cat(parameters).sum().item()))
        record("lr", repr(self.optimizer.param_groups[0]["lr"]))
        time.sleep(float(os.environ.get("TEST_PAUSE", "0")))
        kind = fault(self.last_epoch)
        if kind == "warn":
            logging.getLogger("ddp_experiments").warning("injected")
        if kind == "raise":
            raise RuntimeError("injected")
        if kind == "timeout":
            raise TimeoutError("read timed out: a store of objects")
        if kind == "exit":
            raise SystemExit(7)
        if kind and kind.startswith("sleep"):
            time.sleep(float(kind[5:]))
        if kind and kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))


class FaultyCosine(Faulty, WarmupCosine):
    """The default schedule."""


class FaultyStep(Faulty, StepLR):
    """The learning rate falls in steps."""


class FaultyOneCycle(Faulty, OneCycleLR):
    """Learning rate and momentum follow one cycle."""


class FaultyConstant(Faulty, ConstantLR):
    """The learning rate stays."""


class FaultyClassification(Classification):
    """Makes the loss of the n-th forward pass of training NaN on the chosen rank."""

    calls = 0

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        self.calls += 1
        loss = super().loss_sum(outputs, targets, weight_B)
        return loss * float("nan") if fault(self.calls) == "nan" else loss


class FaultyBackward(torch.nn.Module):
    """Raises in the backward pass of a training step."""

    def __init__(self, in_features: int = 64, out_features: int = 10) -> None:
        super().__init__()
        self.head = torch.nn.Linear(in_features, out_features)
        self.steps = -2  # the passes that settle DDP's buckets don't count

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x.flatten(1))
        if self.training and y.requires_grad:
            y.register_hook(self._backward)
        return y

    def _backward(self, gradient: Tensor) -> None:
        self.steps += 1
        if fault(self.steps) == "raise":
            raise RuntimeError("injected")


class WiderOnRank1(torch.nn.Module):
    """A model that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10 + rank())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x.flatten(1))
        return y


class HalfIdle(torch.nn.Module):
    """A model with a layer that never gets a gradient, and one that is frozen."""

    def __init__(self, in_features: int = 64, out_features: int = 10) -> None:
        super().__init__()
        self.used = torch.nn.Linear(in_features, out_features)
        self.idle = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(in_features, in_features).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(self.frozen(x.flatten(1)))
        return y


class Tied(torch.nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, bias=False)
        self.outer = torch.nn.Linear(64, 64, bias=False)
        self.outer.weight = self.inner.weight
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.outer(self.inner(x.flatten(1)).relu()))
        return y


class RunningCentre(torch.nn.Module):
    """Subtracts a running mean that its own training forward moves: another on every rank."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.3)
        y: Tensor = self.head(x - self.centre.clone())
        return y


class KeepsNormFrozen(torch.nn.Module):
    """Its batch norm is in evaluation mode for good."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 10)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(x.flatten(1)))
        return y


class AllFrozen(torch.nn.Linear):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__(8, 10)
        self.requires_grad_(False)


class KeepsText(torch.nn.Linear):
    """State that is no tensor."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def get_extra_state(self) -> str:
        return "text"

    def set_extra_state(self, state: str) -> None: ...


def drawn_by_numpy(samples: int = 96) -> Splits:
    """Data that numpy's global generator draws."""
    inputs = torch.from_numpy(np.random.rand(samples, 64)).float()
    return Splits(
        TensorData(inputs, torch.arange(samples) % 10), TensorData(inputs[:20], torch.arange(20) % 10)
    )


class BySplit(Dataset[tuple[Tensor, Tensor]]):
    """A data set class with a required `split`."""

    def __init__(self, split: str, size: int = 40) -> None:
        self.first = {"train": 0, "validation": 1000, "test": 2000}[split]
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randn(64, generator=generator), torch.tensor(index % 10)


class SlowToEvaluate(BySplit):
    """Items of the validation part take long."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.first:
            time.sleep(1)
        return super().__getitem__(index)
