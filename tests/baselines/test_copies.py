"""A copy of a posterior, deep, pickled or written by torch, answers as the posterior does, on its own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import NotFittedError, SettingsError
from support.method_table import X_NEW, Method, each_method
from support.models import CLASSIFICATION, CUSTOM, MLP

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained

KERNEL = (nb.ProjectedPosterior, nb.LossProjectedPosterior)


def written_by_torch(posterior: Any) -> Any:
    file = io.BytesIO()
    torch.save(posterior, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "pickled": lambda posterior: pickle.loads(pickle.dumps(posterior)),
    "torch": written_by_torch,
}
each_way = pytest.mark.parametrize("way", WAYS)


def answers(method: Method, posterior: Any) -> list[Tensor]:
    found = [posterior.ood_score(X_NEW)]
    if method.samples:
        found += [posterior.predict(X_NEW, pred_type=kind).samples for kind in method.pred_types]
    if method.exact and method.kind not in KERNEL:
        found.append(posterior.functional_variance(X_NEW, exact=True))
    return found


@each_way
@each_method
def test_a_copy_answers_the_same_on_its_own(method: Method, way: str) -> None:
    posterior = method.fit()
    wanted, report = answers(method, posterior), posterior.report
    made = WAYS[way](posterior)
    with torch.no_grad():
        for parameter in posterior._network.model.parameters():
            parameter.zero_()
    del posterior
    for found, expected in zip(answers(method, made), wanted, strict=True):
        assert torch.equal(found, expected)
    assert made.report == report


@each_way
@pytest.mark.parametrize("kind", KERNEL)
def test_a_copy_can_be_extended_after_prepare(kind: type, way: str) -> None:
    posterior = Method(kind).fit()
    made = WAYS[way](posterior)
    for ask in (lambda: made.extend(2), lambda: made.functional_variance(X_NEW, exact=True)):
        with pytest.raises(NotFittedError, match=r"no file or copy holds: call prepare\(loader\)"):
            ask()
    made.prepare([CLASSIFICATION.data()]).extend(2, progress=False)
    assert torch.equal(made.directions, posterior.extend(2, progress=False).directions)


def test_a_shallow_copy_has_everything_in_common() -> None:
    posterior = nb.ProjectedPosterior(MLP.build(CUSTOM.outputs), CUSTOM.likelihood, batch_fn=lambda batch: batch)
    posterior.fit([CUSTOM.data()], 3, progress=False)
    made, report = copy.copy(posterior), posterior.report
    assert all(vars(made)[name] is value for name, value in vars(posterior).items())
    made.extend(2, progress=False)
    assert (made.n_samples, len(made.report.residual)) == (5, 5)
    assert posterior.report == report


FUNCTIONS: dict[str, Any] = {
    "likelihood": lambda outputs, targets: outputs.square().sum(1),
    "batch_fn": lambda batch: batch,
    "output_fn": lambda returned: returned,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_cannot_be_pickled_is_refused_with_advice(name: str) -> None:
    posterior = nb.LossProjectedPosterior(MLP.build(), **{name: FUNCTIONS[name]})
    posterior.fit([CLASSIFICATION.data()], 3, progress=False)
    for way in ("pickled", "torch"):
        with pytest.raises(
            SettingsError, match=rf"hold {name}=.*posterior.save\(path\).*nb.load\(path, model, {name}="
        ):
            WAYS[way](posterior)
    assert torch.equal(copy.deepcopy(posterior).predict(X_NEW).samples, posterior.predict(X_NEW).samples)


def test_a_copy_has_no_base_distribution() -> None:
    posterior = nb.ProjectedPosterior(MLP.build())
    posterior.fit([CLASSIFICATION.data()], 3, base=lambda n, generator: torch.ones(n, 51), progress=False)
    made = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(made.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
    with pytest.raises(SettingsError, match="base distribution, which no file or copy holds"):
        made.prepare([CLASSIFICATION.data()]).extend(2, progress=False)


@each_way
def test_a_copy_does_not_hold_rows_that_need_the_training_data(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take the training data along."""
    for name, value in {"_FACTORED": {"cpu": 0, "cuda": 0}, "_SMALL": 0, "_PRECONDITIONED": 8}.items():
        monkeypatch.setattr(f"nullbayes.baselines.laplace.{name}", value)
    posterior = nb.baselines.LinearizedLaplace(MLP.build().float(), prior_precision=100.0)
    x, y = CLASSIFICATION.data(n=12)
    posterior.fit([(x.float(), y)], 3, memory_limit=10_000, progress=False)
    assert isinstance(posterior.curvature.rows, nb.OutputJacobian)
    posterior.prior_precision = 300.0
    made = WAYS[way](posterior)
    assert torch.equal(made.predict(X_NEW.float()).samples, posterior.predict(X_NEW.float()).samples)
    with pytest.raises(NotFittedError, match=r"No file or copy holds this curvature.*at the prior precision 300"):
        made.functional_variance(X_NEW.float(), exact=True)
