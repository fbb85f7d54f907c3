"""Inputs that a network does not take are refused with what it had in training; whatever it takes is answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import InputError, NullBayesError
from nullbayes.jacobian.products import output_rows
from support.cube import Cube
from support.drawing import randn
from support.method_table import X_NEW, Method, each_method
from support.models import CLASSIFICATION
from support.slow_answers import jacobian

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained

TRAINED = r"in training it had inputs of shape \(n, 4\) and type torch.float64 \(n examples\)"
UNLIKE: dict[str, tuple[Callable[[], Any], str]] = {
    "too narrow": (lambda: X_NEW[:, :3], r"inputs of shape \(n, 3\) and type torch.float64"),
    "too many dimensions": (lambda: X_NEW[..., None], r"inputs of shape \(n, 4, 1\) and type torch.float64"),
    "an example alone": (lambda: X_NEW[0], r"inputs of shape \(n,\) and type torch.float64"),
    "another precision": (lambda: X_NEW.float(), r"inputs of shape \(n, 4\) and type torch.float32"),
    "integers": (lambda: X_NEW.long(), r"inputs of shape \(n, 4\) and type torch.int64"),
    "two arguments": (lambda: (X_NEW, X_NEW[:, :2]), r"inputs\[0\] of shape \(n, 4\).*, inputs\[1\] of shape \(n, 2\)"),
    "another name": (lambda: {"image": X_NEW, "size": None}, r"inputs\['image'\] of .*, inputs\['size'\] of type None"),
    "in a loader": (lambda: [X_NEW, X_NEW[:, :3]], r"inputs of shape \(n, 3\) and type torch.float64"),
}  # fmt: skip


LABELS = torch.tensor([0, 2, 1, 1, 0])


def questions(method: Method, posterior: Any) -> list[Callable[[Any], Any]]:
    """All that a method can be asked about inputs."""
    asked: list[Callable[[Any], Any]] = [posterior.ood_score]
    if method.samples:
        asked += [lambda x, kind=kind: posterior.predict(x, pred_type=kind).samples for kind in method.pred_types]
        asked.append(posterior.functional_variance)
    if method.exact:
        asked.append(lambda x: posterior.functional_variance(x, exact=True))
    return asked


@each_method
def test_inputs_that_the_network_cannot_take_are_compared_with_the_training_inputs(
    method: Method, tmp_path: Path
) -> None:
    posterior = method.fit()
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", posterior._network.model)
    for ask in [*questions(method, posterior), *questions(method, loaded)[:2]]:
        wanted = ask(X_NEW)
        for name, (make, sentence) in UNLIKE.items():
            with pytest.raises(InputError, match=f"The network .* {sentence}.*; {TRAINED}") as caught:
                ask(make())
            cause = caught.value.__cause__
            unlike = "an example alone", "two arguments", "another name"  # which is seen without asking the network
            assert (cause is None and name in unlike) or isinstance(cause, (RuntimeError, TypeError))
            assert not isinstance(cause, NullBayesError)
        torch.testing.assert_close(ask(X_NEW), wanted)  # nothing was broken


class AnyLength(nn.Module):
    """A network of sequences, another function for other lengths than 4; 9 takes memory for one example at a time."""

    def __init__(self, otherwise: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.head, self.otherwise = nn.Linear(2, 5).double(), nn.Linear(5, 3).double(), otherwise

    def forward(self, x: Tensor) -> Tensor:  # (n, length, 2)
        if x.shape[1] == 9 and len(x) > 1:
            torch.empty(2**58, dtype=torch.uint8)
        function = torch.tanh if x.shape[1] == 4 else self.otherwise
        return self.head(function(self.first(x)).mean(1))


def sequences(n: int, length: int) -> Tensor:
    return randn(n, length, 2, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


@each_method
def test_inputs_of_other_lengths_are_answered(method: Method) -> None:
    posterior = method.fit(model=AnyLength(), loader=[(sequences(5, 4), LABELS)])
    for ask in questions(method, posterior):
        whole = ask(sequences(3, 6))
        alone = torch.cat([ask(sequences(3, 6)[i : i + 1]) for i in range(3)], dim=whole.shape.index(3))
        torch.testing.assert_close(alone, whole)


@pytest.mark.parametrize("otherwise", [torch.tanh, Cube.apply], ids=["forward mode", "backward only"])
def test_sequences_of_other_lengths_are_predicted_by_every_fallback(otherwise: Any) -> None:
    model = AnyLength(otherwise)
    posterior = nb.ProjectedPosterior(model).fit([(sequences(5, 4), LABELS)], 2, progress=False)
    for x in (sequences(3, 6), sequences(3, 9)):
        change = torch.cat([jacobian(model, x[i : i + 1]) for i in range(3)]) @ posterior.directions.T  # (n, O, S)
        own = torch.cat([model(x[i : i + 1]) for i in range(3)]).detach()
        change = change.movedim(-1, 0) / posterior.prior_precision**0.5
        wanted = own + change - change.mean(0)
        torch.testing.assert_close(posterior.predict(x).samples, wanted)


def test_an_error_of_the_network_on_valid_inputs_is_passed_on() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.max() > 100:
                msg = "too large"
                raise ArithmeticError(msg)
            return super().forward(x)

    posterior = nb.ProjectedPosterior(Picky(4, 3).double())
    posterior.fit([CLASSIFICATION.data(n=3)], 3, progress=False)
    with pytest.raises(ArithmeticError, match="too large"):
        posterior.predict(1000 * X_NEW.abs())


@pytest.mark.parametrize(("scored", "formed"), [(2, 7), (5, 16), (1, 4), (3, 3), (40, 80), (1, 1)])
@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_rows_of_inputs_may_be_formed_and_scored_in_parts(
    scored: int, formed: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, more are formed than scored at a time: so many examples' rows in these bytes."""

    class Network(nn.Linear):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x) + shift

    generator = torch.Generator().manual_seed(0)
    x, y = (randn(37, width, dtype=torch.float64, generator=generator) for width in (4, 3))
    inputs: dict[str, Any] = {"tensor": x, "tuple": (x, x[:, :1]), "mapping": {"x": x, "shift": x[:, :1]}}
    model = (nn.Linear(4, 3) if form == "tensor" else Network(4, 3)).double()
    posterior = nb.baselines.LocalEnsemble(model, "regression", memory_budget=8).fit([(inputs[form], y)])
    expected, each, formed_at_once = posterior.ood_score(inputs[form]), 3 * 15 * 8, list[int]()

    def watched(network: Any, x: Any, room: int) -> Tensor:
        rows = output_rows(network, x, room)
        formed_at_once.append(len(rows))
        return rows

    monkeypatch.setattr("nullbayes.baselines.method._row_bytes", lambda _: (scored * each, formed * each))
    monkeypatch.setattr("nullbayes.baselines.method.output_rows", watched)
    torch.testing.assert_close(posterior.ood_score(inputs[form]), expected)
    assert sum(formed_at_once) == 37
    assert max(formed_at_once) == min(37, formed // scored * scored)
