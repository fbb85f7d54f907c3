"""The prior precision of every method: set, passed, or chosen, without a new fit."""

from __future__ import annotations

import pytest
import torch

from nullbayes import baselines
from nullbayes.errors import SettingsError
from support.method_table import (
    X_NEW,
    Method,
    each_baseline,
)
from support.models import CLASSIFICATION, MLP

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


@each_baseline
def test_a_precision_can_be_changed_without_a_new_fit(method: Method) -> None:
    posterior, advice = method.fit(), "1, the default: optimize_prior_precision(held_out) chooses one"
    assert posterior.prior_precision == 1.0
    assert (advice in str(posterior.report)) == method.prior
    if not method.prior:
        with pytest.raises(SettingsError, match="has no prior"):
            posterior.prior_precision = 2.0
        with pytest.raises(SettingsError, match="has no prior"):
            posterior.optimize_prior_precision([CLASSIFICATION.data()])
        return
    first = posterior.predict(X_NEW)
    posterior.prior_precision = 100.0
    assert bool((posterior.predict(X_NEW).variance < first.variance).all())
    assert posterior.report.prior_precision == 100.0
    assert "the default" not in str(posterior.report)
    posterior.prior_precision = 1.0
    torch.testing.assert_close(posterior.predict(X_NEW).samples, first.samples, rtol=1e-10, atol=1e-12)
    given = method.make(prior_precision=100.0)
    assert given.prior_precision == 100.0
    given.fit([CLASSIFICATION.data()], 4, generator=torch.Generator().manual_seed(0), progress=False)
    posterior.prior_precision = 100.0
    torch.testing.assert_close(posterior.predict(X_NEW).samples, given.predict(X_NEW).samples, rtol=1e-10, atol=1e-12)
    for bad in (0.0, -1.0, float("nan"), "optimal"):
        with pytest.raises(SettingsError, match="positive number"):
            posterior.prior_precision = bad
        with pytest.raises(SettingsError, match="positive number"):
            method.make(prior_precision=bad)
    held_out = [CLASSIFICATION.data(n=9, seed=3)]
    for how in ("grid", "marglik") if method.exact else ("grid",):
        assert posterior.optimize_prior_precision(held_out, how) == posterior.prior_precision


@each_baseline
def test_the_precision_is_one_over_a_variance(method: Method) -> None:
    """Where the prior outweighs the data, four times the precision halves the deviations."""
    if not method.prior:
        return
    posterior = method.fit()
    posterior.prior_precision = 1e8
    first = posterior.predict(X_NEW).variance
    posterior.prior_precision = 4e8
    torch.testing.assert_close(4.0 * posterior.predict(X_NEW).variance, first, rtol=1e-3, atol=0)


@each_baseline
def test_only_a_method_with_a_curvature_has_evidence_and_exact_variances(method: Method) -> None:
    posterior = method.fit()
    if method.exact or not method.prior:
        return
    with pytest.raises(SettingsError, match="has no exact functional variance: use exact=False"):
        posterior.functional_variance(X_NEW, exact=True)
    with pytest.raises(SettingsError, match='has no marginal likelihood: use method="grid"'):
        posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")


def test_a_custom_method_without_evidence_says_how_to_choose_the_precision() -> None:
    class WithPrior(type(baselines.MAP._method)):
        has_prior = True

    class Own(baselines.MAP):
        _method = WithPrior()

    posterior = Own(MLP.build(), prior_precision=3.0).fit([CLASSIFICATION.data()], 1, progress=False)
    with pytest.raises(SettingsError, match='Own has no marginal likelihood: use method="grid" or "nll"'):
        posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")
    assert posterior.prior_precision == 3.0
