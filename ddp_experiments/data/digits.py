"""Handwritten digits of scikit-learn: 1797 real images of 8×8 pixels in 10 classes, without a download."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_experiments.data.sets import Splits, TensorData

CLASSES = 10


def digits(
    validation_fraction: float = 0.15,
    test_fraction: float = 0.15,
    split: Literal["random", "file_order"] = "random",
    split_seed: int = 0,
    augment: bool = False,
    max_shift: int = 1,
    noise: float = 0.05,
) -> Splits:
    """Digits as images (1, 8, 8) with values 0 to 1, and classes 0 to 9.

    Args:
        split: random takes each part with the same share of every class; file_order takes the first
            writers for training and the last ones for the test, which is harder.
        split_seed: which random split; of its own, so that the seed of the run doesn't change the data.
        augment: shift each training image by up to max_shift pixels and add noise, drawn anew every epoch.
        noise: standard deviation, in units of the pixel values.

    Raises:
        ValueError: the fractions leave no training part.
    """
    from sklearn.datasets import load_digits  # takes a second to import

    if not (
        0 <= validation_fraction < 1 and 0 <= test_fraction < 1 and validation_fraction + test_fraction < 1
    ):
        raise ValueError(
            f"data.validation_fraction={validation_fraction} and data.test_fraction={test_fraction} "
            "must be at least 0 and leave samples for training; try 0.15 each"
        )
    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8)
    data = TensorData(images, torch.from_numpy(classes).long())
    fractions = (1 - validation_fraction - test_fraction, validation_fraction, test_fraction)
    train, validation, test = (data.take(i) for i in _parts(data.targets, fractions, split, split_seed))
    part: Dataset[Any] = Augmented(train, max_shift=max_shift, noise=noise) if augment else train
    return Splits(part, validation if len(validation) else None, test if len(test) else None)


def _parts(classes: Tensor, fractions: tuple[float, ...], split: str, seed: int) -> list[Tensor]:
    """Disjoint index lists that cover all samples, in file order within each part."""
    if split == "file_order":
        groups = [torch.arange(len(classes))]
    else:
        generator = torch.Generator().manual_seed(seed)
        members = [torch.nonzero(classes == c).flatten() for c in range(CLASSES)]
        groups = [m[torch.randperm(len(m), generator=generator)] for m in members]
    parts: list[list[Tensor]] = [[] for _ in fractions]
    for group in groups:
        ends = [round(len(group) * sum(fractions[: i + 1])) for i in range(len(fractions))]
        for part, start, end in zip(parts, [0, *ends[:-1]], ends, strict=True):
            part.append(group[start:end])
    return [torch.cat(part).sort().values for part in parts]


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images with a random shift and noise. Its random numbers are the loader's: per (seed, epoch, index)."""

    def __init__(self, data: TensorData, *, max_shift: int, noise: float) -> None:
        self.data, self.max_shift, self.noise = data, max_shift, noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self.data[index]
        down, right = torch.randint(-self.max_shift, self.max_shift + 1, (2,)).tolist()
        image = torch.nn.functional.pad(image, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
        height, width = self.data.inputs.shape[-2:]
        top, left = max(-down, 0), max(-right, 0)
        image = image[:, top : top + height, left : left + width]
        return image + self.noise * torch.randn_like(image), target
