"""`nb.evaluate` reads data in any form, and leaves out what is masked or to be ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.evaluation import Evaluation
from support.drawing import randint, randn
from support.evaluated import FAR, NEAR, STRANGERS, X, Y, check_detection
from support.models import MLP

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here


@pytest.mark.parametrize("form", ["loader", "list", "dataset", "arrays"])
def test_data_may_come_in_any_form(evaluation: Evaluation, projected: Any, form: str) -> None:
    inside, far, near = (TensorDataset(*part) for part in ((X, Y), (FAR,), (NEAR, torch.zeros(len(NEAR)))))
    if form == "loader":
        inside, far, near = (DataLoader(part, batch_size=7) for part in (inside, far, near))
    elif form == "list":
        inside, far, near = [(X[:25], Y[:25]), (X[25:], Y[25:])], [FAR[:3], FAR[3:]], [(NEAR, torch.zeros(len(NEAR)))]
    elif form == "arrays":
        inside, far = (X.cpu().numpy(), Y.cpu().numpy()), FAR.cpu().numpy()
        near = (NEAR, torch.zeros(len(NEAR)))  # a pair with targets
    found = nb.evaluate({"projected": projected}, inside, {"far": far, "near": near})["projected"]
    wanted = evaluation["projected"]
    for name in STRANGERS:
        assert found.strangers[name].auroc == pytest.approx(wanted.strangers[name].auroc, rel=1e-9)
    for name in ("nll", "ece", "accuracy", "aurc"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids).tanh())


def sentences(length: int, seed: int, n: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = randint(9, (n, length), generator=generator)
    lengths = 1 + randint(length, (n, 1), generator=generator)
    mask = (torch.arange(length, device=ids.device) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids % 3).masked_fill(mask == 0, -100)}


def test_sequences_of_any_length_leave_ignored_positions_out() -> None:
    posterior = nb.ProjectedPosterior(Tagger().double(), prior_precision=1.0)
    posterior.fit([sentences(5, 0)], 5, progress=False)
    batches, strangers = [sentences(5, 1), sentences(3, 2)], [sentences(4, 3), sentences(7, 4)]
    row = nb.evaluate({"tags": posterior}, batches, {"other": strangers})["tags"]
    check_detection(row, posterior, None, batches, {"other": strangers})
    probs, targets, wrong = [], [], []
    for batch in batches:
        p, y = posterior.predict(batch).probs, batch["labels"]
        counted = y != -100
        probs.append(p[counted])
        targets.append(y[counted])
        wrong += [float((a.argmax(1) != b)[c].double().mean()) for a, b, c in zip(p, y, counted, strict=True)]
    probs, targets = torch.cat(probs), torch.cat(targets)
    assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, targets), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.nll(probs, targets), rel=1e-12)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, targets), rel=1e-12)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(batches), wrong), rel=1e-12)
    one = nb.evaluate({"tags": posterior}, batches[0], {"other": strangers[0]})  # mappings
    assert (one.n_familiar, one.n_strangers) == (6, {"other": 6})


def test_a_mask_counts_in_scores() -> None:
    posterior = nb.ProjectedPosterior(Tagger().double(), prior_precision=1.0)
    posterior.fit([sentences(5, 0)], 5, progress=False)
    data = {"inside": sentences(5, 1), "other": sentences(5, 3)}
    found = nb.evaluate([posterior], data["inside"], {"other": data["other"]}, mask="all").rows[0]
    for name, scores in (("inside", found.scores_in), ("other", found.scores_out["other"])):
        assert torch.equal(scores, posterior.ood_score(data[name], mask="all").cpu())
        assert not torch.equal(scores, posterior.ood_score(data[name]).cpu())


def test_images_of_classes_are_read_by_their_positions() -> None:
    with torch.random.fork_rng():
        model = nn.Conv2d(1, 3, 3, padding=1).double()
    x = randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = randint(3, (8, 4, 4), generator=torch.Generator().manual_seed(1))
    y[0] = -100  # a whole image
    posterior = nb.baselines.MAP(model).fit(x[1:5], y[1:5])
    row, probs = nb.evaluate([posterior], (x, y), {"flat": 0 * x}).rows[0], posterior.predict(x).probs
    assert row.nll == pytest.approx(F.nll_loss(probs.log(), y).item(), rel=1e-9)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, y), rel=1e-12)
    wrong = (probs.argmax(1) != y).double().mean((1, 2))[1:]
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(x)[1:], wrong), rel=1e-12)


def test_a_loaded_posterior_is_evaluated_as_the_one_that_was_saved(
    evaluation: Evaluation, projected: Any, tmp_path: Any
) -> None:
    projected.save(tmp_path / "posterior.safetensors")
    loaded = nb.load(tmp_path / "posterior.safetensors", MLP.build(3))
    row = nb.evaluate({"projected": loaded}, (X, Y), STRANGERS)["projected"]
    assert row.strangers == evaluation["projected"].strangers
    assert row.nll == evaluation["projected"].nll
