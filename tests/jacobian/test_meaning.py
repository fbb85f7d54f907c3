"""Outputs that are not what the likelihood takes them for: probabilities, shifted labels, the same for every input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import LikelihoodError, NullBayesWarning
from support.drawing import randint, randn

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # networks are not trained

X = randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0).long()


class Ending(nn.Module):
    """A network that ends in an operation."""

    def __init__(self, outputs: int, end: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, outputs))
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x))


def trained(outputs: int, end: Any, loss: Any) -> nn.Module:
    model = Ending(outputs, end).to(X.device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(X), LABELS).backward()
        optimizer.step()
    return model


def fit(model: nn.Module, likelihood: str = "classification", **settings: Any) -> nb.ProjectedPosterior:
    posterior = nb.ProjectedPosterior(model, likelihood, prior_precision=10.0, **settings)
    return posterior.fit(X, LABELS, 5, progress=False)


SOFTMAX = {
    "softmax": lambda f: f.softmax(-1),
    "softmax, moved around": lambda f: f.softmax(-1)[:, None].clone().squeeze(1).flip(-1).flip(-1),
    "exponential of log-softmax": lambda f: f.log_softmax(-1).exp(),
    "by hand": lambda f: f.exp() / f.exp().sum(-1, keepdim=True),
}


@pytest.mark.parametrize("end", SOFTMAX.values(), ids=SOFTMAX)
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior, nb.baselines.MAP])
def test_class_probabilities_are_refused_with_advice(end: Any, kind: type) -> None:
    with pytest.raises(LikelihoodError, match=r"output_fn=lambda p: p\.clamp_min\(1e-12\)\.log\(\)"):
        kind(Ending(2, end).to(X.device)).fit(X, LABELS, progress=False)


def test_the_advised_output_fn_keeps_the_probabilities_of_the_network() -> None:
    model = Ending(2, SOFTMAX["softmax"]).to(X.device)
    posterior = fit(model, output_fn=lambda p: p.clamp_min(1e-12).log())
    torch.testing.assert_close(
        nb.baselines.MAP(model, output_fn=lambda p: p.log()).fit(X, LABELS).predict(X).probs, model(X).detach()
    )
    assert posterior.predict(X).probs.argmax(1).equal(model(X).argmax(1))


def test_log_probabilities_are_accepted() -> None:
    model = Ending(2, lambda f: f.log_softmax(-1)).to(X.device)
    torch.testing.assert_close(nb.baselines.MAP(model).fit(X, LABELS).predict(X).probs, model(X).exp().detach())


@pytest.mark.parametrize("likelihood", ["binary", "multilabel"])
@pytest.mark.parametrize("end", [torch.sigmoid, nn.Sigmoid(), lambda f: f.sigmoid().squeeze(-1)])
def test_a_final_sigmoid_is_refused_with_advice(end: Any, likelihood: str) -> None:
    model = Ending(1, end).to(X.device)
    with pytest.raises(LikelihoodError, match=r"ends in a sigmoid.*output_fn=lambda p: p\.logit\(1e-7\)"):
        fit(model, likelihood)
    if likelihood == "binary":
        probs = nb.baselines.MAP(model, "binary", output_fn=lambda p: p.logit(1e-7)).fit(X, LABELS).predict(X).probs
        torch.testing.assert_close(probs.flatten(), model(X).detach().flatten())


def test_outputs_that_look_like_probabilities_cause_a_warning() -> None:
    model = trained(1, lambda f: 0.5 + 0.5 * f.tanh(), lambda p, y: F.binary_cross_entropy(p[:, 0], y.float()))
    with pytest.warns(NullBayesWarning, match="explain the targets better as probabilities"):
        fit(model, "binary")


def test_logits_and_bounded_regressions_cause_no_warning() -> None:
    fit(Ending(2, lambda f: f.sigmoid()).to(X.device))  # not the softmax that is applied
    fit(Ending(1, lambda f: 0.3 + 0.01 * f).to(X.device), "binary")  # within 0 and 1 by chance
    posterior = nb.ProjectedPosterior(Ending(1, torch.sigmoid).to(X.device), "regression", prior_precision=10.0)
    posterior.fit(X, LABELS.float(), 5, progress=False)


def test_a_network_with_constant_outputs_is_reported() -> None:
    model = Ending(2, lambda f: f).to(X.device)
    model.body[1] = nn.ReLU()
    nn.init.constant_(model.body[0].bias, -100.0)
    with pytest.warns(NullBayesWarning, match="the same outputs for all 60 training examples: it is dead"):
        fit(model)


# --- labels that the model shifts -------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Computes a loss of its own, as models of Hugging Face do: with labels shifted by one, or as they are."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words, self.head, self.shift = nn.Embedding(6, 8), nn.Linear(8, 6), shift

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.words(input_ids).tanh())
        if labels is None:
            return {"logits": logits}
        f = logits[:, : logits.shape[1] - self.shift].flatten(0, 1)
        return {"loss": F.cross_entropy(f, labels[:, self.shift :].flatten()), "logits": logits}


def sentences() -> dict[str, Tensor]:
    start = randint(6, (12, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + torch.arange(5, device=start.device)) % 6
    return {"input_ids": ids, "labels": ids}


def shifted(batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    return {"input_ids": batch["input_ids"]}, F.pad(batch["labels"][:, 1:], (0, 1), value=-100)


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_labels_that_the_model_shifts_are_refused_with_advice(kind: type) -> None:
    batch = sentences()
    model = Tagger(1).to(batch["labels"].device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    with pytest.raises(LikelihoodError, match=r"shifts its labels by one position.*batch_fn=lambda batch:.*pad\("):
        kind(model).fit([batch], progress=False)
    posterior = kind(model, batch_fn=shifted, prior_precision=100.0).fit([batch], 5, progress=False)
    check = posterior.check_fit([batch])
    assert check.nll_model == pytest.approx(float(model(**batch)["loss"].detach()), rel=1e-4)
    assert check.accuracy_model == 1.0


def test_models_that_do_not_shift_labels_are_accepted() -> None:
    batch = sentences()
    nb.LossProjectedPosterior(Tagger(0).to(batch["labels"].device), prior_precision=100.0).fit(
        [batch], 5, progress=False
    )
