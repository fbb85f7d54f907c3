"""A network that predicts labels no better than their frequencies, or numbers than their mean, causes a warning."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import UntrainedWarning
from nullbayes.jacobian.opening import Guesses
from support.drawing import randint, randn, seeded

N = 60


def found(logits: Tensor, y: Tensor, likelihood: Any = "classification") -> list[str]:
    """The warnings about a network whose outputs are its inputs."""
    model = nn.Linear(logits.shape[-1], logits.shape[-1], bias=False).to(logits)
    nn.init.eye_(model.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nb.OutputJacobian(model, [(logits[:8], y[:8]), (logits[8:], y[8:])], likelihood)
    return [str(warning.message) for warning in caught if warning.category is UntrainedWarning]


def frequencies(labels: Any) -> tuple[float, float]:
    """The NLL and the accuracy of the frequencies of labels."""
    counts = np.unique(torch.as_tensor(labels).cpu().numpy(), return_counts=True)[1]
    return -float(np.mean(np.repeat(np.log(counts / counts.sum()), counts))), float(counts.max() / counts.sum())


def drawn(*shape: int) -> Tensor:
    return 2.0 * randn(*shape, generator=seeded(), dtype=torch.float64)


def random_labels(classes: int, *shape: int) -> Tensor:
    return randint(0, classes, shape, generator=seeded(1))


def numbers(message: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+|\d+(?= where| A)", message.replace(". A", " A"))]


def test_labels_that_have_nothing_to_do_with_the_outputs_cause_a_warning() -> None:
    logits, y = drawn(N, 3), random_labels(3, N)
    (message,) = found(logits, y)
    nll, accuracy = nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).double().mean()
    wanted = [float(nll), frequencies(y)[0], float(accuracy), frequencies(y)[1]]
    assert numbers(message) == pytest.approx(wanted, rel=1e-2)
    assert "model.load_state_dict(...)" in message


def test_ignored_positions_do_not_count() -> None:
    logits, y = drawn(N, 4, 3), random_labels(3, N, 4)
    y[:, 2:] = -100
    (message,) = found(logits, y)
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    right = (logits.argmax(-1) == y)[:, :2].double().mean()
    wanted = [float(nll), frequencies(y[:, :2])[0], float(right), frequencies(y[:, :2])[1]]
    assert numbers(message) == pytest.approx(wanted, rel=1e-2)


def test_each_of_several_labels_has_frequencies_of_its_own() -> None:
    logits, y = drawn(N, 2), random_labels(2, N, 2)
    y[:, 1] *= y[:, 0]  # the second is rare
    (message,) = found(logits, y, "multilabel")
    nll = nn.functional.binary_cross_entropy_with_logits(logits, y.double())
    own = [frequencies(y[:, label]) for label in range(2)]
    wanted = [float(nll), *np.mean(own, 0).tolist()]
    assert np.array(numbers(message))[[0, 1, 3]] == pytest.approx(wanted, rel=1e-2)


def test_a_binary_network_is_judged_as_well() -> None:
    logits, y = drawn(N, 1), random_labels(2, N)
    assert found(logits, y, "binary")
    assert not found(logits, (logits[:, 0] > 0).long(), "binary")


def test_networks_that_know_something_cause_no_warning() -> None:
    logits, y = drawn(N, 3), random_labels(3, N)
    right = logits.argmax(1)
    assert not found(logits, right)
    assert not found(50.0 * logits, torch.where(torch.arange(N) % 5 == 0, y, right))  # sure and often wrong, but better
    assert not found(logits, torch.zeros_like(y))  # one class has no frequencies to compare with
    assert not found(logits[:10], y[:10])  # too few to say
    shares = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).log()
    rare = torch.tensor([0] * 8 + [1, 2]).repeat(6)
    assert not found(shares + 0.5 * torch.eye(3, dtype=torch.float64)[rare], rare)  # never says a rare class


def test_one_fit_gives_one_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3))
    x, y = drawn(N, 3).float(), random_labels(3, N)
    for kind in (nb.ProjectedPosterior, nb.LossProjectedPosterior, nb.baselines.MAP):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind(model, "classification").fit(x, y)
        assert [warning.category for warning in caught].count(UntrainedWarning) == 1


def test_a_network_trained_with_weights_of_the_classes_causes_none() -> None:
    y = torch.zeros(300, dtype=torch.int64)
    y[:6] = 1
    alarm = y == 1
    alarm[6:40] = True  # it finds all of the rare class, and takes many others for it
    logits = torch.stack([torch.zeros(300), torch.where(alarm, 2.0, -2.0)], 1).double()
    assert nn.functional.cross_entropy(logits, y) > frequencies(y)[0]
    assert (logits.argmax(1) == y).double().mean() < frequencies(y)[1]
    assert not found(logits, y)
    assert found(logits.flip(1), y)  # which finds none of it


def test_an_ignored_class_is_not_predicted_right() -> None:
    logits, y = drawn(N, 4), random_labels(3, N) + 1
    logits[:, 0] += 20.0  # it always says 0
    y[: N // 2] = 0
    assert found(logits, y, nb.likelihoods.Classification(ignore_index=0))


def test_guesses_of_several_processes_are_joined() -> None:
    likelihood = nb.likelihoods.Classification(class_dim=1)
    logits, y = drawn(N, 3), random_labels(3, N)

    def guessed(*parts: slice) -> Guesses:
        made = Guesses()
        for part in parts:
            one = Guesses()
            one.add(likelihood, logits[part], y[part])
            made.join(one)
        return made

    with pytest.warns(UntrainedWarning) as whole:
        guessed(slice(None)).check("training")
    with pytest.warns(UntrainedWarning) as joined:
        guessed(slice(20), slice(20, None)).check("training")
    assert str(whole[0].message) == str(joined[0].message)


def regression(n: int = N) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that is right on two targets of very different sizes, up to noise."""
    model, x = nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Linear(80, 2)).double(), drawn(n, 3)
    return model, x, model(x).detach() * torch.tensor([1.0, 1e3]).double() + 1e4 + 0.1 * drawn(n, 2)


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.baselines.LastLayerLaplace])
def test_a_regression_that_is_worse_than_the_mean_causes_one(kind: Any) -> None:
    model, x, y = regression()
    with pytest.warns(
        UntrainedWarning, match="training targets no better than their mean does: its squared errors are .* times"
    ):
        kind(model, "regression").fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        kind(model, "regression").fit(x, model(x).detach() + 0.5 * drawn(N, 2))


def test_numbers_of_several_processes_are_joined() -> None:
    model, x, y = regression()
    joined = Guesses()
    for part in (slice(7), slice(7, 30), slice(30, None)):
        one = Guesses()
        one.add(nb.likelihoods.Regression(), model(x[part]).detach(), y[part])
        joined.join(one)
    errors, squares = (model(x).detach() - y).square().sum(0), (y - y.mean(0)).square().sum(0)
    with pytest.warns(
        UntrainedWarning, match=re.escape(f"are {(errors / squares).mean():.3g} times those of the mean")
    ):
        joined.check("training")


def test_held_out_targets_in_another_order_cause_one() -> None:
    model, x, y = regression(200)
    y = model(x).detach() + 0.1 * drawn(200, 2)
    posterior = nb.ProjectedPosterior(model, "regression").fit(x[:100], y[:100], 5)
    with pytest.warns(UntrainedWarning, match="held-out targets no better .* in the order of their inputs"):
        posterior.calibrate(x[100:], y[100:].flip(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        posterior.calibrate(x[100:], y[100:])


def test_a_weak_network_is_not_taken_for_held_out_targets_in_another_order() -> None:
    """The true function explains a twelfth of the variance, and a rare label: held-out data are few."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        for seed in range(100):
            generator = seeded(seed)
            f, noise = randn(40, 1, generator=generator).double(), randn(40, 1, generator=generator).double()
            numbers_, labels_ = Guesses(), Guesses()
            numbers_.add(nb.likelihoods.Regression(), f, f + 3.3 * noise)
            numbers_.check("held-out")
            logits = torch.cat([torch.zeros_like(f), f - 3.0], 1)
            positive = torch.rand(40, generator=generator, device="cpu").to(f) < logits.softmax(1)[:, 1]
            labels_.add(nb.likelihoods.Classification(class_dim=1), logits, positive.long())
            labels_.check("held-out")


def test_outputs_are_judged_in_units_of_their_own() -> None:
    generator = seeded(3)
    y = randn(100, 2, generator=generator).double() * torch.tensor([1.0, 1e3]).double()
    guessed = torch.stack([y[:, 0] + 0.05 * randn(100, generator=generator), torch.full((100,), 2.0).double()], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        for kind in ("training", "held-out"):
            made = Guesses()
            made.add(nb.likelihoods.Regression(), guessed, y)
            made.check(kind)


def test_a_regression_that_is_worse_than_the_mean_is_told_so_once() -> None:
    model, x, y = regression()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nb.ProjectedPosterior(model, "regression").fit(x, y, 5)
    assert [warning.category for warning in caught].count(UntrainedWarning) == 1


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.baselines.LastLayerLaplace])
def test_a_regression_whose_targets_are_all_the_same_is_told_so(kind: Any, value: float) -> None:
    model, x, y = regression()
    y = torch.full_like(y, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(model, "regression").fit(x, y, 5)
    (message,) = [str(warning.message) for warning in caught if warning.category is UntrainedWarning]
    assert f"All {N} training targets of an output are the same number" in message


def test_a_network_that_predicts_every_label_is_trained() -> None:
    y = torch.zeros(20, dtype=torch.int64)
    y[3] = 1
    logits = 1e-3 * nn.functional.one_hot(y, 2).double()  # right and unsure
    assert nn.functional.cross_entropy(logits, y) > frequencies(y)[0]
    assert not found(logits, y)
    assert found(-logits, y)  # which is always wrong


@pytest.mark.parametrize("seed", range(10))
def test_networks_as_they_begin_cause_a_warning_on_digits(seed: int) -> None:
    """Ten classes: by chance, some begin with twice the accuracy of a guess, or with a slightly lower NLL."""
    x, y = images_of_digits()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).to(x)
    with pytest.warns(UntrainedWarning, match="hardly knows its training labels"):
        nb.OutputJacobian(model, [(x[:600], y[:600])])


def test_a_network_after_a_few_steps_causes_none() -> None:
    x, y = images_of_digits()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).to(x)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for start in range(0, 600, 30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 30]), y[start : start + 30]).backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nb.OutputJacobian(model, [(x[:600], y[:600])])


def test_a_network_that_knows_little_causes_none() -> None:
    """By its likelihood where it never names the rare label; by its accuracy where it is too sure of itself."""
    rare = torch.arange(200) % 10 == 0
    knows = torch.where(rare, 0.13, 0.097).double()
    assert not found(torch.stack([(1.0 - knows).log(), knows.log()], 1), rare.long())
    labels = torch.arange(200) % 4
    guesses = torch.where(torch.arange(200) < 40, labels, torch.ones_like(labels))
    logits = 9.0 * nn.functional.one_hot(guesses, 4).double()
    assert nn.functional.cross_entropy(logits, labels) > frequencies(labels)[0]
    assert not found(logits, labels)


def test_a_network_that_knows_hardly_more_than_frequencies_causes_a_warning() -> None:
    rare = torch.arange(200) % 10 == 0
    knows = torch.where(rare, 0.102, 0.1).double()
    logits = torch.stack([(1.0 - knows).log(), knows.log()], 1)
    assert nn.functional.cross_entropy(logits, rare.long()) < frequencies(rare)[0]
    assert found(logits, rare.long())


def images_of_digits() -> tuple[Tensor, Tensor]:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
    return images, torch.tensor(digits.target, dtype=torch.int64)
