"""Data that is made, so that the right answer is known.

Shape suffixes: N = samples, F = features, K = outputs.
"""

import torch
from torch import Tensor

from ddp_experiments.data.order import mix
from ddp_experiments.data.sets import Splits, TensorData


def article(samples: int = 1000, features: int = 10, outputs: int = 2, data_seed: int = 0) -> Splits:
    """The job of the article: uniform inputs in [0, 1), and as targets the outputs of a fixed random network.

    The network is linear-ReLU-linear-sigmoid with 20 hidden units, so that an equal one can learn it.
    """
    generator = torch.Generator().manual_seed(mix(data_seed, 3))
    first_FH = torch.randn(features, 20, generator=generator)
    second_HK = torch.randn(20, outputs, generator=generator) / 20**0.5

    def part(n: int) -> TensorData:
        x_NF = torch.rand(n, features, generator=generator)
        return TensorData(x_NF, torch.sigmoid(((x_NF - 0.5) @ first_FH).relu() @ second_HK))

    return Splits(part(samples), part(max(1, samples // 5)), part(max(1, samples // 5)))


def teacher_weights(features: int, outputs: int, data_seed: int) -> tuple[Tensor, Tensor]:
    """The known weights.

    Shape: weight (K, F) and bias (K), float32, standard normal.
    """
    generator = torch.Generator().manual_seed(mix(data_seed, 4))
    return torch.randn(outputs, features, generator=generator), torch.randn(outputs, generator=generator)


def teacher(
    samples: int = 4096, features: int = 10, outputs: int = 1, noise: float = 0.1, data_seed: int = 0
) -> Splits:
    """Linear regression with known weights: the loss goes to noise², the weights to `teacher_weights`.

    Args:
        noise: standard deviation of the normal noise on the targets.
    """
    weight_KF, bias_K = teacher_weights(features, outputs, data_seed)
    generator = torch.Generator().manual_seed(mix(data_seed, 5))

    def part(n: int) -> TensorData:
        x_NF = torch.randn(n, features, generator=generator)
        clean_NK = x_NF @ weight_KF.T + bias_K
        return TensorData(x_NF, clean_NK + noise * torch.randn(n, outputs, generator=generator))

    return Splits(part(samples), part(max(1, samples // 4)), part(max(1, samples // 4)))
