"""A small convolutional network. Shape suffixes: B = batch, C = channels, H, W = pixels, K = classes."""

from typing import Literal

from torch import Tensor, nn


class CNN(nn.Module):
    """Blocks of convolution, norm and ReLU, halving the image after each but the last, then a linear head.

    Shape: (B, C, H, W) -> (B, K).

    Args:
        channels: width of each block.
        norm: group normalises each sample by itself, so that the number of ranks can't change the result;
            batch uses the statistics of one rank's microbatch, which depend on it.
        groups: of the group norm; each width must be a multiple of it.

    Raises:
        ValueError: a width that is no multiple of groups.
    """

    def __init__(
        self,
        in_channels: int,
        channels: list[int],
        out_features: int,
        norm: Literal["group", "batch"] = "group",
        groups: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm == "group" and any(c % groups for c in channels):
            raise ValueError(f"model.channels={channels} must be multiples of model.groups={groups}")
        self.blocks = nn.ModuleList()
        for i, o in zip([in_channels, *channels[:-1]], channels, strict=True):
            block = nn.Sequential()
            block.add_module("conv", nn.Conv2d(i, o, 3, padding=1, bias=False))  # the norm has the bias
            block.add_module("norm", nn.GroupNorm(groups, o) if norm == "group" else nn.BatchNorm2d(o))
            block.add_module("relu", nn.ReLU())
            self.blocks.append(block)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(channels[-1], out_features)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x_BCHW = block(self.pool(x_BCHW) if i else x_BCHW)
        y_BK: Tensor = self.head(self.dropout(x_BCHW.mean((2, 3))))
        return y_BK
