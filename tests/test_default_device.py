"""The library's tensors lie where the model lies, whatever torch.set_default_device says.

Under the default device "meta" every tensor that is made without a device has no numbers, and the first use fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes import demo, metrics
from nullbayes.predictive import SCORES
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos
from nullbayes.testing import cases
from support.models import CLASSIFICATION, MLP, MODELS, Model

PROJECTORS = {
    "auto": "auto",
    "ExactDual": ExactDual(),
    "truncated ExactDual": ExactDual(truncate=True),
    "ExactPrimal": ExactPrimal(),
    "truncated ExactPrimal": ExactPrimal(truncate=True),
    "Alternating": Alternating(block_rows=6, max_sweeps=5),
    "Alternating in float32": Alternating(block_rows=6, max_sweeps=5, gram_dtype=torch.float32),
    "Krylov": Krylov(Alternating(block_rows=6)),
    "Lanczos": Lanczos(rank=10),
}
each_kind = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    """Make the default device one without numbers; give the one that models lie on."""
    home = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield home
    finally:
        torch.set_default_device(None if home.type == "cpu" else home)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nb.errors.NullBayesWarning)  # few sweeps, small networks
        yield


# made at import, before the default device is moved
MODEL = {model.name: (model.build(), model.inputs(6, torch.Generator().manual_seed(1))) for model in MODELS.values()}
TARGETS = CLASSIFICATION.targets(6, torch.Generator().manual_seed(2))


def data(model: Model = MLP) -> list[tuple[object, Tensor]]:
    return [(MODEL[model.name][1], TARGETS)]


def is_at(home: torch.device, *tensors: Tensor) -> bool:
    return all(tensor.device.type == home.type for tensor in tensors)


@each_kind
@pytest.mark.parametrize("projector", PROJECTORS.values(), ids=PROJECTORS)
def test_posterior_is_on_the_device_of_its_model(
    kind: type, projector: object, elsewhere: torch.device, tmp_path: Path
) -> None:
    model, x = MODEL["mlp"]
    posterior = kind(model).fit(data(), 4, projector=projector, progress=False)
    assert is_at(elsewhere, posterior.extend(2, progress=False).directions)
    for pred_type in ("linearized", "sampled"):
        prediction = posterior.predict(x, pred_type=pred_type)
        assert is_at(elsewhere, prediction.mean, prediction.variance, prediction.probs, prediction.samples)
    for score in SCORES:
        assert is_at(elsewhere, posterior.ood_score(x, score))
    assert is_at(elsewhere, posterior.functional_variance(x, exact=True), *posterior.sample().values())
    assert posterior.report.n_samples == 6
    assert posterior.check_fit(data()).n_data == 6
    for method in ("closed_form", "nll", "marglik"):
        assert posterior.optimize_prior_precision(data(), method=method) > 0
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = nb.load(tmp_path / "posterior.safetensors", model)
    assert is_at(elsewhere, loaded.directions)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert is_at(elsewhere, loaded.prepare(data()).functional_variance(x, exact=True))


@each_kind
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_rows_are_on_the_device_of_their_model(kind: type, model: Model, elsewhere: torch.device) -> None:
    network, x = MODEL[model.name]
    posterior = kind(network).fit(data(model), 3, progress=False)
    assert is_at(elsewhere, posterior.directions, posterior.predict(x).mean)
    loss = kind is nb.LossProjectedPosterior
    rows = (nb.LossJacobian if loss else nb.OutputJacobian)(network, data(model), storage="matrix_free")
    assert is_at(elsewhere, rows.dense(), rows.block(0, rows.rows_per_example).gram(torch.float64))
    assert nb.plan(network, data(model), loss=loss).n_rows == rows.n_rows


def test_base_distributions_are_drawn_on_the_device_of_their_generator(elsewhere: torch.device) -> None:
    model, _ = MODEL["mlp"]

    def base(n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, 51, generator=generator, dtype=torch.float64, device=generator.device)

    assert is_at(elsewhere, nb.ProjectedPosterior(model).fit(data(), 3, base=base, progress=False).directions)


def test_quadrature_ignores_the_default_device(elsewhere: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nb.posteriors.best_precision, "_DENSE_SPECTRUM", 5)
    posterior = nb.ProjectedPosterior(MODEL["mlp"][0]).fit(data(), 4, progress=False)
    assert posterior.optimize_prior_precision(data(), method="marglik") > 0


def test_metrics_need_no_device(elsewhere: torch.device) -> None:
    probs = torch.tensor([[0.9, 0.1], [0.3, 0.7]], device=elsewhere)
    labels = torch.tensor([0, 0], device=elsewhere)
    for name in ("accuracy", "nll", "brier", "ece", "mce"):
        assert getattr(metrics, name)(probs, labels) > 0
    assert metrics.confidence(probs) > 0
    assert metrics.auroc(probs[:, 0], probs[:, 1]) < 1
    assert metrics.fpr95(probs[:, 0], probs[:, 1]) > 0
    assert metrics.aupr(probs[:, 0], probs[:, 1]) > 0
    assert metrics.aurc([0.2, 0.1], [0, 1]) == 0.75
    assert metrics.nll([[0.9, 0.1], [0.3, 0.7]], [0, -100]) > 0
    assert metrics.accuracy([[0.9, 0.1]], [[1, 1]], multilabel=True) == 0.5
    for name in ("gaussian_nll", "crps"):
        assert getattr(metrics, name)(probs, 0.5, labels[:, None].expand(2, 2)) > 0
    assert metrics.rmse(probs, [[0, 0], [0, 0]]) > 0
    assert metrics.interval_coverage(-probs, probs, 0 * probs) == 1
    assert metrics.interval_width(-probs, probs) > 0


def test_matrices_are_on_the_device_asked_for(elsewhere: torch.device) -> None:
    assert all(is_at(torch.device("cpu"), case.matrix) for case in cases())
    assert all(is_at(elsewhere, case.matrix) for case in cases(elsewhere))


@pytest.mark.cpu
def test_network_of_the_demonstration_is_on_the_cpu(elsewhere: torch.device) -> None:
    pytest.importorskip("sklearn")
    digits = demo.load_digits()
    model = demo.train_on_digits(digits, steps=2)
    assert is_at(torch.device("cpu"), digits.x_train, digits.y_train, *model.parameters())


@pytest.mark.slow
@pytest.mark.cpu
def test_toy_of_the_demonstration_is_on_the_cpu(elsewhere: torch.device) -> None:
    assert is_at(torch.device("cpu"), demo.toy_regression().std)


def test_evaluations(elsewhere: torch.device, tmp_path: Path) -> None:
    model, x = MODEL[MLP.name]
    posterior = nb.ProjectedPosterior(model).fit([(x, TARGETS)], n_samples=4, progress=False)
    found = nb.evaluate([posterior], [(x, TARGETS)], {"twice": 2 * x}, scores="all", bootstrap=3)
    assert all(0 <= row.strangers["twice"].auroc <= 1 for row in found.rows)
    assert "twice (6)" in str(found)
    found.plot(tmp_path / "evaluation.png")
