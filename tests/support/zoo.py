"""Small versions of networks that people use; `compatibility_table` says what is expected of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import nullbayes as nb
from support.compatibility_case import numbers, words


class Wired(nn.Module):
    """Named parts, and what to do with them."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.wiring = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wiring(self, *args, **kwargs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(18, 3),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.second, self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.second(F.relu(self.one(self.first(x)))))
        return F.relu(h + self.skip(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), ResidualBlock(3, 3, 1), ResidualBlock(3, 4, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Flatten(), nn.Linear(32, 5), nn.LayerNorm(5), nn.GELU(),
        nn.Linear(5, 4), nn.RMSNorm(4), nn.Linear(4, 3),
    )  # fmt: skip


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def one_logit() -> nn.Module:
    return Wired(lambda self, x: self.head(x)[:, 0], head=nn.Linear(4, 1))


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    )


def unet() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.down(x).relu()
        return self.out(torch.cat([self.up(h), x], 1))

    return Wired(
        forward, down=nn.Conv2d(2, 3, 2, stride=2), up=nn.ConvTranspose2d(3, 2, 2, stride=2), out=nn.Conv2d(4, 3, 1)
    )


class Experts(nn.Module):
    """Each example goes to the expert that a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, outputs = weights.argmax(-1), x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                outputs[mine] = expert(x[mine]) * weights[mine, i : i + 1]
        return outputs


def attention() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).movedim(2, 0).transpose(2, 3)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    return Wired(forward, qkv=nn.Linear(3, 12), head=nn.Linear(4, 3))


def multihead() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.head(self.mix(h, h, h, need_weights=False)[0].mean(1))

    return Wired(
        forward,
        up=nn.Linear(3, 4),
        mix=nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
        head=nn.Linear(4, 3),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    return Wired(
        lambda self, x: self.head(self.mix(self.up(x)).mean(1)),
        up=nn.Linear(3, 4), mix=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(4, 3),
    )  # fmt: skip


def recurrent(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    width = 4 * (2 if options.get("bidirectional") else 1)
    return lambda: Wired(
        lambda self, x: self.head(self.body(x)[0][:, -1]),
        body=kind(3, 4, batch_first=True, **options), head=nn.Linear(width, 3),
    )  # fmt: skip


def bag(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Wired(
        lambda self, x: self.head(self.words(x).tanh()), words=nn.EmbeddingBag(7, 4, **options), head=nn.Linear(4, 3)
    )


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Wired(
        lambda self, x: self.head(self.words(x).mean(1).tanh()), words=nn.Embedding(7, 4, **options),
        head=nn.Linear(4, 3),
    )  # fmt: skip


def tied() -> nn.Module:
    """The decoder of a language model has the weights of its embedding."""
    model = Wired(
        lambda self, x: self.decoder(self.body(self.words(x).mean(1)).tanh()),
        words=nn.Embedding(7, 4), body=nn.Linear(4, 4), decoder=nn.Linear(4, 7),
    )  # fmt: skip
    model.decoder.weight = model.words.weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class LowRank(nn.Module):
    """A frozen layer, and a trained product of two narrow ones beside it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inside)), nn.Parameter(torch.randn(outside, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def lora() -> nn.Module:
    return nn.Sequential(LowRank(4, 6), nn.Tanh(), LowRank(6, 3))


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5), nn.AlphaDropout(), nn.Linear(5, 3)
    )


class Standardized(nn.Module):
    """Buffers that the outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("steps", torch.tensor(7))
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.shift) / self.steps)


def returning(wiring: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Wired(lambda self, x: wiring(self.head(x.tanh())), head=nn.Linear(4, 3))


def two_inputs() -> nn.Module:
    return Wired(
        lambda self, a, b: self.head((self.a(a) * self.b(b)).sigmoid()),
        a=nn.Linear(4, 4), b=nn.Linear(3, 4, bias=False), head=nn.Linear(4, 3),
    )  # fmt: skip


def keywords() -> nn.Module:
    return Wired(
        lambda self, *, tokens, left, scale=None: self.head((self.words(tokens).mean(1) + self.left(left)).tanh()),
        words=nn.Embedding(6, 3), left=nn.Linear(2, 3), head=nn.Linear(3, 3),
    )  # fmt: skip


def of_one_dict() -> nn.Module:
    return Wired(lambda self, batch: self.inner(**batch), inner=keywords())


def named(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"tokens": words(6, 4)(n, generator), "left": numbers(2)(n, generator)}


def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return numbers(4)(n, generator), numbers(3)(n, generator)


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def decoder() -> nn.Module:
    """Of a variational autoencoder for images of 28 times 28."""
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 784))


def partly_compiled() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Linear(4, 6), backend="eager"), nn.Tanh(), nn.Linear(6, 3))


def as_function() -> nn.Module:
    parameters = {"first.weight": torch.randn(6, 4), "first.bias": torch.randn(6), "out": torch.randn(3, 6)}
    return nb.as_module(lambda p, x: (x @ p["first.weight"].T + p["first.bias"]).tanh() @ p["out"].T, parameters)


def bert(head: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
            max_position_embeddings=8, num_labels=3,
        )  # fmt: skip
        model: nn.Module = getattr(transformers, f"BertFor{head}Classification")(config)
        return model

    return make


def gpt2() -> nn.Module:
    """Each position but the last answers for the token after it."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=7, n_embd=4, n_layer=1, n_head=2, n_inner=6, n_positions=6, bos_token_id=0, eos_token_id=0
    )

    def forward(self: Any, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.language(**inputs, use_cache=False).logits
        return logits[:, :-1]

    return Wired(forward, language=transformers.GPT2LMHeadModel(config))


def swin() -> nn.Module:
    import transformers

    config = transformers.SwinConfig(
        image_size=8, patch_size=2, embed_dim=4, depths=[2, 1], num_heads=[1, 2], window_size=2, mlp_ratio=2.0,
        num_labels=3,
    )  # fmt: skip
    model: nn.Module = transformers.SwinForImageClassification(config)
    return model


def cauchy(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own over images: (n, 3, 4, 4), (n, 4, 4) -> (n,)."""
    return torch.log1p((outputs.sum(1) - targets).square()).flatten(1).sum(1)


def coins(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = targets.reshape(outputs.shape).to(outputs.dtype)
    losses = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
    return losses.flatten(1).sum(1)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(1) / (2 * 0.5**2)
