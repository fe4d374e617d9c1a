"""A multi-layer perceptron. Shape suffixes: B = batch, F = input features, K = outputs."""

from itertools import pairwise
from typing import Literal

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU and dropout between them.

    Shape: (B, ...) with F values a sample -> (B, K).

    Args:
        hidden: width of each hidden layer.
        output: activation of the last layer; sigmoid keeps outputs between 0 and 1.
    """

    def __init__(
        self,
        in_features: int,
        hidden: list[int],
        out_features: int,
        dropout: float = 0.0,
        output: Literal["none", "sigmoid"] = "none",
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        layers.append(nn.Linear(widths[-1], out_features))
        if output == "sigmoid":
            layers.append(nn.Sigmoid())
        self.layers = nn.Sequential(*layers)

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BK: Tensor = self.layers(x_BF.flatten(1))
        return y_BK
