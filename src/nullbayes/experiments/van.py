"""The Visual Attention Network (Guo, Lu, Liu, Cheng and Hu 2023), written from their paper.

A stage halves the image (the first one quarters it) and applies blocks of two residual branches: attention by
convolutions with a large receptive field, and a network of two layers with a depth-wise convolution between them. With
37 outputs, the 40 attributes of CelebA less the three that are held out, the network has 3,858,309 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

DEPTHS, WIDTHS, RATIOS = (3, 3, 5, 2), (32, 64, 160, 256), (8, 8, 4, 4)
_LAYER_SCALE = 1e-2  # what a residual branch is multiplied by before training


def _depth_wise(width: int, kernel: int, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution of each channel with itself that keeps the size of the image."""
    padding = dilation * (kernel - 1) // 2
    return nn.Conv2d(width, width, kernel, padding=padding, dilation=dilation, groups=width)


class _Attention(nn.Module):
    """Large-kernel attention: a kernel of 21 by 21 as a 5 by 5, a dilated 7 by 7 and a 1 by 1 one, times the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.kernel = nn.Sequential(
            _depth_wise(width, 5), _depth_wise(width, 7, dilation=3), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the attention."""
        y = self.before(x).relu()
        added: Tensor = self.after(y * self.kernel(y))
        return x + added


class _Block(nn.Module):
    """Attention and a network of two layers, each on normalized inputs and scaled channel by channel."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.attention = _Attention(width)
        self.mlp = nn.Sequential(
            nn.Conv2d(width, ratio * width, 1), _depth_wise(ratio * width, 3), nn.ReLU(),
            nn.Conv2d(ratio * width, width, 1),
        )  # fmt: skip
        self.scale1 = nn.Parameter(torch.full((width, 1, 1), _LAYER_SCALE))
        self.scale2 = nn.Parameter(torch.full((width, 1, 1), _LAYER_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.scale1 * self.attention(self.norm1(x))
        added: Tensor = self.mlp(self.norm2(x))
        return x + self.scale2 * added


class _Stage(nn.Module):
    """A convolution that makes the image smaller, blocks, and a normalization of each pixel."""

    def __init__(self, inputs: int, width: int, depth: int, ratio: int, *, first: bool) -> None:
        super().__init__()
        kernel, stride = (7, 4) if first else (3, 2)
        self.shrink = nn.Conv2d(inputs, width, kernel, stride=stride, padding=kernel // 2)
        self.shrunk = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(_Block(width, ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a smaller image with more channels."""
        x = self.blocks(self.shrunk(self.shrink(x)))
        x = self.norm(x.movedim(1, -1))
        return x.movedim(-1, 1)


class VAN(nn.Module):
    """The network, with ReLU as in the paper on projected posteriors; images are (n, 3, H, W).

    Parameters
    ----------
    outputs : int
        How many logits it returns.
    depths, widths, ratios : sequence of int
        For each stage the number of blocks, the channels, and how many times more of them the two-layer networks have.
    """

    def __init__(
        self,
        outputs: int = 37,
        depths: Sequence[int] = DEPTHS,
        widths: Sequence[int] = WIDTHS,
        ratios: Sequence[int] = RATIOS,
    ) -> None:
        super().__init__()
        inputs = (3, *widths)
        stages = zip(inputs, widths, depths, ratios, strict=False)
        self.stages = nn.Sequential(*(_Stage(*sizes, first=i == 0) for i, sizes in enumerate(stages)))
        self.head = nn.Linear(widths[-1], outputs)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits


def _initialize(module: nn.Module) -> None:
    """Draw weights so that the variance of a signal stays as it is."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, 0.0, (2.0 / fan_out) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
        nn.init.zeros_(module.bias)
