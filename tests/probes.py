"""Parts for configs in tests: they record what happens and inject faults, told by the environment.

TEST_RECORD=FOLDER   where records go, a file a rank
TEST_FAULT=KIND@STEP[:RANK]   SIGTERM, SIGINT, SIGKILL, raise, nan at an optimizer step, on one rank or all
"""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from ddp_experiments.data import Splits, TensorData
from ddp_experiments.data.order import mix
from ddp_experiments.optim import WarmupCosine
from ddp_experiments.tasks import Classification, Regression

EVALUATED = 100_000  # indices of validation samples start here


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def record(kind: str, line: str) -> None:
    folder = os.environ.get("TEST_RECORD")
    if folder:
        with (Path(folder) / f"{kind}.{rank()}").open("a") as file:
            file.write(line + "\n")


def fault(step: int) -> str | None:
    """The fault that is due on this rank at this step."""
    kind, _, rest = os.environ.get("TEST_FAULT", "").partition("@")
    at, _, who = rest.partition(":")
    return kind if kind and int(at) == step and who in ("", str(rank())) else None


def indexed(samples: int = 40, validation: int = 23) -> Splits:
    """Regression data whose target is the sample's number; inputs are fixed random features."""

    def part(n: int, first: int) -> TensorData:
        generator = torch.Generator().manual_seed(mix(n, first))
        return TensorData(
            torch.randn(n, 64, generator=generator), torch.arange(first, first + n).float().unsqueeze(1)
        )

    return Splits(part(samples, 0), part(validation, EVALUATED) if validation else None)


class Recording(Regression):
    """Writes down which samples each logged step and each evaluation saw, with their weights. Loss on target / 100."""

    def loss_B(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss_B(outputs, (targets % EVALUATED) / 100)

    def sums(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> dict[str, Tensor]:
        numbers = [int(t) for t in targets.flatten().tolist()]
        real = (
            numbers if weight_B is None else [n for n, w in zip(numbers, weight_B.tolist(), strict=True) if w]
        )
        record("eval" if numbers[0] >= EVALUATED else "train", " ".join(map(str, real)))
        return super().sums(outputs, targets, weight_B)


class FaultyCosine(WarmupCosine):
    """The default schedule; at its step it injects the fault, and records a checksum of the parameters."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        parameters = [p.detach().double().flatten() for g in self.optimizer.param_groups for p in g["params"]]
        record("parameters", repr(torch.cat(parameters).sum().item()))
        record("lr", repr(self.optimizer.param_groups[0]["lr"]))
        kind = fault(self.last_epoch)
        if kind == "raise":
            raise RuntimeError("injected")
        if kind and kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))


class FaultyClassification(Classification):
    """Makes the loss of the n-th forward pass of training NaN on the chosen rank."""

    calls = 0

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        self.calls += 1
        loss = super().loss_sum(outputs, targets, weight_B)
        return loss * float("nan") if fault(self.calls) == "nan" else loss
