"""LoRA: low-rank adapters around the attention projections of an encoder, trained while the rest stays as it was.

Hu et al. (2022), "LoRA: low-rank adaptation of large language models". The parameters of the adapters are called
``*.lora_down.weight`` and ``*.lora_up.weight``, so that a posterior takes them with ``parameters=["*.lora_*",
"head.*"]``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nullbayes.experiments.text import train_words

ADAPTERS = ("*.lora_down.*", "*.lora_up.*")  # names of their parameters
_PROJECTIONS = ("query", "value")  # which get an adapter


class LowRank(nn.Module):
    """A linear layer plus a product of two thin matrices, which is zero at first.

    Parameters
    ----------
    base : nn.Linear
        The layer, which stays as it is.
    rank : int
        Of the product.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_down.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus that of the adapter."""
        output: Tensor = self.base(x) + self.lora_up(self.lora_down(x))
        return output


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Put an adapter around every linear layer called ``query`` or ``value``, in place; refuse a model without one."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in _PROJECTIONS and isinstance(child, nn.Linear)
    ]
    if not found:
        msg = f"The model has no linear layer called {' or '.join(_PROJECTIONS)} to put an adapter around."
        raise ValueError(msg)
    for parent, name, child in found:
        setattr(parent, name, LowRank(child, rank))
    return model


def tune_adapters(model: nn.Module, x: dict[str, Tensor], y: Tensor, epochs: int) -> nn.Module:
    """Train adapters and head with AdamW, and nothing else, with the global generator."""
    free = [value for name, value in model.named_parameters() if "lora_" in name or name.startswith("head.")]
    optimizer = torch.optim.AdamW(free, lr=2e-3, weight_decay=0.01)
    return train_words(model, optimizer, x, y, epochs)
