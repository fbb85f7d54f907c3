"""The noise of a regression: training residuals, corrected for the degrees of freedom that were spent on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import NullBayesWarning, UnderfitWarning
from nullbayes.likelihoods import Regression
from nullbayes.posteriors import sigma
from nullbayes.posteriors.sigma import Smoother, share_left, smoother
from support.drawing import randn, seeded
from support.posterior_fits import each_kind
from support.slow_answers import jacobian

NOISE = 0.3


def draw(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    x = randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + NOISE * randn(n, 1, generator=generator, dtype=torch.float64)


def trained(n: int = 80, width: int = 20, steps: int = 1500) -> nn.Module:
    """A network that fits the noise of its training data."""
    x, y = draw(n)
    with torch.random.fork_rng(), torch.device("cpu"):  # the same network on every device
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
    model = model.to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Generalized cross-validation at the fixed point of MacKay, by dense matrices and a fine grid of ridges."""
    rows = jacobian(model, x).flatten(0, 1).detach()
    rss, n = float((model(x).detach() - y).square().sum()), len(rows)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    seen = float((torch.linalg.pinv(rows) @ rows @ theta).square().sum())
    gram, best, found = rows @ rows.T, math.inf, 0.0
    for ridge in torch.logspace(-6, 3, 4000, dtype=torch.float64).tolist():
        spent = float(torch.linalg.solve(gram + ridge * torch.eye(n, dtype=torch.float64), gram).trace())
        error = abs(math.log(ridge) - math.log(rss / (n - spent) * spent / seen))
        if error < best:
            best, found = error, math.sqrt(rss / n) / (1 - spent / n)
    return found


@pytest.mark.slow
@each_kind
def test_the_noise_is_that_of_generalized_cross_validation(kind: type, model: nn.Module) -> None:
    x, y = draw(80)
    posterior = kind(model, "regression").fit([(x, y)], 5, generator=seeded(), progress=False)
    assert posterior.likelihood.sigma_noise == pytest.approx(oracle(model, x, y), rel=1e-3)


def test_residuals_that_were_fitted_are_corrected(model: nn.Module) -> None:
    x, y = draw(80)
    residual = float((model(x).detach() - y).square().mean().sqrt())
    posterior = nb.ProjectedPosterior(model, "regression").fit([(x, y)], 30, generator=seeded(), progress=False)
    sigma = posterior.likelihood.sigma_noise
    x, y = draw(2000, seed=1)
    prediction = posterior.predict(x)
    error = float((prediction.mean - y).square().mean().sqrt())
    assert residual < 0.9 * NOISE  # or there would be nothing to correct
    assert abs(sigma - error) < 0.5 * abs(residual - error)
    half = 1.645 * (prediction.variance + sigma**2).sqrt()
    assert 0.8 < float(((prediction.mean - y).abs() < half).double().mean()) < 0.97


@each_kind
def test_given_noise_is_kept(kind: type, model: nn.Module) -> None:
    posterior = kind(model, Regression(0.123)).fit([draw(80)], 5, progress=False)
    assert posterior.likelihood.sigma_noise == 0.123


@each_kind
def test_building_the_rows_again_does_not_correct_the_noise_twice(kind: type, model: nn.Module) -> None:
    posterior = kind(model, "regression").fit([draw(80)], 5, progress=False)
    before = posterior.likelihood
    posterior.release().prepare([draw(80)])
    assert posterior.likelihood == before


def test_scaled_rows_give_the_same_noise(model: nn.Module) -> None:
    plain, scaled = (
        nb.ProjectedPosterior(model, "regression", hessian=hessian).fit([draw(80)], 5, progress=False)
        for hessian in (False, True)
    )
    assert scaled.likelihood.sigma_noise == pytest.approx(plain.likelihood.sigma_noise)


def smoother_of(values: Tensor, n: int, seen: float = 10.0) -> Smoother:
    nodes = torch.cat([values, values.new_zeros(n - len(values))])
    return Smoother(nodes, torch.full_like(nodes, 1 / n), lambda _: seen)


@pytest.mark.parametrize("rms", [1e-12, 1e-3, 1.0, 1e3])
def test_the_share_of_degrees_of_freedom_left_solves_the_fixed_point(rms: float) -> None:
    values = torch.logspace(4, -6, 40, dtype=torch.float64)
    for n in (40, 45, 400):
        found = smoother_of(values, n)
        left = share_left(found, n, rms)
        assert (n - 40) / n - 1e-12 <= left <= 1.0
        ridge = rms**2 / left * n * (1 - left) / 10.0
        assert found.left(ridge) == pytest.approx(left, rel=1e-6)


def test_zero_residuals_or_parameters_use_no_degrees_of_freedom() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert share_left(smoother_of(one, 5), 5, 0.0) == share_left(smoother_of(one, 5, 0.0), 5, 1.0) == 1.0
    assert share_left(smoother_of(0 * one, 5), 5, 1.0) == 1.0


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)], ids=["few rows", "many rows"])
def test_the_quadrature_agrees_with_eigenvectors(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = seeded(2)
    matrix = randn(*shape, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, shape[1]).double()
    theta, rows = randn(shape[1], generator=generator, dtype=torch.float64), nb.DenseRows(matrix)
    dense = smoother(rows, theta)
    monkeypatch.setattr(sigma, "_DENSE", 5)
    rough = smoother(rows, theta)
    projector = torch.linalg.pinv(matrix) @ matrix
    assert dense.seen(0.0) == pytest.approx(float((projector @ theta).square().sum()), rel=1e-6)
    for ridge in (1e-2, 1.0, 10.0):
        gram = matrix @ matrix.T
        hat = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=torch.float64), gram)
        assert dense.left(ridge) == pytest.approx(1 - float(hat.trace()) / len(gram))
        assert rough.left(ridge) == pytest.approx(dense.left(ridge), rel=0.15)
        wanted = float(
            (matrix @ theta) @ torch.linalg.solve(gram + ridge * torch.eye(len(gram)).double(), matrix @ theta)
        )
        assert rough.seen(ridge) == pytest.approx(wanted, rel=1e-3)


def test_a_network_that_interpolates_causes_a_warning() -> None:
    x, y = draw(40)
    model = trained(40, 200, 10)
    with torch.no_grad():  # the last layer solves for the targets
        hidden = torch.cat([model[1](model[0](x)), torch.ones(40, 1, dtype=torch.float64)], 1)
        solved = torch.linalg.pinv(hidden) @ y
        model[2].weight.copy_(solved[:-1].T)
        model[2].bias.copy_(solved[-1])
    with pytest.warns(NullBayesWarning, match="far better than it can predict new ones"):
        posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1e6).fit([(x, y)], 5, progress=False)
    assert 0.01 < posterior.likelihood.sigma_noise <= float(y.std()) * 1.1


def test_a_network_with_few_examples_causes_a_warning_that_says_what_to_type() -> None:
    x, y = draw(30)
    model = trained(30, 40, 600)
    with pytest.warns(NullBayesWarning, match=r"30 training targets") as caught:
        posterior = nb.ProjectedPosterior(model, "regression").fit([(x, y)], 30, generator=seeded(), progress=False)
    noise, promise = posterior.likelihood.sigma_noise, posterior.report.promise
    x, y = draw(2000, seed=1)
    assert noise < 0.7 * float((model(x).detach() - y).square().mean().sqrt())  # there is a reason to warn
    (message,) = (str(warning.message) for warning in caught)
    assert f"for new data, {noise:.2g}." in message
    assert promise.apart_std / posterior.prior_precision**0.5 / noise == pytest.approx(0.08, rel=0.1)
    assert "at about 8% of that noise" in message
    for typed in ("held_out=...", "posterior.tune(held_out)", "nb.likelihoods.Regression(sigma_noise=...)"):
        assert typed in message


def test_noise_that_held_out_data_tune_causes_no_warning() -> None:
    data, model = draw(30), trained(30, 40, 600)
    posterior = nb.ProjectedPosterior(model, "regression").fit([data], 5, held_out=draw(200, 1), progress=False)
    assert posterior.temperature > 1.5  # the estimate was too small


class InUnits(nn.Module):
    """Gives each output in units of its own, as networks that undo a standardization do."""

    def __init__(self, model: nn.Module, units: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("units", units)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.units


@each_kind
def test_units_do_not_matter(kind: type) -> None:
    x = draw(80)[0]
    y = torch.cat([x.sin().sum(1, keepdim=True), x.prod(1, keepdim=True)], 1) + NOISE * randn(80, 2, generator=seeded())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, 2)).to(x)
        optimizer = torch.optim.Adam(body.parameters(), 1e-2)
        for _ in range(300):
            optimizer.zero_grad()
            (body(x) - y.to(x)).square().mean().backward()
            optimizer.step()
    units = torch.tensor([1.0, 1000.0]).to(x)
    plain, large = (
        kind(InUnits(body, u), "regression").fit([(x, y.to(x) * u)], 10, generator=seeded(), progress=False)
        for u in (units.clamp_max(1.0), units)
    )
    (a, b), (c, d) = plain.likelihood.sigma_noise, large.likelihood.sigma_noise
    assert (a, b) == pytest.approx((c, d / 1000.0), rel=1e-3)
    assert plain.prior_precision == pytest.approx(large.prior_precision, rel=0.05)
    assert large.report.worst_ratio == pytest.approx(plain.report.worst_ratio, rel=0.1)
    assert large.report.worst_ratio < 0.1
    assert large.check_fit([(x, y.to(x) * units)]).worst_ratio < 0.1
    lower, upper = large.predict(x).interval(0.9)
    covered = ((lower <= y.to(x) * units) & (y.to(x) * units <= upper)).double().mean(0)
    assert covered.min() > 0.85  # of both


def test_scores_do_not_depend_on_units() -> None:
    x = draw(80)[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2)).to(x)
    y = body(x).detach() + NOISE * randn(80, 2, generator=seeded()).to(x)
    far = torch.cat([x[:20], 4 * x[:20]])
    scores = []
    for large in (1.0, 1e5):
        units = torch.tensor([1.0, large]).to(x)
        posterior = nb.ProjectedPosterior(InUnits(body, units), "regression")
        posterior.fit(x, y * units, 10, tolerance=1e-6, generator=seeded(), progress=False)
        scores.append(posterior.ood_score(far) * posterior.prior_precision)
    torch.testing.assert_close(*scores, rtol=0.05, atol=0.0)


def test_one_output_that_varies_too_much_causes_a_warning() -> None:
    x, _ = draw(80)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2)).to(x)
    y = model(x).detach() + 0.1 * randn(80, 2, generator=seeded()).to(x)
    scaled = InUnits(model, torch.tensor([1.0, 1e6]).to(x))  # whose second output hides what the first one does
    posterior = nb.LossProjectedPosterior(scaled, Regression((1e4, 1.0)), prior_precision=0.05)
    with pytest.warns(UnderfitWarning, match="one of the outputs varies by"):
        posterior.fit([(x, y * scaled.units)], 10, generator=seeded(), progress=False)
