"""More rows than parameters: a useful posterior where there is one, and a warning where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.errors import CollapseWarning, NullBayesWarning, UnderfitWarning
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov
from support.drawing import seeded
from support.models import CLASSIFICATION, MLP

LINE = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None]
LABELS = (LINE[:, 0] * 3).sin().gt(0.3).long() + LINE[:, 0].gt(0).long()
CROWDED = [(LINE, LABELS)]  # 60 examples, 180 rows
FAR = torch.tensor([[-4.0], [4.0]], dtype=torch.float64)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network of 83 parameters, trained on 180 rows' worth of data."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(LINE), LABELS).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def test_more_rows_than_parameters_still_give_a_posterior(trained: nn.Module) -> None:
    posterior = nb.ProjectedPosterior(trained).fit(CROWDED, 30, generator=seeded(), progress=False)
    report = posterior.report
    assert report.n_rows == 180 > report.n_parameters == 83
    assert 1 < report.kernel_dimension < 83
    assert not report.collapsed
    assert report.kernel_dimension_stderr == 0.0  # a rank that was decided, not estimated
    assert max(report.residual) < 0.05
    check = posterior.check_fit(CROWDED)
    assert check.std < 0.05 * check.output_std
    assert check.accuracy_posterior == check.accuracy_model > 0.9
    far, near = (posterior.ood_score(inputs, "max_variance") for inputs in (FAR, LINE))
    assert far.min() > 10 * near.max() > 0


def test_an_iterative_projector_estimates_what_is_left(trained: nn.Module) -> None:
    projector = Krylov(Alternating(block_rows=60), rtol=1e-2)
    posterior = nb.ProjectedPosterior(trained).fit(CROWDED, 30, projector=projector, generator=seeded(), progress=False)
    report = posterior.report
    assert 1 < report.kernel_dimension < 83
    assert report.kernel_dimension_stderr > 0
    assert f"± {report.kernel_dimension_stderr:.1f}" in str(report)
    far, near = (posterior.ood_score(inputs, "max_variance") for inputs in (FAR, LINE))
    assert far.min() > near.max()


@pytest.mark.parametrize("projector", [ExactPrimal(), ExactDual()], ids=["primal", "dual"])
def test_a_collapsed_posterior_causes_a_warning(projector: nb.projectors.Projector) -> None:
    """60 generic inputs determine all 51 parameters: exactly nothing is left."""
    data = [CLASSIFICATION.data(n=60)]
    posterior = nb.ProjectedPosterior(MLP.build())
    with pytest.warns(CollapseWarning, match=r"null space of 0.0 dimensions.*larger tolerance.*loss-projected"):
        posterior.fit(data, 4, projector=projector, progress=False)
    report = posterior.report
    assert report.collapsed
    assert report.kernel_dimension == 0
    assert "COLLAPSED" in str(report)
    assert posterior.predict(data[0][0]).variance.max() < 1e-12  # and so it is: nothing varies
    torch.testing.assert_close(posterior.predict(data[0][0]).mean, MLP.build()(data[0][0]).detach())


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_the_advice_of_the_warning_helps() -> None:
    x, y = CLASSIFICATION.data(n=40)  # 120 rows, 51 parameters
    with pytest.warns(CollapseWarning):
        nb.ProjectedPosterior(MLP.build()).fit([(x, y)], 4, projector=ExactDual(), progress=False)
    larger_tolerance = nb.ProjectedPosterior(MLP.build()).fit([(x, y)], 4, tolerance=0.2, progress=False)
    by_loss = nb.LossProjectedPosterior(MLP.build()).fit([(x, y)], 4, projector=ExactDual(), progress=False)
    fewer = nb.ProjectedPosterior(MLP.build()).fit([(x[:9], y[:9])], 4, projector=ExactDual(), progress=False)
    assert larger_tolerance.report.kernel_dimension > 1
    assert by_loss.report.kernel_dimension == 11
    assert fewer.report.kernel_dimension == 24


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_a_precision_far_too_small_causes_a_warning(kind: type, trained: nn.Module) -> None:
    loose = Krylov(Alternating(block_rows=60), rtol=0.3)
    with pytest.warns(UnderfitWarning, match=r"outputs vary by .* their own spread of .*prior_precision"):
        posterior = kind(trained, prior_precision=1e-6).fit(CROWDED, 8, projector=loose, progress=False)
    report = posterior.report
    assert report.train_std > 0.25 * report.output_std
    posterior.prior_precision = 1e8
    assert posterior.report.train_std < 1e-3 * report.output_std


def test_no_warning_without_a_reason(trained: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NullBayesWarning)
        nb.ProjectedPosterior(trained).fit(CROWDED, 8, generator=seeded(), progress=False)
        nb.LossProjectedPosterior(trained, prior_precision=1e8).fit(CROWDED, 8, generator=seeded(), progress=False)


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_warnings_point_at_the_line_of_the_user(kind: type, trained: nn.Module) -> None:
    loose = Krylov(Alternating(block_rows=60), rtol=0.3)
    with pytest.warns(UnderfitWarning) as caught:
        kind(trained, prior_precision=1e-6).fit(CROWDED, 8, projector=loose, progress=False)
    assert [record.filename for record in caught] == [__file__]
