"""What a data set is here: its parts, and the kind that lies in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Splits:
    """The parts of a data set. Items are (input, target); validation and test may be missing.

    Raises:
        ValueError: a part is not map-style.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    test: Dataset[Any] | None = None

    def __post_init__(self) -> None:
        for name, part in vars(self).items():
            if part is not None and not hasattr(part, "__len__"):
                raise ValueError(
                    f"the {name} part, a {type(part).__name__}, has no length; want a map-style data set "
                    "with __len__ and __getitem__"
                )


class TensorData(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory; gathered by index, never through workers or collate.

    Shape: inputs (N, ...), targets (N, ...).

    Raises:
        ValueError: the two have different lengths.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def take(self, indices: Sequence[int] | Tensor) -> "TensorData":
        """The samples of these indices, as a data set of its own."""
        index = torch.as_tensor(indices)
        return TensorData(self.inputs[index], self.targets[index])
