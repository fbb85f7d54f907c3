"""The statistic of classes: what it measures, where there is none, and what it adds to a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import nullbayes as nb
from nullbayes.decisions.classes import class_distances
from nullbayes.errors import FileError
from nullbayes.jacobian.features import predicted_classes
from nullbayes.likelihoods import resolve
from support.posterior_files import rewritten

pytestmark = pytest.mark.cpu


def groups(n: int, seed: int = 0, width: int = 6) -> tuple[Tensor, Tensor]:
    """Features of three classes, which have one covariance; the last direction tells no classes apart."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    x = 4.0 * torch.eye(3, width, dtype=torch.float64)[y]
    x = x + 0.3 * torch.randn(n, width, generator=g, dtype=torch.float64)
    x[:, -1] *= 20.0
    return x, y


def test_it_is_the_difference_of_two_distances() -> None:
    x, y = groups(2000)
    new, _ = groups(50, 1)
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    apart, together = (torch.cov(part.T, correction=0) for part in (x - means[y], x))
    apart, together = (torch.linalg.inv(c + 0.01 * c.trace() / 6 * torch.eye(6)) for c in (apart, together))
    wanted = []
    for one in new:
        nearest = min(float((one - mean) @ apart @ (one - mean)) for mean in means)
        wanted.append(nearest - float((one - x.mean(0)) @ together @ (one - x.mean(0))))
    found = class_distances(x, y)(new)
    assert found.dtype == torch.float64
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64))
    assert torch.allclose(found, class_distances(x, (y + 1) % 3)(new))


def test_what_tells_no_classes_apart_does_not_count() -> None:
    x, y = groups(2000)
    found, new = class_distances(x, y), x[:20].clone()
    between = (x[y == 0].mean(0) + x[y == 1].mean(0)) / 2
    longer = new.clone()
    longer[:, -1] += 60.0  # ten standard deviations
    assert float((found(longer) - found(new)).abs().max()) < 10.0
    assert float(found(between[None])) > float(found(new).max()) + 10.0


@pytest.mark.parametrize("n", [5, 40])
def test_few_wide_features_are_enough(n: int) -> None:
    x, y = groups(n, width=60)
    found = class_distances(x.float(), y)(torch.cat([x, 9.0 + x]).float())
    assert found.isfinite().all()


def test_equal_features_say_nothing() -> None:
    x = normalize(torch.ones(30, 5))
    assert torch.equal(class_distances(x, torch.arange(30) % 3)(x), torch.zeros(30, dtype=torch.float64))


def test_classes_are_those_that_a_network_predicts() -> None:
    outputs = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    assert predicted_classes(resolve("classification"), outputs).tolist() == [1, 0]
    assert predicted_classes(resolve("binary"), outputs[:, 1:2] - 1.0).tolist() == [1, 0]
    for kind in ("multilabel", "regression"):
        assert predicted_classes(resolve(kind), outputs).shape == (2, 0)
    assert predicted_classes(resolve("classification"), outputs[:, :, None]).shape == (2, 0)


def fitted(seed: int = 0) -> tuple[Any, nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, y = (part[:400] for part in groups(400))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100].float(), y[:100], progress=False)
    return posterior, model, x.float(), y


def test_a_calibration_weighs_it_and_a_file_keeps_it(tmp_path: Path) -> None:
    posterior, model, x, y = fitted()
    posterior.calibrate(x[100:300], y[100:300]).save(tmp_path / "posterior.safetensors")
    assert "nearest class" in posterior.calibration.weights
    loaded = nb.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded._familiar.classes, model(x[:100]).argmax(1))
    assert torch.equal(loaded.p_value(x[300:]), posterior.p_value(x[300:]))


def test_a_regression_has_no_classes() -> None:
    x, _ = groups(60)
    posterior = nb.baselines.DiagonalLaplace(nn.Linear(6, 2), "regression")
    posterior.fit(x.float(), x[:, :2].float(), progress=False)
    assert posterior._familiar.classes is None
    assert posterior._familiar.to_classes is None


@pytest.mark.parametrize("classes", [torch.zeros(3, dtype=torch.int64), torch.zeros(100)])
def test_altered_classes_are_refused(classes: Tensor, tmp_path: Path) -> None:
    posterior, model, _, _ = fitted()
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    rewritten(path, lambda tensors, header: tensors.update({"familiar.classes": classes}))
    with pytest.raises(FileError, match="fit and save again"):
        nb.load(path, model)
