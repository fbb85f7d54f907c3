"""An exported prediction gives what ``predict`` and ``ood_score`` give, for any number of inputs, also as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import DataError, ModelError, SettingsError
from nullbayes.integrations.export import ExportedPrediction, export

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, about itself
    pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning"),  # the networks are not trained
]

GENERATOR = torch.Generator().manual_seed(0)
IMAGES, POINTS = (torch.randn(40, *shape, generator=GENERATOR, device="cpu") for shape in ((1, 6, 6), (4,)))
SEQUENCES = torch.randn(40, 5, 4, generator=GENERATOR, device="cpu")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.a(first) * torch.sigmoid(self.b(second))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).mean(1))


def convolutional() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), *head)


def taken(x: Any, start: int, stop: int) -> Any:
    if isinstance(x, dict):
        return {name: tensor[start:stop] for name, tensor in x.items()}
    return x[start:stop]


def fitted(model: nn.Module, x: Any, kind: str = "classification", n_samples: int = 5) -> Any:
    """A posterior with another temperature and precision than the default, fitted to the first three inputs."""
    y = torch.arange(3) if kind == "classification" else torch.randn(3, 3, generator=GENERATOR, device="cpu")
    posterior = nb.ProjectedPosterior(model, kind, prior_precision=2.0)
    posterior.fit([(taken(x, 0, 3), y)], n_samples, progress=False)
    if kind == "classification":
        posterior.temperature = 1.7
    return posterior


def agree(found: dict[str, Tensor], posterior: Any, x: Any, score: str) -> None:
    """All outputs agree to float32 accuracy, relative to the largest."""
    prediction = posterior.predict(x)
    wanted = {"mean": prediction.mean, "variance": prediction.variance, "score": posterior.ood_score(x, score)}
    if prediction.probs is not None:
        wanted["probs"] = prediction.probs
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        assert float((found[name] - value).abs().max()) < 1e-4 * float(value.abs().max()), name


CASES = {
    "a network of layers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), POINTS),
}
SLOW_CASES = {
    "several named inputs": (TwoInputs, {"first": POINTS, "second": POINTS.flip(1)}),
    "convolutions": (convolutional, IMAGES),
    "recurrence": (Recurrent, SEQUENCES),
    "attention": (Attention, SEQUENCES),
}


def check(build: Any, x: Any, folder: Path) -> None:
    torch.manual_seed(0)
    posterior = fitted(build().eval(), x)
    exported = export(posterior, taken(x, 20, 22))
    for n in (1, 2, 9):
        new = taken(x, 25, 25 + n)
        agree(exported(new), posterior, new, "entropy")
    check_onnx(exported, posterior, x, folder)


def check_onnx(exported: ExportedPrediction, posterior: Any, x: Any, folder: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'nullbayes[onnx]'")
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'nullbayes[onnx]'")
    path = folder / "posterior.onnx"
    exported.to_onnx(path)
    session = onnxruntime.InferenceSession(path)
    assert tuple(given.name for given in session.get_inputs()) == exported.inputs
    for n in (1, 9):
        new = taken(x, 25, 25 + n)
        tensors = new.values() if isinstance(new, dict) else [new]
        given = {name: tensor.numpy() for name, tensor in zip(exported.inputs, tensors, strict=True)}
        found = session.run(list(exported.outputs), given)
        agree(
            {name: torch.tensor(value) for name, value in zip(exported.outputs, found, strict=True)},
            posterior,
            new,
            exported.score,
        )


@pytest.mark.filterwarnings("ignore")  # of onnxscript, about itself
@pytest.mark.parametrize("name", CASES)
def test_exported_prediction_is_the_prediction(name: str, tmp_path: Path) -> None:
    check(*CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW_CASES)
def test_exported_prediction_of_other_networks_is_the_prediction(name: str, tmp_path: Path) -> None:
    check(*SLOW_CASES[name], tmp_path)


def test_a_regression_is_exported_without_probabilities_and_for_fewer_samples() -> None:
    posterior = fitted(nn.Linear(4, 3), POINTS, "regression")
    exported = export(posterior, POINTS[:3], n_samples=3, score="sum_variance", dynamic_batch=False)
    assert exported.outputs == ("mean", "variance", "score")
    found = exported(POINTS[20:23])
    wanted = posterior.predict(POINTS[20:23], n_samples=3)
    assert torch.allclose(found["variance"], wanted.variance, rtol=1e-3)
    assert not torch.allclose(found["variance"], posterior.predict(POINTS[20:23]).variance, rtol=1e-3)
    assert torch.allclose(found["score"], (wanted.variance / wanted.noise).sum(1), rtol=1e-3)


def test_scores_of_positions_are_exported() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    posterior.fit([(SEQUENCES[:1], torch.tensor([[0, 1, -100, -100, -100]]))], 5, progress=False)
    for kind in ("max_variance", "mutual_information"):
        found = export(posterior, SEQUENCES[:2], score=kind)(SEQUENCES[20:27])
        agree(found, posterior, SEQUENCES[20:27], kind)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(input_ids)))


def test_padding_counts_in_no_exported_score() -> None:
    torch.manual_seed(0)
    mask = (torch.arange(6) < torch.arange(1, 6).repeat(4)[:, None]).long()  # 20 sentences of one to five words
    words = torch.randint(1, 10, (20, 6)) * mask
    posterior = nb.ProjectedPosterior(Tagger(), prior_precision=1.0)
    batch = {"input_ids": words[:4], "attention_mask": mask[:4]}
    posterior.fit([batch | {"labels": words[:4].remainder(3).masked_fill(mask[:4] == 0, -100)}], progress=False)
    new = {"input_ids": words[11:], "attention_mask": mask[11:]}
    for kind in ("entropy", "max_variance"):
        agree(export(posterior, taken(new, 0, 2), score=kind)(new), posterior, new, kind)


def test_named_inputs_of_a_program_are_taken_by_name() -> None:
    torch.manual_seed(0)
    first, second = POINTS, POINTS.flip(1)
    posterior = fitted(TwoInputs(), {"first": first, "second": second})
    exported = export(posterior, {"first": first[:2], "second": second[:2]})
    agree(
        exported({"second": second[20:], "first": first[20:]}),
        posterior,
        taken({"first": first, "second": second}, 20, 40),
        "entropy",
    )
    with pytest.raises(DataError, match="takes first, second, not first, other: pass inputs as for export"):
        exported({"first": first[20:], "other": second[20:]})


class OfOneMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, named: dict[str, Tensor], scale: Tensor) -> Tensor:
        return self.inner(named["first"], named["second"]) * scale


def test_named_inputs_inside_a_tuple_are_taken_by_name() -> None:
    torch.manual_seed(0)
    named, scale = {"first": POINTS, "second": POINTS.flip(1)}, POINTS[:, :1]
    posterior = nb.ProjectedPosterior(OfOneMapping(), prior_precision=1.0)
    posterior.fit([((taken(named, 0, 3), scale[:3]), torch.arange(3))], 5, progress=False)
    exported = export(posterior, (taken(named, 0, 2), scale[:2]))
    assert exported.inputs == ("input_0.first", "input_0.second", "input_1")
    turned = {"second": named["second"][20:], "first": named["first"][20:]}
    agree(exported((turned, scale[20:])), posterior, (taken(named, 20, 40), scale[20:]), "entropy")


class Sorting(nn.Module):
    """It looks at the values of its inputs to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if bool((x > 0).any()) else -x)


class Counting(nn.Module):
    """It does something else for odd numbers of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if len(x) % 2 else self.head(x).clone().contiguous() + 0.0


def test_what_cannot_be_exported_is_refused_with_a_reason() -> None:
    posterior = fitted(nn.Linear(4, 3), POINTS)
    with pytest.raises(DataError, match="at least two example inputs"):
        export(posterior, POINTS[:1])
    with pytest.raises(SettingsError, match=r"score must be one of max_variance.*not 'combined', which looks training"):
        export(posterior, POINTS[:2], score="combined")
    with pytest.raises(SettingsError, match=r"Only nb\.ProjectedPosterior and .* not MAP"):
        export(nb.baselines.MAP(nn.Linear(4, 3)), POINTS[:2])
    with pytest.raises(ModelError, match="cannot be exported, because an operation of it cannot be traced"):
        export(fitted(Sorting(), POINTS), POINTS[:2])
    with pytest.raises(ModelError, match="runs other operations for another number of examples: pass dynamic_batch"):
        export(fitted(Counting(), POINTS), POINTS[:2])
    fixed = export(odd := fitted(Counting(), POINTS), POINTS[:2], dynamic_batch=False)
    agree(fixed(POINTS[20:22]), odd, POINTS[20:22], "entropy")
