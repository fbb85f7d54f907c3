"""A causal language model of Hugging Face, whose labels are shifted. Padding does not count.

Run: python examples/text.py  (needs transformers)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import nullbayes as nb

WHO = ["the cat", "a dog", "my old neighbour", "the manager of the bank", "our teacher", "a very small bird"]
HOW_MANY = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve"]
KNOWN = [
    ["{} bought {} apples at the market", "{} paid {} coins for bread", "{} sold {} houses last year"],
    ["{} ran {} miles in the rain", "{} swam {} laps", "{} won {} games of tennis this week"],
    ["{} cooked {} eggs for breakfast", "{} baked {} cakes", "{} ate {} bowls of soup with a spoon"],
]
STRANGE = ["{} voted for {} laws in the parliament", "{} proved {} theorems about rings", "{} sang {} songs aloud"]
LENGTH = 16  # words
Batch = dict[str, Tensor]


def written(templates: Sequence[str], n: int) -> list[str]:
    """Return different sentences of a topic."""
    every = [template.format(who, how_many) for template in templates for who in WHO for how_many in HOW_MANY]
    return random.sample(every, n)


def vocabulary(sentences: Sequence[str]) -> dict[str, int]:
    """Number the words; 0 is padding, 1 begins a sentence."""
    return {word: i + 2 for i, word in enumerate(sorted({word for text in sentences for word in text.split()}))}


def encoded(sentences: Sequence[str], words: dict[str, int]) -> Batch:
    """Return a batch as a tokenizer with padding="max_length" makes it."""
    ids = torch.zeros(len(sentences), LENGTH, dtype=torch.long)
    for i, text in enumerate(sentences):
        numbers = [1, *(words[word] for word in text.split())]
        ids[i, : len(numbers)] = torch.tensor(numbers)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def train(model: nn.Module, batch: Batch, steps: int) -> nn.Module:
    """Train by the loss that the model computes itself."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.eval()


def next_word(batch: Batch) -> tuple[Batch, Tensor]:
    """Return inputs, and for each position the word that follows: padding and the end are not to be predicted."""
    labels = nn.functional.pad(batch["input_ids"][:, 1:], (0, 1))
    return batch, labels.masked_fill(labels == 0, -100)


def write(known: list[str], strange: list[str], words: dict[str, int], steps: int) -> dict[str, float]:
    """Fit a posterior of a language model; it doubts words that it has not seen in such a place."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words) + 2, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    n = len(known) // 2
    batch = encoded(known[:n], words)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)  # which the model shifts by itself
    model = train(GPT2LMHeadModel(config), {**batch, "labels": labels}, steps)
    try:
        nb.LossProjectedPosterior(model).fit([{**batch, "labels": labels}])
    except nb.errors.LikelihoodError as error:
        refused = str(error)
        print(f"language model\n{refused}\n")
    posterior = nb.LossProjectedPosterior(model, batch_fn=next_word).fit([batch], progress=False)
    check = posterior.check_fit([batch])
    # after the last word nothing follows, and nothing was trained there: those positions are masked as well
    (test, after), (unknown, then) = (next_word(encoded(part, words)) for part in (known[n:], strange))
    kind = "mutual_information"
    familiar = posterior.ood_score(test, kind, mask=after != -100)
    auroc = nb.metrics.auroc(familiar, posterior.ood_score(unknown, kind, mask=then != -100))
    one = posterior.ood_score(test, kind, per="position", mask=after != -100)[0]
    print(f"{check}\nAUROC of sentences about something else: {auroc:.3f}")
    print("doubt after each word: " + ", ".join(f"{value:.2g}" for value in one[~one.isnan()].tolist()))
    return {"nll": check.nll_model, "own loss": float(model(**batch, labels=labels).loss.detach()),
            "refused": float("shifts its labels" in refused), "auroc": auroc}  # fmt: skip


def main(n: int = 60, steps: int = 60) -> dict[str, float]:
    """Run on ``n`` sentences per topic."""
    random.seed(0)
    known = [sentence for templates in KNOWN for sentence in written(templates, n)]
    random.shuffle(known)
    strange = written(STRANGE, n)
    return write(known, strange, vocabulary(known + strange), steps)


if __name__ == "__main__":
    main()
