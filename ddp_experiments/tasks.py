"""The one seam between data and model: how a batch becomes losses and metric sums.

Shape suffixes: B = samples of a microbatch, C = classes, K = outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


class Task(ABC):
    """What is optimised and measured. Everything is a sum over samples, divided once by the global count."""

    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # what `finish` returns, for checkpoint.metric

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Outputs of the model for one microbatch."""
        return model(inputs)

    @abstractmethod
    def loss_B(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of each sample. Shape: (B,)."""

    def loss_sum(self, outputs: Any, targets: Any, weight_B: Tensor | None) -> Tensor:
        """The weighted sum of the losses of a microbatch, whose gradient is taken. A scalar."""
        loss_B = self.loss_B(outputs, targets)
        return loss_B.sum() if weight_B is None else (loss_B * weight_B).sum()

    def sums(self, outputs: Any, targets: Any, weight_B: Tensor | None) -> dict[str, Tensor]:
        """Sums over a microbatch from which `finish` makes the metrics; the loss comes by itself."""
        return {}

    def finish(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """The metrics, from sums over all samples (`loss` among them) and their number."""
        return {name: sums[name] / count for name in sorted(sums, key=lambda n: (n != "loss", n))}


class Classification(Task):
    """Cross-entropy and accuracy. Shape: outputs (B, C), targets (B,) of class numbers."""

    metrics = ("loss", "accuracy")

    def loss_B(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        if weight_B is not None:
            return super().loss_sum(outputs, targets, weight_B)
        return F.cross_entropy(outputs, targets, reduction="sum")  # one kernel less in every step

    def sums(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> dict[str, Tensor]:
        right_B = (outputs.argmax(1) == targets).double()
        return {"accuracy": right_B.sum() if weight_B is None else (right_B * weight_B).sum()}


class Regression(Task):
    """Squared error, averaged over outputs. Shape: outputs and targets (B, K)."""

    metrics = ("loss", "mae", "r2")

    def loss_B(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            raise ValueError(
                f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape"
            )
        return (outputs - targets).square().flatten(1).mean(1)

    def sums(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {
            "mae": (outputs - targets).abs().double().flatten(1).mean(1),
            "target": targets.double().flatten(1).mean(1),
            "target_squared": targets.double().square().flatten(1).mean(1),
        }
        return {k: v.sum() if weight_B is None else (v * weight_B).sum() for k, v in rows.items()}

    def finish(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        mean = {name: value / count for name, value in sums.items()}
        variance = mean["target_squared"] - mean["target"] ** 2
        r2 = 1 - mean["loss"] / variance if variance > 0 else float("nan")
        return {"loss": mean["loss"], "mae": mean["mae"], "r2": r2}
