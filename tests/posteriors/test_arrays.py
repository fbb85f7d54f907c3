"""Data as people have them, tensors or arrays, go in; intervals, arrays and tables come out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import nullbayes as nb
from nullbayes.errors import DataError, InputError, LikelihoodError, SettingsError
from support.drawing import randn

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here

G = torch.Generator().manual_seed(0)
X = randn(40, 3, generator=G)
LABELS, NUMBERS = (X[:, 0] > 0).long(), X[:, :1].sin() + 0.1 * randn(40, 1, generator=G)


def network(outputs: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs)).to(dtype)


def fitted(*data: Any, likelihood: str = "classification", outputs: int = 2, **settings: Any) -> nb.ProjectedPosterior:
    posterior = nb.ProjectedPosterior(network(outputs, **settings), likelihood, prior_precision=1.0)
    return posterior.fit(*data, generator=torch.Generator().manual_seed(0), progress=False)


def array(tensor: Tensor, kind: type = np.float64) -> np.ndarray:
    return tensor.cpu().numpy().astype(kind) if tensor.is_floating_point() else tensor.cpu().numpy()


WAYS = {
    "loader": ([(X, LABELS)], 6),
    "tensors": (X, LABELS, 6),
    "pair": ((X, LABELS), 6),
    "arrays": (array(X), array(LABELS), 6),
    "read-only arrays": (np.broadcast_to(array(X), (40, 3)), array(LABELS), 6),
    "table": (pd.DataFrame(array(X)), pd.Series(array(LABELS)), 6),
    "dataset": (TensorDataset(X, LABELS), 6),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_pass_the_data_gives_the_same_samples(way: tuple[Any, ...]) -> None:
    wanted = fitted([(X, LABELS)], 6)
    assert torch.equal(fitted(*way).directions, wanted.directions)


def test_arrays_take_the_precision_of_the_network_and_tensors_keep_theirs() -> None:
    posterior = fitted(array(X), array(LABELS), 6, dtype=torch.float64)
    assert posterior.predict(array(X, np.float32)).mean.dtype == torch.float64
    with pytest.raises(InputError, match=r"parameters are torch.float32, these numbers are torch.float64.*x\.to"):
        fitted(X.double(), LABELS)
    with pytest.raises(InputError, match=r"parameters are torch.float32, these numbers are torch.float64"):
        nb.plan(network(2), [(X.double(), LABELS)])


def test_a_first_batch_that_the_network_cannot_take_is_described_in_the_error() -> None:
    for ask in (lambda: fitted(X[:, :2], LABELS), lambda: nb.plan(network(2), (X[:, :2], LABELS))):
        with pytest.raises(InputError, match=r"failed on the first batch, inputs of shape \(n, 2\).*: mat1 and mat2"):
            ask()


def test_fit_distinguishes_the_number_of_samples_from_targets() -> None:
    assert fitted((X, LABELS), 7).n_samples == 7
    assert fitted(X, LABELS, 7).n_samples == 7
    with pytest.raises(DataError, match="not a list"):
        fitted(X, LABELS.tolist())
    with pytest.raises(SettingsError) as caught:
        fitted(X, LABELS, X)
    assert len(str(caught.value)) < 150
    with pytest.raises(DataError, match=r"fit\(x, y\)"):
        fitted(X)


@pytest.mark.parametrize("kind", [nb.baselines.MAP, nb.baselines.LastLayerLaplace])
def test_baselines_accept_arrays(kind: type) -> None:
    posterior = kind(network(2)).fit(array(X), array(LABELS), progress=False)
    assert torch.equal(posterior.predict(array(X)).mean, posterior.predict(X).mean)


def test_intervals_include_the_noise() -> None:
    posterior = fitted(X, NUMBERS, 30, likelihood="regression", outputs=1)
    prediction = posterior.predict(X[:9])
    lower, upper = prediction.interval(0.8)
    total = array(prediction.variance) + posterior.likelihood.sigma_noise**2
    wanted = norm(array(prediction.mean), np.sqrt(total)).interval(0.8)
    np.testing.assert_allclose(array(lower), wanted[0], rtol=1e-5)
    np.testing.assert_allclose(array(upper), wanted[1], rtol=1e-5)
    torch.testing.assert_close(prediction.std.square(), prediction.variance)
    for level in (0.0, 1.0, 90):
        with pytest.raises(SettingsError, match="between 0 and 1"):
            prediction.interval(level)
    with pytest.raises(LikelihoodError, match="for regressions"):
        fitted(X, LABELS).predict(X).interval()


def test_predictions_convert_to_numpy_pandas_and_json() -> None:
    prediction = fitted(X, LABELS).predict(X[:5])
    arrays = prediction.to_numpy()
    assert set(arrays) == {"mean", "variance", "std", "probs", "samples"}
    np.testing.assert_array_equal(arrays["probs"], array(prediction.probs, np.float32))
    assert json.loads(json.dumps(prediction.to_dict()))["mean"][3] == pytest.approx(arrays["mean"][3].tolist())
    table = prediction.to_pandas()
    assert table.shape == (5, 8)
    assert (table["predicted"] == arrays["probs"].argmax(1)).all()
    assert (table[["prob_0", "prob_1"]].max(axis=1) == table["probability"]).all()


def test_multilabel_tables_have_one_column_per_label() -> None:
    targets = torch.stack([LABELS, LABELS, 1 - LABELS], 1)
    prediction = fitted(X, targets, likelihood="multilabel", outputs=3).predict(X[:6])
    table = prediction.to_pandas()
    assert "probability" not in table
    for i in range(3):
        assert (table[f"predicted_{i}"] == (array(prediction.probs[:, i]) >= 0.5)).all()
    assert "predicted" in fitted(X, LABELS, likelihood="binary", outputs=1).predict(X).to_pandas()


def test_a_table_keeps_its_index() -> None:
    table = pd.DataFrame(array(X), index=np.random.default_rng(0).permutation(40))
    found = fitted(X, NUMBERS, likelihood="regression", outputs=1).predict(table)
    assert found.to_pandas().index.equals(table.index)
    table["std"] = found.to_pandas()["std"]
    np.testing.assert_allclose(table["std"].to_numpy(), array(found.std)[:, 0])


NAMES = ["age", "income", "height"]
OTHER_TABLES = {
    "another order": (["height", "age", "income"], "the columns of training in another order"),
    "another name": (["age", "wage", "height"], r"no column 'income'.*to_numpy"),
    "one more": ([*NAMES, "id"], "other columns"),
}


@pytest.mark.parametrize(("names", "fragment"), OTHER_TABLES.values(), ids=OTHER_TABLES)
def test_a_table_with_other_columns_than_in_training_is_refused(names: list[str], fragment: str, tmp_path: Any) -> None:
    table = pd.DataFrame(array(X), columns=NAMES)
    other = pd.DataFrame({name: table.get(name, table["age"]) for name in names})
    for data in ((table, LABELS), ([(table, LABELS)],)):
        posterior = fitted(*data)
        posterior.save(tmp_path / "file")
        for each in (posterior, nb.load(tmp_path / "file", network(2))):
            questions = (
                lambda x, each=each: each.predict(x),
                lambda x, each=each: each.predict([x[:20], x[20:]]),
                lambda x, each=each: each.ood_score(x),
                lambda x, each=each: each.check_fit(x, LABELS),
                lambda x, each=each: each.check_fit([(x, LABELS)]),
                lambda x, each=each: nb.evaluate(each, (X, LABELS), {"other": x}),
            )
            for ask in questions:
                with pytest.raises(DataError, match=rf"{fragment}.*pass x\[columns\]|x\[columns\].*to_numpy"):
                    ask(other)
            for x in (table, other.reindex(columns=NAMES, fill_value=0.0), array(X), X, pd.DataFrame(array(X))):
                for ask in questions:
                    ask(x)
    for unnamed in (X, array(X), pd.DataFrame(array(X))):
        assert fitted(unnamed, LABELS).predict(table).mean.shape == (40, 2)  # there is nothing to compare with


def test_batches_of_a_table_must_have_the_same_columns() -> None:
    table = pd.DataFrame(array(X), columns=NAMES)
    with pytest.raises(DataError, match=r"another order.*x\[columns\] with columns = \['age', 'income', 'height'\]"):
        fitted([(table[:20], LABELS[:20]), (table[NAMES[::-1]][20:], LABELS[20:])])


def test_methods_accept_inputs_and_targets_or_say_how_to_pass_them() -> None:
    posterior = fitted(X, LABELS)
    assert posterior.check_fit(X, LABELS) == posterior.check_fit([(X, LABELS)])
    assert posterior.release().prepare(X, LABELS).extend(1).n_samples == 31
    assert posterior.tune(X, LABELS).temperature > 0
    with pytest.raises(SettingsError, match=r"as one pair here: optimize_prior_precision\(\(x, y\)\)"):
        posterior.optimize_prior_precision(X, array(LABELS))
    with pytest.raises(DataError, match=r"as one pair here: nb.plan\(model, \(x, y\)\)"):
        nb.plan(network(2), X, LABELS)
    with pytest.raises(InputError, match=r"Whole numbers may have to be converted: x.to\(torch.float32\)"):
        fitted(X.long(), LABELS)


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_a_constant_output_does_not_break_a_fit(kind: type) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bias = network(1), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.body(x), self.bias.expand(len(x), 1)], 1)

    projector = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=20), rtol=1e-2)
    posterior = kind(Constant(), "regression").fit(X, torch.cat([NUMBERS, 0 * NUMBERS], 1), projector=projector)
    assert posterior.report.worst_ratio < 1.0
    assert posterior.check_fit(X, torch.cat([NUMBERS, 0 * NUMBERS], 1)).worst_ratio < 1.0


def test_a_regression_is_a_table_of_intervals() -> None:
    prediction = fitted(X, NUMBERS, likelihood="regression", outputs=1).predict(X[:5])
    table = prediction.to_pandas(0.5)
    assert list(table.columns) == ["mean", "std", "lower_0.5", "upper_0.5"]
    assert ((table["lower_0.5"] < table["mean"]) & (table["mean"] < table["upper_0.5"])).all()


def test_images_are_a_table_with_a_row_for_each_entry() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 2, 1)).to(X.device)
    x = randn(4, 1, 3, 2, generator=G)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x, (x[:, 0] > 0).long(), progress=False)
    table = posterior.predict(x[:2]).to_pandas()
    assert table.shape == (2 * 2 * 3 * 2, 3)
    assert table.loc[(1, 0, 2, 1), "mean"] == pytest.approx(float(model(x)[1, 0, 2, 1].detach()))


def test_checks_and_plans_are_plain_numbers() -> None:
    posterior = fitted(X, LABELS)
    check = posterior.check_fit((array(X), array(LABELS)))
    assert json.loads(json.dumps(check.to_dict()))["n_data"] == 40
