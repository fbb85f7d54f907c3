"""The table of layers, each in a network with positions, and numbers for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from support import drawing


class Pooled(nn.Module):
    """A layer, what bends, and the mean over all positions."""

    def __init__(self, layer: nn.Module, channel: int = 1) -> None:
        super().__init__()
        self.layer, self.head, self.channel = layer, nn.LazyLinear(3), channel

    def forward(self, x: Tensor) -> Tensor:
        h = (self.layer(x) * 1.3).tanh()
        return self.head(h.movedim(self.channel, -1).flatten(1, -2).mean(1) if h.ndim > 2 else h)


def randn(*shape: int) -> Tensor:
    return drawing.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def randint(high: int, *shape: int) -> Tensor:
    return drawing.randint(high, shape, generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, tuple[nn.Module, Tensor, int]] = {  # layer, inputs, dimension of the channels
    "linear": (nn.Linear(4, 3), randn(5, 4), 1),
    "linear, positions": (nn.Linear(4, 3), randn(5, 2, 6, 4), -1),
    "linear, no bias": (nn.Linear(4, 3, bias=False), randn(5, 2, 4), -1),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), randn(5, 2, 9), 1),
    "conv2d": (nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 0)), randn(5, 2, 6, 5), 1),
    "conv2d, one position": (nn.Conv2d(2, 3, (6, 5)), randn(5, 2, 6, 5), 1),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), randn(5, 4, 4, 5), 1),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4, dilation=2), randn(5, 4, 6, 5), 1),
    "conv2d, same": (nn.Conv2d(2, 3, (5, 3), padding="same", dilation=(1, 2)), randn(5, 2, 6, 5), 1),
    "conv2d, valid": (nn.Conv2d(2, 3, 3, padding="valid"), randn(5, 2, 6, 5), 1),
    "conv2d, circular": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), randn(5, 2, 6, 5), 1),
    "conv2d, reflect": (nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode="reflect"), randn(5, 2, 6, 5), 1),
    "conv3d": (nn.Conv3d(2, 3, (2, 3, 1), stride=(2, 1, 1), padding=1), randn(5, 2, 4, 5, 3), 1),
    "batchnorm1d": (nn.BatchNorm1d(4), randn(5, 4), 1),
    "batchnorm1d, positions": (nn.BatchNorm1d(4, eps=0.1), randn(5, 4, 3), 1),
    "batchnorm2d": (nn.BatchNorm2d(2), randn(5, 2, 3, 4), 1),
    "batchnorm3d": (nn.BatchNorm3d(2), randn(5, 2, 3, 2, 4), 1),
    "groupnorm": (nn.GroupNorm(2, 4, eps=0.1), randn(5, 4, 3, 2), 1),
    "layernorm": (nn.LayerNorm(4, eps=0.1), randn(5, 3, 4), -1),
    "layernorm, two dimensions": (nn.LayerNorm((3, 4)), randn(5, 2, 3, 4), -1),
    "layernorm, no bias": (nn.LayerNorm(4, bias=False), randn(5, 4), 1),
    "rmsnorm": (nn.RMSNorm(4, eps=0.1), randn(5, 3, 4), -1),
    "embedding": (nn.Embedding(6, 4), randint(6, 5, 7), -1),
    "embedding, one word": (nn.Embedding(6, 4), randint(6, 5), -1),
    "prelu": (nn.PReLU(), randn(5, 4), 1),
    "prelu, channels": (nn.PReLU(3), randn(5, 3, 4, 2), 1),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    layer, x, channel = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Pooled(copy.deepcopy(layer), channel).double()
        model(x)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                tensor.add_(torch.rand_like(tensor))
    return model.eval(), x, randint(3, 5)
