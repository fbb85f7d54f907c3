"""A table of the models that people have, and by which route their derivatives come.

One contract test runs over it, and `docs/compatibility.md` is made from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from support import zoo
from support.compatibility_case import LAYERS, Case, labels, masked_words, numbers, tags, words

VMAP, SINGLY, ROWS = "vmap(jacrev)", "example by example", "rows"


def logits(returned: Any) -> Tensor:
    """What a Hugging Face model means by its answer."""
    found: Tensor = returned["logits"]
    return found


@dataclass
class LogitsAndHidden:
    """What some networks return: their outputs among other things, by name."""

    hidden: Tensor
    logits: Tensor


CASES = (
    Case("MLP", "Layers", zoo.mlp, numbers(4)),
    Case("CNN with BatchNorm", "Layers", zoo.cnn_batchnorm, numbers(2, 4, 6)),
    Case("ResNet", "Layers", zoo.resnet, numbers(2, 4, 4)),
    Case("GroupNorm, LayerNorm, RMSNorm, PReLU", "Layers", zoo.norms, numbers(2, 4, 6)),
    Case("InstanceNorm", "Layers", zoo.instance_norm, numbers(2, 4, 6), rows="by layers (96% of the parameters)"),
    Case("weight_norm", "Layers", zoo.weight_norm, numbers(4), VMAP, ROWS),
    Case("Dropout", "Layers", zoo.dropout, numbers(4)),
    Case("buffers", "Layers", zoo.Standardized, numbers(4)),
    Case("tied weights", "Layers", zoo.tied, words(7, 4), targets=labels(7)),
    Case("frozen layers", "Layers", zoo.frozen, numbers(4)),
    Case("mixture of experts", "Layers", zoo.Experts, numbers(4), SINGLY),
    Case("LoRA-like adapters", "Layers", zoo.lora, numbers(4), VMAP),
    Case("scaled_dot_product_attention", "Sequences", zoo.attention, numbers(4, 3)),
    Case("MultiheadAttention", "Sequences", zoo.multihead, numbers(4, 3), VMAP),
    Case("TransformerEncoder", "Sequences", zoo.encoder, numbers(4, 3), VMAP),
    Case("LSTM", "Sequences", zoo.recurrent(nn.LSTM), numbers(4, 3), VMAP, dtype=torch.float32),
    Case(
        "LSTM, two layers, both directions",
        "Sequences",
        zoo.recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        numbers(4, 3),
        VMAP,
    ),
    Case("GRU", "Sequences", zoo.recurrent(nn.GRU), numbers(4, 3), VMAP),
    Case("Embedding", "Sequences", zoo.embedding(), words(7, 4)),
    Case("Embedding with padding_idx", "Sequences", zoo.embedding(padding_idx=2), words(7, 4)),
    Case("Embedding, sparse", "Sequences", zoo.embedding(sparse=True), words(7, 4)),
    Case("EmbeddingBag", "Sequences", zoo.bag(), words(7, 4), VMAP, ROWS),
    Case("EmbeddingBag, max", "Sequences", zoo.bag(mode="max"), words(7, 4), VMAP, ROWS),
    Case(
        "BERT classifier",
        "Hugging Face",
        zoo.bert("Sequence"),
        masked_words(11, 5),
        outputs=logits,
        needs="transformers",
    ),
    Case(
        "BERT token classifier with ignore_index",
        "Hugging Face",
        zoo.bert("Token"),
        masked_words(11, 5),
        targets=tags(3, 5),
        outputs=logits,
        needs="transformers",
    ),
    Case(
        "GPT-2 with tied embeddings",
        "Hugging Face",
        zoo.gpt2,
        masked_words(7, 4),
        targets=labels(7, 3, ignored=-100),
        needs="transformers",
    ),
    Case(
        "Swin classifier",
        "Hugging Face",
        zoo.swin,
        lambda n, g: {"pixel_values": numbers(3, 8, 8)(n, g)},
        VMAP,
        outputs=logits,
        needs="transformers",
    ),
    Case("tuple of inputs", "Inputs and outputs", zoo.two_inputs, zoo.pairs),
    Case("dict of inputs, by keyword", "Inputs and outputs", zoo.keywords, zoo.named),
    Case("one dict, as a tuple of one: `(x,)`", "Inputs and outputs", zoo.of_one_dict, lambda n, g: (zoo.named(n, g),)),
    Case(
        "ModelOutput or dict with logits",
        "Inputs and outputs",
        zoo.returning(lambda h: {"hidden": 2 * h, "logits": h}),
        numbers(4),
        outputs=logits,
    ),
    Case(
        "named tuple or dataclass with logits",
        "Inputs and outputs",
        zoo.returning(lambda h: LogitsAndHidden(2 * h, h)),
        numbers(4),
        outputs=lambda r: r.logits,
    ),
    Case(
        "any object with an attribute logits",
        "Inputs and outputs",
        zoo.returning(lambda h: SimpleNamespace(hidden=2 * h, logits=h)),
        numbers(4),
        outputs=lambda r: r.logits,
    ),
    Case(
        "tuple with one tensor",
        "Inputs and outputs",
        zoo.returning(lambda h: (h, None)),
        numbers(4),
        outputs=lambda r: r[0],
    ),
    Case(
        "anything, by output_fn",
        "Inputs and outputs",
        zoo.returning(lambda h: (h.sin(), {"out": [h]})),
        numbers(4),
        outputs=lambda r: r[1]["out"][0],
        options={"output_fn": lambda r: r[1]["out"][0]},
    ),
    Case(
        "one output (N,)",
        "Inputs and outputs",
        zoo.one_logit,
        numbers(4),
        targets=labels(2),
        likelihood="binary",
        loss=zoo.coins,
        outputs=lambda r: r[:, None],
    ),
    Case("segmentation (N, C, H, W)", "Inputs and outputs", zoo.unet, numbers(2, 4, 4), VMAP, targets=labels(3, 4, 4)),
    Case(
        "segmentation with ignore_index",
        "Inputs and outputs",
        zoo.unet,
        numbers(2, 4, 4),
        VMAP,
        targets=labels(3, 4, 4, ignored=255),
        likelihood=nb.likelihoods.Classification(ignore_index=255),
    ),
    Case(
        "sequences (N, T, C) with ignore_index",
        "Inputs and outputs",
        zoo.tagger,
        words(7, 4),
        targets=labels(3, 4, ignored=-100),
    ),
    Case(
        "images under a loss of one's own",
        "Inputs and outputs",
        zoo.unet,
        numbers(2, 4, 4),
        VMAP,
        targets=numbers(4, 4),
        likelihood=zoo.cauchy,
        loss=zoo.cauchy,
        only_loss=True,
    ),
    Case(
        "images as targets",
        "Inputs and outputs",
        zoo.unet,
        numbers(2, 4, 4),
        VMAP,
        targets=numbers(3, 4, 4),
        likelihood=nb.likelihoods.Regression(0.5),
        loss=zoo.squares,
    ),
    Case(
        "decoder with 784 outputs",
        "Inputs and outputs",
        zoo.decoder,
        numbers(2),
        targets=labels(2, 784),
        likelihood="multilabel",
        loss=zoo.coins,
        only_loss=True,
    ),
    Case("float64", "Precision and wrappers", zoo.mlp, numbers(4)),
    Case("float32", "Precision and wrappers", zoo.mlp, numbers(4), dtype=torch.float32),
    Case(
        "bfloat16",
        "Precision and wrappers",
        zoo.cnn_batchnorm,
        numbers(2, 4, 6),
        rows=f"{LAYERS}; in float32",
        dtype=torch.bfloat16,
    ),
    Case("float16", "Precision and wrappers", zoo.mlp, numbers(4), rows=f"{LAYERS}; in float32", dtype=torch.float16),
    Case(
        "torch.compile",
        "Precision and wrappers",
        zoo.mlp,
        numbers(4),
        wrap=lambda model: torch.compile(model, backend="eager"),
    ),
    Case("torch.compile of a part", "Precision and wrappers", zoo.partly_compiled, numbers(4)),
    Case("DataParallel", "Precision and wrappers", zoo.mlp, numbers(4), wrap=nn.DataParallel),
    Case("plain function with a dict of parameters", "Precision and wrappers", zoo.as_function, numbers(4), VMAP),
)


# --- what is refused --------------------------------------------------------------------------------------------------


def _fit(model: nn.Module, x: Any = None, y: Any = None, loader: Any = None, **options: Any) -> Callable[[], Any]:
    def attempt() -> Any:
        generator = torch.Generator().manual_seed(0)
        inputs = numbers(4)(6, generator) if x is None else x
        targets = labels(3)(6, generator) if y is None else y
        data = [(inputs, targets)] if loader is None else loader(inputs, targets)
        return nb.ProjectedPosterior(model, **options).fit(data, 2, progress=False)

    return attempt


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        script = torch.jit.trace(zoo.mlp().double(), numbers(4)(2, torch.Generator().manual_seed(0)))
    return _fit(script)()


def _without_gradients() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x).tanh()
        found: Tensor = self.head(h)
        return found

    return zoo.Wired(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 3)).double()


def _shuffled(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)


def _dropping(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True)


def _returning(wiring: Callable[[Tensor], Any]) -> nn.Module:
    return zoo.returning(wiring)().double()


REFUSED: dict[str, Callable[[], Any]] = {
    "BatchNorm without running statistics": _fit(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    ),
    "examples that influence each other": _fit(_returning(lambda h: h - h.mean(0))),
    "a network that is random in evaluation mode": _fit(_returning(lambda h: F.dropout(h, 0.5, training=True))),
    "TorchScript": _scripted,
    "lazy layers that saw no input": _fit(nn.LazyLinear(3)),
    "Embedding with max_norm": _fit(zoo.embedding(max_norm=1.0)().double(), words(7, 4)(6, torch.Generator())),
    "a body under torch.no_grad()": _fit(_without_gradients()),
    "no parameter that requires gradients": _fit(zoo.mlp().double().requires_grad_(False)),
    "parameters in float32 and float64": _fit(nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 3).float())),
    "several tensors as outputs, none called logits": _fit(_returning(lambda h: {"mean": h, "scale": h.exp()})),
    "outputs with examples not first": _fit(_returning(lambda h: h.T)),
    "classification with a single logit": _fit(zoo.one_logit().double(), y=torch.zeros(6, dtype=torch.long)),
    "classes in a dimension that the shapes leave open": _fit(
        zoo.unet().double(), numbers(2, 2, 2)(6, torch.Generator()), y=torch.zeros(6, 2, dtype=torch.long),
        output_fn=lambda out: out[:, :2, 0],
    ),
    "a loader that shuffles": _fit(zoo.mlp().double(), loader=_shuffled),
    "a loader that drops examples": _fit(zoo.mlp().double(), loader=_dropping),
    "NaN in the data": _fit(zoo.mlp().double(), torch.full((6, 4), torch.nan, dtype=torch.float64)),
}  # fmt: skip
