"""Outputs with more dimensions than (examples, outputs): images and sequences of classes, positions to be ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import DataError, LikelihoodError
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, Regression
from nullbayes.predictive import SCORES
from support.drawing import randint, randn

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.filterwarnings("ignore:.*are training data"),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_labels(classes: int, *shape: int) -> Tensor:
    labels = randint(classes, shape, generator=torch.Generator().manual_seed(1))
    labels[0].flatten()[:2] = -100
    return labels


IMAGES = (draw(5, 3, 4, 2), drawn_labels(3, 5, 4, 2))  # classes at dimension 1
SEQUENCES = (draw(5, 4, 3), drawn_labels(3, 5, 4))  # classes last


@pytest.mark.parametrize(("outputs", "labels", "dim"), [(*IMAGES, -3), (*SEQUENCES, -1)], ids=["images", "sequences"])
def test_dimension_of_the_classes_is_found_and_kept(outputs: Tensor, labels: Tensor, dim: int) -> None:
    likelihood = Classification()
    likelihood.check(outputs, labels)
    fitted = likelihood.fitted(outputs, labels)
    assert fitted.class_dim == dim
    assert likelihood.settings()["class_dim"] is None
    probs = fitted.probabilities(torch.stack([outputs, 2 * outputs]))  # of two samples
    torch.testing.assert_close(probs.sum(dim), torch.ones_like(probs.sum(dim)))
    last, same = outputs.movedim(dim, 1), fitted.loss(outputs, labels)
    torch.testing.assert_close(same, F.cross_entropy(last, labels, reduction="none").flatten(1).sum(1))
    soft = F.one_hot(labels.clamp_min(0), 3).double().movedim(-1, dim)
    wanted = F.cross_entropy(last, labels.clamp_min(0), reduction="none").flatten(1).sum(1)
    torch.testing.assert_close(fitted.loss(outputs, soft), wanted)


@pytest.mark.parametrize(("outputs", "labels"), [IMAGES, SEQUENCES], ids=["images", "sequences"])
def test_ignored_positions_have_no_loss_and_do_not_count(outputs: Tensor, labels: Tensor) -> None:
    fitted = Classification().fitted(outputs, labels)
    counted = fitted.counted(outputs, labels)
    assert counted is not None
    assert int((~counted).sum()) == 3 * 2  # two positions of three classes
    moved = torch.where(counted, outputs, 9 * draw(*outputs.shape, seed=3))
    torch.testing.assert_close(fitted.loss(moved, labels), fitted.loss(outputs, labels))
    right = outputs.argmax(fitted.class_dim)[labels >= 0] == labels[labels >= 0]
    assert fitted.accuracy(fitted.probabilities(moved), labels) == pytest.approx(float(right.double().mean()))
    gone = torch.full_like(labels, -100)
    assert not fitted.loss(outputs, gone).any()


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Classification(), IMAGES[0], IMAGES[1].clamp_min(0)),
        (Classification(), SEQUENCES[0], SEQUENCES[1].clamp_min(0)),
        (Bernoulli("multilabel"), draw(5, 2, 3), (draw(5, 2, 3, seed=2) > 0).long()),
        (Regression(0.5), draw(5, 2, 3), draw(5, 2, 3, seed=2)),
    ],
    ids=["images", "sequences", "multilabel", "regression"],
)
def test_values_are_scaled_by_a_root_of_the_hessian(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    shape, wide = outputs.shape[1:], outputs[0].numel()
    for f, y in zip(outputs, targets, strict=True):
        hessian = torch.autograd.functional.hessian(lambda g, y=y: likelihood.loss(g.view(1, *shape), y[None])[0], f)
        every = torch.eye(wide, dtype=torch.float64).view(wide, *shape)
        root = likelihood.scaled(every, f.expand(wide, *shape), y.expand(wide, *y.shape)).flatten(1).T
        torch.testing.assert_close(root.T @ root, hessian.reshape(wide, wide))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "fragment"),
    [
        (Classification(), (5, 3, 3), torch.zeros(5, 3, dtype=torch.long), r"dimension 1 or the last.*class_dim="),
        (Classification(), (5, 3, 4), torch.zeros(5, 2, dtype=torch.long), r"must have shape \(5, 4\) or \(5, 3\)"),
        (Classification(class_dim=1), (5, 3, 4), torch.zeros(5, 3, dtype=torch.long), r"must have shape \(5, 4\);"),
        (Classification(class_dim=3), (5, 3, 4), torch.zeros(5, 4, dtype=torch.long), "class_dim=3 is not a dimension"),
        (Classification(class_dim=0), (5, 3, 4), torch.zeros(5, 4, dtype=torch.long), "class_dim=0 is not a dimension"),
        (Classification(), (5, 1, 4), torch.zeros(5, 4, dtype=torch.long), "holds one class only.*multilabel"),
        (Classification(), (5, 3, 4), torch.full((5, 4), 3), "from 3 to 3.*labels must be 0 to 2, or ignore_index"),
        (Classification(), (5, 3, 4), torch.zeros(5, 4), "not class probabilities"),
        (Bernoulli("multilabel"), (5, 3, 4), torch.zeros(5, 4, 3), r"shape \(5, 3, 4\), not shape \(5, 4, 3\)"),
        (Regression(), (5, 3, 4), torch.zeros(5, 4, 3), r"\(5, 4, 3\) do not fit outputs of shape \(5, 3, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    likelihood: Likelihood, outputs: tuple[int, ...], targets: Tensor, fragment: str
) -> None:
    with pytest.raises(LikelihoodError, match=fragment):
        likelihood.check(draw(*outputs), targets)


def test_a_dimension_that_is_given_settles_what_shapes_leave_open() -> None:
    outputs, labels = draw(5, 3, 3), drawn_labels(3, 5, 3)
    for dim in (1, 2):
        likelihood = Classification(class_dim=dim)
        likelihood.check(outputs, labels)
        wanted = F.cross_entropy(outputs if dim == 1 else outputs.mT, labels, reduction="none").sum(1)
        torch.testing.assert_close(likelihood.loss(outputs, labels), wanted)


# --- posteriors -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A label for each position of sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (n, T, 2) -> (n, T, 3)
        h = self.body(x).tanh()
        return self.head(h + h.mean(1, keepdim=True))


def fit(kind: type, labels: Tensor, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Tagger().double()
    options = {"generator": torch.Generator().manual_seed(0), "projector": nb.projectors.ExactDual(), **options}
    posterior = kind(model, prior_precision="optimal")
    return posterior.fit([(draw(3, 4, 2), labels)], 6, progress=False, **options), model


each_kind = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])


@each_kind
def test_sequences_of_another_length_can_be_predicted(kind: type) -> None:
    posterior, _ = fit(kind, drawn_labels(3, 3, 4))
    for length in (4, 2, 7):
        x = draw(5, length, 2, seed=5)
        prediction = posterior.predict(x)
        assert prediction.samples.shape == (6, 5, length, 3)
        assert prediction.probs is not None
        torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(5, length, dtype=torch.float64))
        for kind_of_score in SCORES:
            assert posterior.ood_score(x, kind_of_score, mask="all").shape == (5,)
        rows = posterior.functional_variance(x, exact=True)
        assert rows.shape == (5, length, 3)


def test_scores_are_pooled_over_positions() -> None:
    posterior, _ = fit(nb.ProjectedPosterior, drawn_labels(3, 3, 4).clamp_min(0))
    x = draw(5, 4, 2, seed=5)
    prediction = posterior.predict(x)
    probs = prediction.probs
    torch.testing.assert_close(posterior.ood_score(x, "max_variance"), prediction.variance.amax((1, 2)))
    torch.testing.assert_close(posterior.ood_score(x, "sum_variance"), prediction.variance.sum(2).mean(1))
    torch.testing.assert_close(posterior.ood_score(x, "entropy"), -(probs * probs.log()).sum(2).mean(1))
    inside = prediction.samples.softmax(-1)
    mean = inside.mean(0)
    gained = -(mean * mean.log()).sum(2) + (inside * inside.log()).sum(3).mean(0)
    torch.testing.assert_close(posterior.ood_score(x, "mutual_information"), gained.mean(1))
    torch.testing.assert_close(posterior.ood_score(x, "mutual_information", per="position"), gained)


def test_samples_move_ignored_positions_only() -> None:
    labels = drawn_labels(3, 3, 4)
    posterior, model = fit(nb.ProjectedPosterior, labels)
    x = draw(3, 4, 2)
    change = posterior.predict(x).samples - model(x).detach()
    assert change[:, labels >= 0].abs().max() < 1e-8
    assert change[:, labels < 0].abs().max() > 1e-3
    check, report = posterior.check_fit([(x, labels)]), posterior.report
    assert report.train_std < 1e-8
    assert max(check.std, check.max_shift) < 1e-8
    outputs = model(x).detach()
    spread = torch.stack([outputs[:, t][labels[:, t] >= 0].var(0, unbiased=False) * int((labels[:, t] >= 0).sum())
                          for t in range(4)]).sum() / (3 * int((labels >= 0).sum()))  # fmt: skip
    assert report.output_std == pytest.approx(float(spread.sqrt()))
    assert report.output_std == pytest.approx(check.output_std)


@each_kind
def test_train_std_is_measured_on_positions_that_count(kind: type) -> None:
    labels = drawn_labels(3, 3, 4)
    posterior, model = fit(kind, labels, projector=nb.projectors.ExactDual(truncate=True, rtol=0.3))
    x = draw(3, 4, 2)
    posterior.prior_precision = 1.0
    change = linearized(Network(model), x, posterior.directions)[1][:, labels >= 0]
    assert posterior.report.train_std > 1e-3
    assert posterior.report.train_std == pytest.approx(float(change.square().mean().sqrt()))


@each_kind
def test_data_with_only_ignored_labels_are_refused(kind: type) -> None:
    with pytest.raises(DataError, match=r"to be ignored \(ignore_index\)"):
        fit(kind, torch.full((3, 4), -100))


@pytest.mark.filterwarnings("ignore:The held-out likelihood is still rising")  # labels at random
@pytest.mark.parametrize("method", ["nll", "marglik"])
def test_the_prior_precision_is_tuned(method: str) -> None:
    labels = drawn_labels(3, 3, 4)
    posterior, _ = fit(nb.ProjectedPosterior, labels)
    assert posterior.optimize_prior_precision([(draw(3, 4, 2), labels)], method=method) > 0


def test_settings_are_saved_and_loaded(tmp_path: Any) -> None:
    labels = drawn_labels(3, 3, 4)
    posterior, model = fit(nb.ProjectedPosterior, labels)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", model)
    assert loaded.likelihood == posterior.likelihood == Classification(class_dim=-1, some_ignored=True)
    assert loaded.check_fit([(draw(3, 4, 2), labels)]) == posterior.check_fit([(draw(3, 4, 2), labels)])


# --- models that are functions, or wrapped ----------------------------------------------------------------------------


def test_a_function_and_its_parameters_are_shared_not_copied() -> None:
    parameters = {"body.weight": draw(3, 2), "scale": draw(3)}
    model = nb.as_module(lambda p, x, *, shift=0.0: x @ p["body.weight"].T * p["scale"] + shift, parameters)
    assert [name for name, _ in model.named_parameters()] == ["scale", "body.weight"]
    x = draw(4, 2)
    torch.testing.assert_close(
        model(x, shift=1.0).detach(), x @ parameters["body.weight"].T * parameters["scale"] + 1.0
    )
    parameters["scale"].zero_()
    assert not model(x).any()


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (3, {"w": torch.ones(2)}),
        (lambda p, x: x, {}),
        (lambda p, x: x, [torch.ones(2)]),
        (lambda p, x: x, {"w": torch.ones(2, dtype=torch.long)}),
        (lambda p, x: x, {"w": 1.0}),
    ],
)
def test_as_module_refuses_what_is_not_a_function_of_parameters(function: Callable[..., Any], parameters: Any) -> None:
    with pytest.raises(nb.errors.ModelError, match=r"as_module takes a function|must be a floating-point tensor"):
        nb.as_module(function, parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_stays_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Tagger().to(dtype), draw(3, 4, 2).to(dtype)
    posterior = nb.ProjectedPosterior(model).fit([(x, drawn_labels(3, 3, 4))], 3, progress=False)
    assert posterior.predict(x).samples.dtype == torch.float32
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    with posterior.sampled_parameters(1) as sampled:
        assert sampled(x).dtype == dtype
        moved = model.head.weight.float() - posterior.sample()["head.weight"][1]
    assert moved.abs().max() < 1e-2
    torch.testing.assert_close(posterior.predict(x).mean, model(x).float(), rtol=0, atol=0.1)
    with torch.no_grad():
        model.head.bias += 1.0
    with pytest.raises(nb.errors.ModelError, match="has changed since the posterior was made"):
        posterior.predict(x)
