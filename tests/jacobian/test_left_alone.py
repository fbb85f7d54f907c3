"""Models, inputs, data and files are left as they were, or taken as they were: nothing is mistaken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import DataError, FileError, ModelError
from support.drawing import randn
from support.two_layers import D, X, Y, fit_two_layers, slow_rows, two

# --- what is left alone -----------------------------------------------------------------------------------------------


def test_buffers_written_by_the_forward_pass_change_in_a_copy_only() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.h(torch.tanh(self.a(x)))

    model = two(forward)
    model.register_buffer("calls", torch.tensor(0))
    fit_two_layers(model).predict(X)
    assert int(model.calls) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [False, True])
def test_a_model_that_stores_activations_can_be_copied(norm: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.a(x))
        return self.h(self.drop(self.last))

    model = two(forward, drop=nn.Dropout(0.5))
    if norm:
        model.a = nn.utils.weight_norm(model.a)
    model.eval()(X)
    posterior = fit_two_layers(model)
    wanted = posterior.predict(X).mean
    model.train()
    torch.testing.assert_close(posterior.predict(X).mean, wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_parametrizations_of_convolutions_have_rows() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 2, 1)), nn.Flatten()).double()
    x, y = (randn(5, *shape, generator=torch.Generator().manual_seed(1), dtype=D) for shape in ((4, 3), (6,)))
    rows = nb.OutputJacobian(model, [(x, y)], "regression")
    torch.testing.assert_close(rows.dense(), slow_rows(model, x))


def test_inputs_may_be_worked_on_in_place_and_stay_as_they_were() -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x.sub_(0.5)))))
    x = X.clone()
    posterior = fit_two_layers(model, x)
    posterior.predict(x)
    assert torch.equal(x, X)
    torch.testing.assert_close(posterior.predict(x).mean, model(X.clone()).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_outputs_of_another_dtype_are_cast_to_that_of_the_parameters(dtype: torch.dtype) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))).to(dtype)).float()
    posterior = fit_two_layers(model, X.float(), Y.float())
    assert posterior.predict(X.float()).samples.dtype == torch.float32


def test_a_wrong_input_does_not_turn_forward_mode_off() -> None:
    posterior = fit_two_layers(two(lambda self, x: self.h(torch.tanh(self.a(x)))))
    assert posterior._network.forward_mode
    with pytest.raises(RuntimeError):
        posterior.predict(X[:, :3])
    assert posterior._network.forward_mode


# --- files and data ---------------------------------------------------------------------------------------------------


def test_data_of_the_same_size_with_other_values_are_not_accepted(tmp_path: Any) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    fit_two_layers(model).save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", model)
    with pytest.raises(DataError, match="other data than the posterior was fitted to"):
        loaded.prepare([(X + 1, Y)])
    loaded.prepare([(X[:4], Y[:4]), (X[4:], Y[4:])]).extend(2)


def test_a_posterior_is_loaded_as_it_was_fitted(tmp_path: Any) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    fit_two_layers(model, y=Y[:, :1], output_fn=lambda o: o[:, :1]).save(tmp_path / "file")
    with pytest.raises(FileError, match="fitted with an output_fn of your own"):
        nb.load(tmp_path / "file", model)
    nb.load(tmp_path / "file", model, output_fn=lambda o: o[:, :1])
    fit_two_layers(model).save(tmp_path / "file")
    with pytest.raises(FileError, match="fitted without an output_fn"):
        nb.load(tmp_path / "file", model, output_fn=lambda o: o[:, :1])
    with pytest.raises(FileError, match="with a regression likelihood, not with classification"):
        nb.load(tmp_path / "file", model, likelihood="classification")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_int8_and_uint8_labels_do_not_wrap_around_to_ignore_index(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 100, 3, 126, 5, 6, 7, 9 if dtype == torch.int8 else 156])
    model = nn.Linear(4, 160).double()
    rows = [nb.OutputJacobian(model, [(X, y)]) for y in (labels, labels.to(dtype))]
    assert rows[0].n_counted == rows[1].n_counted == 9 * 160
    assert [r.likelihood.ignore_index for r in rows] == [-100, -100]


def test_storage_by_products_needs_forward_mode() -> None:
    model = two(lambda self, x: self.h(self.words((x > 0).long())), words=nn.EmbeddingBag(2, 30))
    with pytest.raises(ModelError, match=r"needs forward mode, which this network has not"):
        nb.OutputJacobian(model, [(X, Y)], "regression", storage="matrix_free")


def test_integer_parameters_cannot_vary() -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    model.count = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    with pytest.raises(ModelError, match="Only floating-point parameters can vary"):
        nb.ProjectedPosterior(model, parameters="count")
    assert fit_two_layers(model).report.n_parameters == 4 * 30 + 30 + 60 + 2


@pytest.mark.parametrize("name", ["forward", "training", "a.", "", "w.b"])
def test_names_that_a_module_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="choose others"):
        nb.as_module(lambda p, x: x, {"w": torch.ones(2), name: torch.ones(2)})


def test_a_number_of_samples_is_an_integer() -> None:
    with pytest.raises(nb.errors.SettingsError, match="a whole number"):
        nb.ProjectedPosterior(nn.Linear(4, 2).double(), "regression").fit([(X, Y)], 3.0)  # type: ignore[arg-type]


def test_label_255_in_uint8_is_not_ignore_index_minus_one() -> None:
    likelihood = nb.likelihoods.Classification(ignore_index=-1)
    with pytest.raises(nb.errors.LikelihoodError, match="from 0 to 255"):
        likelihood.check(torch.zeros(2, 160, dtype=D), torch.tensor([0, 255], dtype=torch.uint8))
