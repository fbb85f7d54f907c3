"""Samples: the noise that they come from, what more of them are, and how they are put into the model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import NotFittedError, SettingsError
from nullbayes.projectors import ExactPrimal
from nullbayes.testing import kernel_dimension, kernel_projector
from support.drawing import rand, randn, seeded
from support.models import CLASSIFICATION, MLP, MODELS
from support.posterior_fits import EXACT, ITERATIVE, X_NEW, each_kind, fit_mlp, rows_of
from support.slow_answers import flat_parameters

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@each_kind
def test_the_seed_determines_the_samples(kind: type) -> None:
    one, same, other = fit_mlp(kind, seed=3), fit_mlp(kind, seed=3), fit_mlp(kind, seed=4)
    assert torch.equal(one.directions, same.directions)
    assert (one.directions - other.directions).norm(dim=1).min() > 1


def test_samples_are_uncorrelated_within_and_between_seeds() -> None:
    """Sample i comes from a generator of its own; two seeds must not share samples either."""
    everything = torch.cat([fit_mlp(nb.ProjectedPosterior, seed=seed, n_samples=20).directions for seed in (0, 1)])
    similarity = torch.corrcoef(everything) - torch.eye(40)
    assert similarity.abs().max() < 0.8  # 36 dimensions: 0.8 is six standard deviations away


def test_a_fit_with_a_generator_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    posterior = fit_mlp(nb.ProjectedPosterior)
    posterior.predict(X_NEW)
    posterior.functional_variance(X_NEW, exact=True)
    posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fit_without_a_generator_follows_the_global_one() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = fit_mlp(nb.ProjectedPosterior, generator=None), fit_mlp(nb.ProjectedPosterior, generator=None)
        torch.manual_seed(5)
        again = fit_mlp(nb.ProjectedPosterior, generator=None)
    assert torch.equal(first.directions, again.directions)
    assert not torch.allclose(first.directions, second.directions)


@pytest.mark.parametrize(
    "projector", [EXACT, ExactPrimal(), ITERATIVE, "auto"], ids=["dual", "primal", "krylov", "auto"]
)
@each_kind
def test_extending_gives_the_samples_of_a_larger_fit(kind: type, projector: Any) -> None:
    whole = fit_mlp(kind, n_samples=7, projector=projector)
    parts = fit_mlp(kind, n_samples=4, projector=projector)
    first = parts.directions.clone()
    assert parts.extend(3, progress=False) is parts
    assert torch.equal(parts.directions[:4], first)
    torch.testing.assert_close(parts.directions, whole.directions)
    torch.testing.assert_close(parts.predict(X_NEW).variance, whole.predict(X_NEW).variance)
    for name in ("n_samples", "kernel_dimension", "kernel_dimension_stderr", "prior_precision", "converged"):
        assert getattr(parts.report, name) == pytest.approx(getattr(whole.report, name)), name
    assert parts.report.train_std == pytest.approx(whole.report.train_std, abs=1e-9)
    assert len(parts.report.residual) == 7


@each_kind
def test_directions_are_noise_projected_on_the_null_space(kind: type) -> None:
    noise = randn(6, 51, generator=seeded(8), dtype=torch.float64)
    projector = kernel_projector(rows_of(kind, CLASSIFICATION))
    for method in (EXACT, ITERATIVE, ExactPrimal()):
        posterior = fit_mlp(kind, n_samples=6, base=noise, projector=method)
        torch.testing.assert_close(posterior.directions, noise @ projector, rtol=1e-6, atol=1e-7)


@each_kind
def test_a_base_may_be_a_tensor_a_mapping_or_a_function(kind: type) -> None:
    noise = 3 * randn(4, 51, generator=seeded(8), dtype=torch.float64)
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (3, 6), "2.bias": (3,)}
    pieces = noise.split([24, 6, 18, 3], dim=1)
    named = {name: piece.reshape(4, *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    given = []

    def drawn(n: int, generator: torch.Generator) -> Tensor:
        given.append(rand((), generator=generator))
        return noise[:n]

    by_tensor, by_name, by_function = (fit_mlp(kind, n_samples=4, base=base) for base in (noise, named, drawn))
    assert torch.equal(by_tensor.directions, by_name.directions)
    assert torch.equal(by_tensor.directions, by_function.directions)
    assert by_tensor.prior_precision == 1.0  # the base has its own scale
    assert by_tensor.report.kernel_dimension == kernel_dimension(rows_of(kind, CLASSIFICATION))
    by_function.extend(2, progress=False)
    torch.testing.assert_close(by_function.directions[4:], by_tensor.directions[:2])
    assert given[0] != given[-1]  # another part of the random stream
    with pytest.raises(SettingsError, match="no more to extend with"):
        by_tensor.extend(1)
    with pytest.raises(SettingsError, match="exact=False"):
        by_tensor.functional_variance(X_NEW, exact=True)


def test_the_null_space_dimension_with_a_base_uses_isotropic_probes() -> None:
    posterior = fit_mlp(nb.ProjectedPosterior, n_samples=4, base=torch.zeros(4, 51), projector=ITERATIVE)
    report = posterior.report
    assert report.kernel_dimension_stderr > 0
    assert abs(report.kernel_dimension - 36) < 5 * report.kernel_dimension_stderr


@each_kind
def test_samples_are_named_parameters(kind: type) -> None:
    posterior, model = fit_mlp(kind), MLP.build()
    named = posterior.sample(3)
    assert {name: tuple(value.shape) for name, value in named.items()} == {
        name: (3, *parameter.shape) for name, parameter in model.named_parameters()
    }
    flat = torch.cat([value.flatten(1) for value in named.values()], dim=1)
    wanted = flat_parameters(model) + posterior.directions[:3] / posterior.prior_precision**0.5
    torch.testing.assert_close(flat, wanted)
    assert len(posterior.sample()["0.bias"]) == 5


@pytest.mark.parametrize("case", [MLP, MODELS["tied weights"], MODELS["frozen"]], ids=lambda case: case.name)
def test_a_sample_can_be_put_into_the_model_for_a_while(case: Any) -> None:
    model = case.build()
    posterior = nb.ProjectedPosterior(model).fit([CLASSIFICATION.data()], 3, projector=EXACT, progress=False)
    own, pointers = model(X_NEW), [parameter.data_ptr() for parameter in model.parameters()]
    for i in (0, 2, -1):
        with posterior.sampled_parameters(i) as changed:
            assert changed is model
            inside = model(X_NEW)
        torch.testing.assert_close(inside, posterior.predict(X_NEW, pred_type="sampled").samples[i])
        assert torch.equal(model(X_NEW), own)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_the_trained_parameters_return_after_an_error() -> None:
    posterior = fit_mlp(nb.ProjectedPosterior)
    model = posterior._network.model
    own = model(X_NEW)

    def interrupted() -> None:
        with posterior.sampled_parameters(1):
            assert not torch.allclose(model(X_NEW), own)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model(X_NEW), own)
    posterior.predict(X_NEW)


def test_released_rows_can_be_built_again() -> None:
    whole, posterior = fit_mlp(nb.ProjectedPosterior, n_samples=6), fit_mlp(nb.ProjectedPosterior, n_samples=4)
    before = posterior.predict(X_NEW).samples
    assert posterior.release() is posterior
    torch.testing.assert_close(posterior.predict(X_NEW).samples, before, rtol=0, atol=0)
    for ask in (lambda: posterior.extend(2), lambda: posterior.functional_variance(X_NEW, exact=True)):
        with pytest.raises(NotFittedError, match=r"prepare\(loader\)"):
            ask()
    posterior.prepare([CLASSIFICATION.data()], projector=EXACT).extend(2, progress=False)
    torch.testing.assert_close(posterior.directions, whole.directions)


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE], ids=["dual", "krylov"])
def test_release_and_a_new_fit_free_what_was_built_on_the_training_data(projector: Any) -> None:
    """By release, and by a fit before it reads data: the memory is the new one's."""
    held: list[bool] = []

    class Loader:
        def __iter__(self) -> Any:
            held.extend(ref() is not None for ref in refs)
            yield CLASSIFICATION.data()

    for let_go in (lambda p: p.release(), lambda p: p.fit(Loader(), 3, projector=projector, progress=False)):
        posterior = fit_mlp(nb.ProjectedPosterior, projector=projector)
        posterior.functional_variance(X_NEW, exact=True)
        made = posterior._prepared
        built = made, made.rows, made.state, posterior._exact, made.jacobian, made.jacobian.examples
        refs = [weakref.ref(part) for part in built]
        del built, made
        let_go(posterior)
        gc.collect()
        held.extend(ref() is not None for ref in refs)
    assert not any(held)
    assert len(held) >= 4 * len(refs)


def test_samples_of_a_posterior_that_was_prepared_again_meet_the_tolerance_of_the_fit() -> None:
    data = [CLASSIFICATION.data(n=12)]
    posterior = nb.ProjectedPosterior(MLP.build()).fit(data, 3, tolerance=1e-7, progress=False)
    posterior.release().prepare(data).extend(3, progress=False)
    assert max(posterior.report.residual) <= posterior.report.tolerance == 1e-7
    posterior.release().prepare(data, tolerance=0.3).extend(3, progress=False)
    assert posterior.report.tolerance == 0.3  # what all of them meet


@each_kind
def test_a_fit_that_is_interrupted_while_it_measures_leaves_all_or_nothing(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    posterior, fresh = fit_mlp(kind), kind(MLP.build())
    before, alpha, report = posterior.directions, posterior.prior_precision, posterior.report
    monkeypatch.setattr("nullbayes.posteriors.measured.train_std", interrupted)
    with pytest.raises(KeyboardInterrupt):
        posterior.extend(3, progress=False)
    assert torch.equal(posterior.directions, before)
    assert (posterior.prior_precision, posterior.report) == (alpha, report)
    with pytest.raises(KeyboardInterrupt):
        fresh.fit([CLASSIFICATION.data()], 3, progress=False)
    with pytest.raises(NotFittedError):
        fresh.predict(X_NEW)
