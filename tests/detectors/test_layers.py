"""Which layer the features come from: found or named, kept in files, and refused where it cannot serve."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes import detectors, io
from nullbayes.errors import FileError, LikelihoodError, ModelError, SettingsError
from support.detector_problem import computed, data, network, new_inputs
from support.method_table import DETECTORS, Method
from support.models import BINARY, MLP, MULTILABEL, REGRESSION, Task

CLASSES_ONLY = [m for m in DETECTORS if not m.positions]
HEADS = (detectors.ViM, detectors.ReAct, detectors.SCALE, detectors.FDBD)
LAYERS = (*HEADS, detectors.KNN, detectors.NNGuide, detectors.Mahalanobis, detectors.RelativeMahalanobis)
each_of_layers = pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)


class Squashed(nn.Module):
    """A network whose outputs are not those of its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * torch.tanh(self.head(torch.relu(self.body(x))))


@each_of_layers
def test_the_layer_that_was_found_is_in_the_report_and_in_the_file(kind: Any, tmp_path: Path) -> None:
    model = network()
    detector = kind(model).fit(*data(), progress=False)
    assert "inputs of the layer '2'" in detector.report.reason
    detector.save(tmp_path / "detector")
    assert io.read(tmp_path / "detector")[1]["settings"]["features"] == "2"
    loaded = nb.load(tmp_path / "detector", copy.deepcopy(model))
    assert torch.equal(loaded.ood_score(new_inputs()), detector.ood_score(new_inputs()))
    loaded.save(tmp_path / "again")
    assert torch.equal(nb.load(tmp_path / "again", model).ood_score(new_inputs()), detector.ood_score(new_inputs()))


@each_of_layers
def test_a_layer_that_is_named_gives_the_same_as_one_that_is_found(kind: Any) -> None:
    named = kind(network(), features="2").fit(*data(), progress=False)
    found = kind(network()).fit(*data(), progress=False)
    torch.testing.assert_close(named.ood_score(new_inputs()), found.ood_score(new_inputs()))


def test_features_may_come_from_any_layer() -> None:
    detector = detectors.KNN(network(), features="0", k=1).fit(*data(), progress=False)
    x, new = (values / values.norm(dim=1, keepdim=True) for values in (data()[0], new_inputs()))
    torch.testing.assert_close(detector.ood_score(new_inputs()), torch.cdist(new, x).amin(1))


def test_settings_are_kept_in_files(tmp_path: Path) -> None:
    settings = {
        detectors.KNN: {"k": 3},
        detectors.NNGuide: {"k": 2},
        detectors.ViM: {"directions": 2},
        detectors.ReAct: {"quantile": 0.6},
        detectors.SCALE: {"percentile": 0.4},
        detectors.GEN: {"gamma": 0.3, "largest": 2},
        detectors.GradPCA: {"share": 0.5, "output": "max"},
    }
    for kind, given in settings.items():
        model = network()
        detector = kind(model, **given).fit(*data(), progress=False)
        detector.save(tmp_path / kind.__name__)
        assert io.read(tmp_path / kind.__name__)[1]["settings"].items() >= given.items()
        loaded = nb.load(tmp_path / kind.__name__, model)
        assert torch.equal(loaded.ood_score(new_inputs()), detector.ood_score(new_inputs()))


def test_a_file_without_a_layer_is_refused(tmp_path: Path) -> None:
    model = network()
    detectors.KNN(model).fit(*data(), progress=False).save(tmp_path / "detector")
    tensors, header = io.read(tmp_path / "detector")
    for layer, advice in ((None, "no name of a layer"), ("elsewhere", "no layer 'elsewhere'")):
        io.save(tmp_path / "changed", tensors, {**header, "settings": {**header["settings"], "features": layer}})
        with pytest.raises(FileError, match=advice):
            nb.load(tmp_path / "changed", model)


@each_of_layers
def test_a_layer_that_does_not_exist_is_refused(kind: Any) -> None:
    with pytest.raises(SettingsError, match=r"no layer 'head'.*named_modules"):
        kind(network(), features="head").fit(*data(), progress=False)


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
def test_detectors_of_the_head_refuse_networks_without_one(kind: Any) -> None:
    with pytest.raises(ModelError, match=r"the layer 'head' .* features=\.\.\."):
        kind(Squashed()).fit(*data(), progress=False)
    with pytest.raises(ModelError, match="the layer '0'"):
        kind(network(), features="0").fit(*data(), progress=False)
    with pytest.raises(ModelError, match="the layer '1'"):
        kind(network(), features="1").fit(*data(), progress=False)


@pytest.mark.parametrize("kind", [k for k in LAYERS if k not in HEADS], ids=lambda kind: kind.__name__)
def test_other_detectors_take_networks_without_a_head(kind: Any) -> None:
    torch.manual_seed(0)
    detector = kind(Squashed()).fit(*data(), progress=False)
    assert "'head'" in detector.report.reason
    assert float(detector.ood_score(new_inputs()).std()) > 0


@pytest.mark.parametrize("task", [BINARY, MULTILABEL, REGRESSION], ids=lambda task: task.name)
@pytest.mark.parametrize("method", CLASSES_ONLY, ids=lambda method: method.name)
def test_detectors_of_classes_refuse_other_likelihoods(method: Method, task: Task) -> None:
    with pytest.raises(
        LikelihoodError, match=rf"one class per input.* not a {task.name} likelihood: use nb.detectors.KNN"
    ):
        method.fit(task)


@pytest.mark.parametrize("method", CLASSES_ONLY, ids=lambda method: method.name)
def test_detectors_of_classes_refuse_positions(method: Method) -> None:
    model, x = nn.Linear(5, 3).double(), data(n=24)[0].view(6, 4, 5)
    with pytest.raises(LikelihoodError, match=r"not outputs \(n, \*\(4, 3\)\): use nb.detectors.KNN"):
        method.kind(model).fit(x, data(n=24)[1].view(6, 4), progress=False)


@pytest.mark.parametrize(
    "method", [m for m in DETECTORS if REGRESSION not in m.tasks and m.positions], ids=lambda m: m.name
)
def test_detectors_of_logits_refuse_a_regression(method: Method) -> None:
    with pytest.raises(LikelihoodError, match=r"score of logits.*nb.detectors.KNN"):
        method.fit(REGRESSION)


def test_knn_of_a_segmentation_compares_pooled_features() -> None:
    """The features of an image are the mean over its positions of what goes into the last convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 1)).double()
    x, new = torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.randn(4, 1, 6, 6, dtype=torch.float64)
    labels = torch.randint(3, (9, 4, 4))
    detector = detectors.KNN(model, k=2).fit(x, labels, progress=False)
    bank, asked = (nn.functional.normalize(model[:2](v).mean((2, 3))) for v in (x, new))
    wanted = torch.cdist(asked, bank).sort(1).values[:, 1]
    torch.testing.assert_close(detector.ood_score(new), wanted.detach())


def test_knn_of_a_regression_scores_and_predicts() -> None:
    model, x = MLP.build(REGRESSION.outputs), REGRESSION.data(n=12)[0]
    detector = detectors.KNN(model, REGRESSION.likelihood, k=1).fit(*REGRESSION.data(n=12), progress=False)
    assert float(detector.ood_score(x).max()) < 1e-12
    torch.testing.assert_close(detector.predict(x).mean, model(x).detach())


@pytest.mark.parametrize(
    ("kind", "settings", "advice"),
    [
        (detectors.KNN, {"k": 0}, "k must be at least 1"),
        (detectors.NNGuide, {"k": 2.5}, "k must be at least 1"),
        (detectors.ViM, {"directions": -1}, "directions must be at least 1"),
        (detectors.ReAct, {"quantile": 90}, "quantile must be a number between 0 and 1"),
        (detectors.SCALE, {"percentile": 1.0}, "percentile must be a number between 0 and 1"),
        (detectors.GEN, {"gamma": -0.1}, "gamma must be a number between 0 and 1"),
        (detectors.GEN, {"largest": 0}, "largest must be at least 1"),
        (detectors.GradPCA, {"share": "all"}, "share must be a number between 0 and 1"),
        (detectors.GradPCA, {"output": "mean"}, "output must be one of sum, max"),
        (detectors.KNN, {"features": nn.Identity()}, "features must be the name of a layer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: Any, settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(SettingsError, match=advice):
        kind(network(), **settings)


def test_a_detector_predicts_as_the_network_does() -> None:
    detector, x = detectors.ReAct(network()).fit(*data(), progress=False), new_inputs()
    _, logits = computed(network(), x)
    torch.testing.assert_close(detector.predict(x).mean.cpu(), torch.from_numpy(logits))
    torch.testing.assert_close(detector.ood_score(x, "energy"), detectors.Energy(network()).fit(*data()).ood_score(x))
