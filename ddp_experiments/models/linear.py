"""One linear layer. Shape suffixes: B = batch, F = input features, K = outputs."""

from torch import Tensor, nn


class Linear(nn.Module):
    """Outputs that are linear in the flattened input.

    Shape: (B, ...) with F values a sample -> (B, K).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.head = nn.Linear(in_features, out_features)

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BK: Tensor = self.head(x_BF.flatten(1))
        return y_BK
