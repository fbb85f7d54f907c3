"""The Swin transformer (Liu, Lin, Cao, Hu, Wei, Zhang, Lin and Guo 2021), written from their paper.

Patches of 4 by 4 pixels attend to the others in windows of 7 by 7 patches, which every second block shifts by half a
window; between stages, 2 by 2 patches become one with twice the channels. The names of the parameters are those of the
published weights, so that ``swin_tiny_patch4_window7_224.pth`` loads as it is; `weights_of` also takes the names of
Hugging Face's ``model.safetensors``. Swin-T has 28,288,354 parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nullbayes.experiments.frame import Missing

_MASKED = -100.0  # added to the attention between patches that the shift has made neighbours
_PATCH = 4


# --- the network ------------------------------------------------------------------------------------------------------


def _windows(x: Tensor, window: int) -> Tensor:  # (n, H, W, C) -> (n * windows, window², C)
    """Cut images into windows."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height // window, window, width // window, window, channels)
    return x.transpose(2, 3).reshape(-1, window * window, channels)


def _image(windows: Tensor, window: int, side: int) -> Tensor:  # (n * windows, window², C) -> (n, H, W, C)
    """Put windows together again."""
    across, channels = side // window, windows.shape[-1]
    x = windows.reshape(-1, across, across, window, window, channels)
    return x.transpose(2, 3).reshape(-1, side, side, channels)


def _relative_positions(window: int) -> Tensor:  # (window², window²)
    """Return which entry of the table of biases belongs to each pair of patches."""
    place = torch.arange(window)
    row, column = (axis.flatten() for axis in torch.meshgrid(place, place, indexing="ij"))
    down, right = row[:, None] - row + window - 1, column[:, None] - column + window - 1
    return down * (2 * window - 1) + right


def _shift_mask(side: int, window: int, shift: int) -> Tensor:  # (windows, window², window²)
    """Return what keeps patches apart that were no neighbours before the shift."""
    place = torch.arange(side)
    band = (place >= side - window).long() + (place >= side - shift).long()
    region = (3 * band[:, None] + band)[None, :, :, None]
    region = _windows(region, window)[:, :, 0]
    return torch.where(region[:, :, None] == region[:, None, :], 0.0, _MASKED)


class _Attention(nn.Module):
    """Attention within windows, with a bias for each head and relative position."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", _relative_positions(window), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the attention to windows (n * windows, window², C)."""
        n, patches, width = x.shape
        query, key, value = self.qkv(x).reshape(n, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        strength = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + bias
        if mask is not None:
            strength = (strength.reshape(-1, len(mask), *strength.shape[1:]) + mask[:, None]).reshape(strength.shape)
        y: Tensor = self.proj((strength.softmax(-1) @ value).transpose(1, 2).reshape(n, patches, width))
        return y


class _Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        y: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return y


class _Block(nn.Module):
    """Attention and two layers, each on normalized inputs and added to them."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        self.norm1, self.attn = nn.LayerNorm(width), _Attention(width, heads, window)
        self.norm2, self.mlp = nn.LayerNorm(width), _Mlp(width, 4 * width)
        self.attn_mask: Tensor | None
        self.register_buffer("attn_mask", _shift_mask(side, window, shift) if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to images (n, H, W, C)."""
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = _image(self.attn(_windows(y, self.window), self.attn_mask), self.window, self.side)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        added: Tensor = self.mlp(self.norm2(x))
        return x + added


class _Merging(nn.Module):
    """Four patches become one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return images of half the size, with twice the channels."""
        corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        merged: Tensor = self.reduction(self.norm(torch.cat(corners, -1)))
        return merged


class _Stage(nn.Module):
    """Blocks, every second one shifted, and the merging of patches after all stages but the last."""

    def __init__(self, width: int, depth: int, heads: int, side: int, window: int, *, last: bool) -> None:
        super().__init__()
        shift = window // 2 if side > window else 0
        self.blocks = nn.Sequential(
            *(_Block(width, heads, side, min(side, window), shift if i % 2 else 0) for i in range(depth))
        )
        self.downsample = nn.Identity() if last else _Merging(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage."""
        y: Tensor = self.downsample(self.blocks(x))
        return y


class _Patches(nn.Module):
    """Patches of pixels as vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, width, _PATCH, stride=_PATCH), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, H / 4, W / 4, C)."""
        y: Tensor = self.norm(self.proj(x).movedim(1, -1))
        return y


class Swin(nn.Module):
    """The network; images are (n, 3, image, image). The defaults are Swin-T.

    Parameters
    ----------
    outputs : int
        The number of classes.
    image, window : int
        Pixels along a side of an image, and patches along a side of a window.
    width : int
        Channels of the first stage; each further one has twice as many.
    depths, heads : sequence of int
        Blocks, and heads of the attention, for each stage.
    """

    def __init__(
        self,
        outputs: int = 1000,
        image: int = 224,
        window: int = 7,
        width: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
    ) -> None:
        super().__init__()
        sides = [image // _PATCH // 2**i for i in range(len(depths))]
        if any(side % min(side, window) for side in sides) or image != sides[-1] * _PATCH * 2 ** (len(depths) - 1):
            fitting = _PATCH * window * 2 ** (len(depths) - 1)
            msg = f"Images of {image} pixels cannot be cut into windows of {window} patches: use {fitting} pixels."
            raise ValueError(msg)
        self.patch_embed = _Patches(width)
        last, sizes = len(depths) - 1, zip(depths, heads, sides, strict=True)
        self.layers = nn.Sequential(
            *(_Stage(width * 2**i, *each, window, last=i == last) for i, each in enumerate(sizes))
        )
        self.norm, self.head = nn.LayerNorm(width * 2**last), nn.Linear(width * 2**last, outputs)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.norm(self.layers(self.patch_embed(x))).mean((1, 2)))
        return logits


def _initialize(module: nn.Module) -> None:
    """Draw the weights of the linear layers and the biases of positions."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, _Attention):
        nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)


# --- published weights ------------------------------------------------------------------------------------------------

# Hugging Face's names -> the authors'. Query, key and value are one matrix here.
_RENAMED = (
    (r"^swin\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^encoder\.", ""),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.self\.relative", ".attn.relative"),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)
_PARTS = ("query", "key", "value")


def weights_of(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published weights under the names of `Swin`, from the authors' names or from Hugging Face's.

    Masks and indices are left out, for the network computes them.
    """
    found: dict[str, Tensor] = {}
    for given, value in stored.items():
        name = given
        for pattern, renamed in _RENAMED:
            name = re.sub(pattern, renamed, name)
        if name.endswith(("relative_position_index", "attn_mask")) or ".attention.self." in name:
            continue
        found[name] = value
    for given in stored:
        if ".attention.self.query." in given:
            joined = torch.cat([stored[given.replace(".query.", f".{part}.")] for part in _PARTS])
            block, kind = re.sub(r"^(swin\.)?encoder\.", "", given).split(".attention.self.query.")
            found[f"{block}.attn.qkv.{kind}"] = joined
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read published weights: a ``.pth`` file of tensors, below the key "model" or not, or a ``.safetensors`` file."""
    if path.suffix == ".safetensors":
        return weights_of(load_file(path))
    stored = torch.load(path, map_location="cpu", weights_only=True)
    return weights_of(stored.get("model", stored))


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load published weights into a network, or say in one sentence why they are not its own."""
    given, own = read_weights(path), model.state_dict()
    odd = next((name for name in own if name not in given or given[name].shape != own[name].shape), None)
    odd = odd or next((name for name in given if name not in own), None)
    if odd is not None:
        msg = f"{path} does not hold the weights of this network: {odd} is missing in one of them, or of another shape."
        raise Missing(msg)
    model.load_state_dict(given)
    return model.eval()
