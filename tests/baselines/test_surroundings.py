"""Answers depend on the seed and the data alone, and a fit leaves the model and the state of torch as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from support.method_table import (
    X_NEW,
    Method,
    answer,
    each_baseline,
    each_method,
)
from support.models import CLASSIFICATION, MLP, batches

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


@each_method
def test_the_seed_determines_the_samples(method: Method) -> None:
    one, same, other = (method.fit(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(answer(method, one), answer(method, same))
    if method.samples and not method.still:
        assert (answer(method, one) - answer(method, other)).abs().max() > 1e-6


@each_method
def test_a_fit_with_a_generator_leaves_the_global_one_alone(method: Method) -> None:
    before = torch.get_rng_state()
    answer(method, method.fit())
    assert torch.equal(torch.get_rng_state(), before)


@each_method
def test_predictions_are_on_the_device_of_the_model(method: Method) -> None:
    answered = answer(method, method.fit())
    assert (answered.device, answered.dtype) == (X_NEW.device, torch.float64)


@each_baseline
def test_no_tensor_is_created_on_the_default_device(method: Method, tmp_path: Path) -> None:
    """Under the default device "meta", a tensor that is made without saying where has no numbers."""
    home, model = torch.get_default_device(), MLP.build()
    data, held_out = [CLASSIFICATION.data()], [CLASSIFICATION.data(seed=3)]
    wanted = answer(method, method.fit(model=model, loader=data))
    torch.set_default_device("meta")
    try:
        posterior = method.fit(model=model, loader=data)
        assert torch.equal(answer(method, posterior), wanted)
        if method.prior:
            assert posterior.optimize_prior_precision(held_out, "marglik" if method.exact else "grid") > 0
        if method.exact:
            assert posterior.functional_variance(X_NEW, exact=True).device == wanted.device
        if method.prior:
            posterior.prior_precision = 1.0
        posterior.save(tmp_path / "posterior")
        assert torch.equal(answer(method, nb.load(tmp_path / "posterior", model)), wanted)
    finally:
        torch.set_default_device(None if home.type == "cpu" else home)


@each_method
def test_the_model_is_left_as_it_was(method: Method) -> None:
    model = MLP.build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer(method, method.fit(model=model))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@each_method
def test_the_batch_size_does_not_matter(method: Method) -> None:
    x, y = CLASSIFICATION.data(n=9)
    loaders = [[(x, y)], batches(x, y, (2, 7)), DataLoader(TensorDataset(x, y), batch_size=4)]
    one, *others = (answer(method, method.fit(loader=loader)) for loader in loaders)
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


@each_baseline
def test_inference_mode_changes_nothing(method: Method) -> None:
    plain = method.fit().ood_score(X_NEW)
    with torch.inference_mode():
        posterior = method.fit()
        torch.testing.assert_close(posterior.ood_score(X_NEW), plain)
