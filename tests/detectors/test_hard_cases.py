"""Detectors give sensible numbers where data are few, ignored, soft, in single precision or without variance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes import detectors
from nullbayes.detectors import neighbours
from nullbayes.errors import DataError, SettingsError
from support.detector_problem import computed, data, network, new_inputs
from support.method_table import DETECTORS, Method

FEATURES = [
    m for m in DETECTORS if m.scores[0] not in ("max_probability", "max_logit", "energy", "generalized_entropy")
]
each_of_features = pytest.mark.parametrize("method", FEATURES, ids=lambda method: method.name)
each_detector = pytest.mark.parametrize("method", DETECTORS, ids=lambda method: method.name)


def fitted(kind: Any, x: Any = None, y: Any = None, model: nn.Module | None = None, **settings: Any) -> Any:
    given = data() if x is None else (x, y)
    return kind(model or network(), **settings).fit(*given, progress=False)


@each_detector
def test_single_precision_agrees_with_double_precision(method: Method) -> None:
    x, y = data()
    single = fitted(method.kind, x.float(), y, network(torch.float32)).ood_score(new_inputs().float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), fitted(method.kind).ood_score(new_inputs()), rtol=1e-3, atol=1e-4)


@each_detector
def test_a_batch_scores_as_a_loop_does(method: Method) -> None:
    detector, x = fitted(method.kind), new_inputs()
    alone = torch.cat([detector.ood_score(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(detector.ood_score(x), alone, rtol=1e-9, atol=1e-12)


@each_of_features
def test_examples_whose_target_is_ignored_do_not_count(method: Method) -> None:
    x, y = data()
    padded, labels = torch.cat([x, 100.0 * new_inputs()]), torch.cat([y, torch.full((7,), -100)])
    wanted = fitted(method.kind).ood_score(new_inputs())
    torch.testing.assert_close(
        fitted(method.kind, padded, labels).ood_score(new_inputs()), wanted, rtol=1e-9, atol=1e-12
    )


@each_of_features
def test_soft_targets_count_as_their_most_probable_class(method: Method) -> None:
    x, y = data()
    soft = 0.7 * nn.functional.one_hot(y, 3).double() + 0.1
    wanted = fitted(method.kind).ood_score(new_inputs())
    torch.testing.assert_close(fitted(method.kind, x, soft).ood_score(new_inputs()), wanted, rtol=1e-9, atol=1e-12)


@each_of_features
def test_a_class_that_does_not_occur_is_no_obstacle(method: Method) -> None:
    x, y = data()
    assert bool(torch.isfinite(fitted(method.kind, x, y.clamp_max(1)).ood_score(new_inputs())).all())


@each_of_features
def test_fewer_examples_than_features_and_neighbours_are_enough(method: Method) -> None:
    x, _ = data(n=6)
    scores = fitted(method.kind, x, torch.arange(6) % 3, network(width=30)).ood_score(new_inputs())
    assert bool(torch.isfinite(scores).all())
    assert float(scores.std()) > 0


@each_of_features
def test_features_that_are_all_zero_have_a_score(method: Method) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.fill_(1.0)
    nowhere = torch.full((1, 5), -1000.0, dtype=torch.float64)
    assert float(model[:2](nowhere).detach().abs().max()) == 0.0
    assert bool(torch.isfinite(fitted(method.kind, model=model).ood_score(nowhere)).all())


def test_the_nearest_neighbour_of_a_training_example_is_itself() -> None:
    """In float32, 2 - 2 cos of equal features is 1e-7, whose root is 3e-4."""
    x, y = data(dtype=torch.float32)
    found = fitted(detectors.KNN, x, y, network(torch.float32), k=1).ood_score(x)
    features, _ = computed(network(), x)
    some = torch.from_numpy(np.abs(features).sum(1) > 0)
    assert float(found.cpu()[some].max()) < 1e-6


def test_zero_features_are_at_distance_one_from_all_others() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-2.0, 0.0]])
    detector = detectors.KNN(nn.Linear(2, 2), k=3).fit(x, torch.tensor([0, 1, 1]), progress=False)
    torch.testing.assert_close(detector.ood_score(torch.zeros(1, 2)), torch.ones(1))


def test_a_large_shift_of_the_features_does_not_hurt_the_distances() -> None:
    (x, y), model = data(), nn.Linear(5, 3).double()
    plain = fitted(detectors.Mahalanobis, x, y, model).ood_score(new_inputs())
    shifted = fitted(detectors.Mahalanobis, x + 1e4, y, model).ood_score(new_inputs() + 1e4)
    torch.testing.assert_close(shifted, plain, rtol=1e-6, atol=1e-8)


def test_a_feature_that_never_varies_does_not_count() -> None:
    (x, y), model = data(), nn.Linear(5, 3).double()
    x[:, 2], moved = 4.0, new_inputs()
    moved[:, 2] = 9.0
    fixed = moved.clone()
    fixed[:, 2] = 4.0
    detector = fitted(detectors.Mahalanobis, x, y, model)
    torch.testing.assert_close(detector.ood_score(moved), detector.ood_score(fixed))


def test_a_feature_that_follows_from_others_but_for_rounding_does_not_count() -> None:
    """In float32 the sum of two features varies around itself by rounding, which must not be divided by."""
    (x, y), new = data(dtype=torch.float32), new_inputs().float()
    for values in (x, new):
        values[:, 4] = values[:, 0] + values[:, 1]
    found = fitted(detectors.Mahalanobis, x, y, nn.Linear(5, 3)).ood_score(new)
    wanted = fitted(detectors.Mahalanobis, x[:, :4], y, nn.Linear(4, 3)).ood_score(new[:, :4])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [detectors.KNN, detectors.NNGuide])
def test_large_data_are_thinned_evenly(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    wanted = fitted(kind, x[::4], y[::4], k=2).ood_score(new_inputs())
    assert kind._method.most == 50_000
    monkeypatch.setattr(type(kind._method), "most", 10)
    monkeypatch.setattr(neighbours, "_ROWS", 3)
    detector = fitted(kind, k=2)
    assert len(detector._tensors()["bank"]) == 10
    torch.testing.assert_close(detector.ood_score(new_inputs()), wanted)


def test_equal_weights_of_two_classes_have_no_boundary() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[1] = model[2].weight[0]
    scores = fitted(detectors.FDBD, model=model).ood_score(new_inputs())
    assert bool(torch.isfinite(scores).all())
    assert float(scores.abs().max()) < 100


def test_one_example_per_class_has_no_covariance() -> None:
    x, _ = data(n=3)
    with pytest.raises(DataError, match="several examples per class"):
        fitted(detectors.Mahalanobis, x, torch.arange(3))


def test_gradpca_needs_two_classes() -> None:
    x, y = data()
    with pytest.raises(DataError, match="one class only"):
        fitted(detectors.GradPCA, x, torch.zeros_like(y))


def test_gradpca_says_what_to_do_when_memory_is_short() -> None:
    with pytest.raises(SettingsError, match=r"name fewer parameters.*parameters=\.\.\."):
        detectors.GradPCA(network()).fit(*data(), memory_limit=500, progress=False)


def test_vim_needs_something_outside_of_the_principal_directions() -> None:
    with pytest.raises(SettingsError, match=r"leave directions out, or pass fewer"):
        fitted(detectors.ViM, directions=8)


def test_gradpca_of_the_last_layer_depends_on_the_features_alone() -> None:
    """The gradients of the sum of the logits in the last layer are copies of the features: a PCA of class means."""
    (x, y), new = data(), new_inputs()
    train, _ = computed(network(), x)
    means = np.stack([train[y.cpu().numpy() == c].mean(0) for c in range(3)])
    centre = means.mean(0)
    directions = np.linalg.svd(means - centre, full_matrices=False)[2][:2]
    apart = computed(network(), new)[0] - centre
    wanted = 1 - ((apart @ directions.T) ** 2).sum(1) / (apart**2).sum(1)
    found = fitted(detectors.GradPCA, parameters="2.*").ood_score(new).cpu().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_far_inputs_are_stranger_than_training_inputs() -> None:
    """Two clusters, and inputs between and beside them: the detectors of features tell them apart."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    y = torch.arange(200, device="cpu") % 2
    x = torch.randn(200, 6, generator=generator, device="cpu") * 0.3
    x[:, 0] += 4.0 * y - 2.0
    model = nn.Linear(6, 2).cpu()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        model.weight[1, 0], model.weight[0, 0] = 2.0, -2.0
    strange = torch.randn(200, 6, generator=generator, device="cpu") * 0.3
    strange[:, 3] += 5.0
    for kind in (detectors.KNN, detectors.Mahalanobis, detectors.ViM, detectors.GradPCA, detectors.FDBD):
        detector = kind(model).fit(x, y, progress=False)
        assert nb.metrics.auroc(detector.ood_score(x), detector.ood_score(strange)) > 0.95, kind.__name__
