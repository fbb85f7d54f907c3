"""Tokens and pixels: masked positions count nowhere, and every position can have a p-value, a set or an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions.answers import one_position
from nullbayes.errors import DataError, SettingsError
from nullbayes.likelihoods import Classification
from support.drawing import rand, randint, randn, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),  # the networks are not trained
    pytest.mark.filterwarnings("ignore::nullbayes.errors.CollapseWarning"),
]
T, CLASSES = 6, 3


class Tagger(nn.Module):
    """A logit per class and token, from the token and the mean of all that count."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T) -> (n, T, outputs)
        counts = attention_mask[..., None].to(self.words.weight)
        h = self.words(input_ids)
        context = (h * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
        return self.head((h + self.mix(context)).tanh())


def tagger(outputs: int = CLASSES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tagger(outputs).double()


def sentences(n: int, seed: int, length: int = T) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens with padding behind, and tags that ignore it."""
    generator = seeded(seed)
    lengths = randint(3, (n,), generator=generator) + length - 2
    mask = torch.arange(length) < lengths[:, None]
    tokens = randint(39, (n, length), generator=generator) + 1
    tags = (tokens % CLASSES).masked_fill(~mask, -100)
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}, tags


def batched(x: Mapping[str, Tensor], y: Tensor | None, size: int) -> list[Any]:
    n = len(x["input_ids"])
    parts = [slice(i, i + size) for i in range(0, n, size)]
    return [{**{k: v[part] for k, v in x.items()}, **({} if y is None else {"labels": y[part]})} for part in parts]


def fitted_tagger(**settings: Any) -> Any:
    posterior = nb.ProjectedPosterior(tagger(), prior_precision=1.0, **settings)
    return posterior.fit(batched(*sentences(4, 0), 2), 4, generator=seeded(), progress=False)


@pytest.fixture(scope="module")
def calibrated() -> Any:
    return fitted_tagger().calibrate(batched(*sentences(120, 1), 32))


def test_every_position_that_counts_has_a_p_value(calibrated: Any) -> None:
    x, _ = sentences(9, 2)
    found = calibrated.p_value(x, per="position")
    assert found.shape == (9, T)
    assert torch.equal(found.isnan(), x["attention_mask"] == 0)
    m = len(calibrated.calibration.position_scores)
    scores = calibrated.ood_score(x, calibrated.calibration.position_kind, per="position")
    for value, score in zip(found.flatten().tolist(), scores.flatten().tolist(), strict=True):
        if not math.isnan(value):
            above = int((calibrated.calibration.position_scores >= score).sum())
            assert value == pytest.approx((1 + above) / (m + 1), abs=1.5 / (m + 1))


def test_masked_positions_are_never_flagged(calibrated: Any) -> None:
    x, _ = sentences(50, 2)
    found = calibrated.is_ood(x, 0.7, per="position")
    assert found.dtype == torch.bool
    assert found.any()
    assert not found[x["attention_mask"] == 0].any()
    assert torch.equal(found, calibrated.p_value(x, per="position") <= 0.7)


def test_false_alarms_at_a_random_position_are_as_promised() -> None:
    posterior, wrong, lacks = fitted_tagger(), [], []
    for seed in range(30):
        x, y = sentences(239, 10 + seed)
        held, new = ({k: v[part] for k, v in x.items()} for part in (slice(0, 99), slice(99, None)))
        posterior.calibrate(held, y[:99], kind="generalized_entropy")
        flags, sets = posterior.is_ood(new, 0.1, per="position"), posterior.predict_set(new, 0.1)
        right = sets.gather(-1, y[99:].clamp_min(0)[..., None])[..., 0]
        counts = new["attention_mask"].bool()
        wrong.append(float(((flags & counts).sum(1) / counts.sum(1)).double().mean()))
        lacks.append(float(((~right & counts).sum(1) / counts.sum(1)).double().mean()))
    for rates in (wrong, lacks):
        mean, error = sum(rates) / 30, math.sqrt(0.09 * (1 / 101 + 1 / 140) / 30)
        assert abs(mean - 0.1) < 4 * error


def test_padding_changes_no_decision(calibrated: Any) -> None:
    x, _ = sentences(9, 2)
    other = {**x, "input_ids": x["input_ids"] + 7 * (1 - x["attention_mask"])}
    assert torch.allclose(calibrated.p_value(x), calibrated.p_value(other))
    assert torch.allclose(
        calibrated.p_value(x, per="position"), calibrated.p_value(other, per="position"), equal_nan=True
    )


def test_targets_that_are_ignored_have_no_error() -> None:
    """The tags of the first tokens are ignored although they are no padding: errors are those of the others."""
    x, y = sentences(200, 1)
    y[:, :2] = -100
    posterior = fitted_tagger().calibrate(x, y, kind="energy")
    right = posterior.predict(x).probs.gather(-1, y.clamp_min(0)[..., None])[..., 0]
    allowed = -right.masked_fill(y < 0, torch.nan).cpu()
    assert len(posterior.calibration.errors) == 200
    near = (allowed.flatten(1)[:, None, :] - posterior.calibration.errors[None, :200, None]).abs()
    assert (near.nan_to_num(1.0).amin(2).amin(0) < 1e-12).all()


def test_an_input_without_a_target_is_not_compared() -> None:
    x, y = sentences(120, 1)
    y[:30] = -100
    posterior = fitted_tagger().calibrate(x, y, kind="energy")
    assert (len(posterior.calibration.errors), len(posterior.calibration.scores)) == (90, 120)
    assert not posterior.calibration.errors.isnan().any()


def test_batches_of_different_lengths() -> None:
    data = [
        part
        for length, seed in ((5, 1), (7, 2), (6, 3))
        for part in batched(*sentences(40, seed, length), 16)
    ]  # fmt: skip
    posterior = fitted_tagger().calibrate(data)
    assert len(posterior.calibration.scores) == 60
    assert posterior.calibration.strangers
    x = [{k: v for k, v in part.items() if k != "labels"} for part in data]
    assert torch.equal(posterior.p_value(x), torch.cat([posterior.p_value(part) for part in x]))


@pytest.mark.parametrize("size", [1, 7, 50])
def test_the_size_of_batches_does_not_matter(size: int) -> None:
    x, y = sentences(120, 1)
    whole = fitted_tagger().calibrate(x, y).calibration
    found = fitted_tagger().calibrate(batched(x, y, size)).calibration
    assert found.strangers == whole.strangers
    for name in ("scores", "errors", "position_scores"):
        assert torch.allclose(getattr(found, name), getattr(whole, name), atol=1e-9), name


def test_a_mapping_with_labels_brings_its_targets() -> None:
    x, y = sentences(120, 1)
    one, other = fitted_tagger().calibrate({**x, "labels": y}), fitted_tagger().calibrate(x, y)
    torch.testing.assert_close(one.calibration.errors, other.calibration.errors)
    assert fitted_tagger().calibrate(x).calibration.errors is None


def test_a_mask_of_ones_own(calibrated: Any) -> None:
    x, _ = sentences(20, 2)
    mask = x["attention_mask"].bool().clone()
    mask[:, 0] = False
    found = calibrated.p_value(x, mask=mask)
    assert torch.equal(found, calibrated.p_value(x, mask=lambda inputs: mask))
    assert torch.equal(found, calibrated.p_value(x, mask=mask.cpu().numpy()))
    assert not torch.equal(found, calibrated.p_value(x))
    assert torch.allclose(found, calibrated.p_value(batched(x, None, 7), mask=mask))
    assert calibrated.p_value(x, per="position", mask=mask)[:, 0].isnan().all()
    for wrong in (mask[:9], torch.cat([mask, mask])):
        with pytest.raises(DataError, match="mask"):
            calibrated.p_value(x, mask=wrong)


def test_calibrate_takes_a_function_for_a_mask_and_no_array() -> None:
    x, y = sentences(120, 1)
    posterior = fitted_tagger()
    with pytest.raises(SettingsError, match="mask is a function of the inputs, mask=lambda"):
        posterior.calibrate(x, y, mask=x["attention_mask"])
    plain = posterior.calibrate(x, y).p_value(x)
    own = posterior.calibrate(x, y, mask=lambda inputs: inputs["attention_mask"])
    assert torch.equal(plain, own.p_value(x, mask=x["attention_mask"]))
    for other in (None, "all"):
        with pytest.raises(SettingsError, match="calibrated with a mask: pass mask="):
            own.p_value(x, mask=other)
    every = posterior.calibrate(x, y, mask="all").p_value(x, mask="all")
    assert not torch.equal(plain, every)
    with pytest.raises(SettingsError, match='calibrated with mask="all": pass mask='):
        posterior.is_ood(x)


def test_a_score_of_whole_inputs_refuses_a_mask_in_the_combined_score_too() -> None:
    posterior = nb.baselines.LocalEnsemble(tagger()).fit(batched(*sentences(4, 0), 2), progress=False)
    held, _ = sentences(60, 1)
    for kind in ("local_ensemble", "combined"):
        assert posterior.calibrate(held, kind=kind).p_value(held).shape == (60,)
        for answer in (
            lambda mask: posterior.p_value(held, mask=mask),
            lambda mask: posterior.calibrate(held, mask=mask),
        ):
            with pytest.raises(SettingsError, match='"local_ensemble" is of whole inputs: it takes no mask'):
                answer(lambda x: x["attention_mask"])


def test_positions_that_training_ignored_are_warned_of() -> None:
    """Without an attention mask nobody knows which of them are padding."""
    x, y = sentences(120, 1)
    y[:, 0] = -100

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tagger()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens, torch.ones_like(tokens))

    posterior = nb.ProjectedPosterior(Plain(), prior_precision=1.0).fit(x["input_ids"][:4], y[:4], 4, progress=False)
    with pytest.warns(nb.errors.NullBayesWarning, match="every position counts"):
        posterior.calibrate(x["input_ids"][4:], y[4:])
    posterior.calibrate(x["input_ids"][4:], y[4:], mask="all").p_value(x["input_ids"], mask="all")


# --- images -----------------------------------------------------------------------------------------------------------


def segmented(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = rand(n, 1, 9, 8, generator=seeded(seed), dtype=torch.float64)
    y = (x[:, 0] * CLASSES).long().clamp(max=CLASSES - 1)
    y[:, 0] = 255
    return x, y


def fitted_segmenter() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, CLASSES, 1)).double()
    likelihood = Classification(class_dim=1, ignore_index=255)
    posterior = nb.LossProjectedPosterior(model, likelihood, prior_precision=1.0)
    return posterior.fit(*segmented(4, 0), 4, generator=seeded(), progress=False)


def test_segmentation_has_a_set_and_a_p_value_for_each_pixel() -> None:
    posterior = fitted_segmenter().calibrate(*segmented(80, 1), mask="all")
    x, _ = segmented(5, 2)
    sets = posterior.predict_set(x, 0.2, mask="all")
    assert sets.shape == (5, CLASSES, 9, 8)
    errors = posterior.calibration.errors.sort().values
    limit = errors[math.ceil(0.8 * (len(errors) + 1)) - 1]
    assert torch.equal(sets, posterior.predict(x).probs >= -limit)
    found = posterior.p_value(x, per="position", mask="all")
    assert found.shape == (5, 9, 8)
    assert not found.isnan().any()
    assert {"patches", "blur"} <= set(posterior.calibration.strangers)


def test_errors_of_images_are_those_of_random_pixels_that_count() -> None:
    posterior = fitted_segmenter().calibrate(*segmented(400, 1), kind="energy", mask="all")
    x, y = segmented(400, 1)
    probs = posterior.predict(x).probs.movedim(1, -1)[:, 1:]
    right = -probs.gather(-1, y[:, 1:, :, None])[..., 0]
    found = posterior.calibration.errors
    for i in range(400):
        assert float((right[i] - found[i]).abs().min()) < 1e-12
    assert abs(float(found.mean() - right.mean())) < 4 * float(right.std()) / 20


# --- other likelihoods with positions ---------------------------------------------------------------------------------


def test_intervals_of_sequences_leave_padding_out_of_the_errors() -> None:
    x, _ = sentences(120, 1)
    y = randn(120, T, 1, generator=seeded(3), dtype=torch.float64)
    y = y.masked_fill(x["attention_mask"][..., None] == 0, 1e6)  # what stands in for padding is no number to predict
    posterior = nb.ProjectedPosterior(tagger(1), nb.likelihoods.Regression(1.0), prior_precision=1.0)
    posterior.fit([({k: v[:4] for k, v in x.items()}, y[:4])], 4, progress=False)
    posterior.calibrate([({k: v[4:] for k, v in x.items()}, y[4:])])
    assert float(posterior.calibration.errors.max()) < 100.0
    lower, upper = posterior.predict_interval(x, 0.1)
    assert lower.shape == (120, T, 1)
    assert (lower < upper).all()


def test_binary_images_have_a_set_of_no_and_yes_for_each_pixel() -> None:
    x, _ = segmented(85, 1)
    y = (x > 0.5).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 1, 1)).double()
    posterior = nb.LossProjectedPosterior(model, "binary", prior_precision=1.0).fit(x[:5], y[:5], 4, progress=False)
    found = posterior.calibrate(x[5:], y[5:]).predict_set(x, 0.2)
    errors = posterior.calibration.errors.sort().values
    limit = errors[math.ceil(0.8 * (len(errors) + 1)) - 1]
    probs = posterior.predict(x).probs
    assert torch.equal(found, torch.stack([1 - probs, probs], -1) >= -limit * (1 - 1e-6))
    flat = posterior.calibrate(x[5:], y[5:, 0]).predict_set(x, 0.2)
    assert torch.equal(flat, found)


def test_several_labels_at_each_position() -> None:
    x, _ = sentences(120, 1)
    y = randint(2, (120, T, 2), generator=seeded(3))
    posterior = nb.ProjectedPosterior(tagger(2), "multilabel", prior_precision=1.0)
    posterior.fit([({k: v[:4] for k, v in x.items()}, y[:4])], 4, progress=False)
    posterior.calibrate([({k: v[4:] for k, v in x.items()}, y[4:])])
    errors = posterior.calibration.errors.sort().values
    limit = errors[math.ceil(0.8 * (len(errors) + 1)) - 1]
    sets, probs = posterior.predict_set(x, 0.2), posterior.predict(x).probs
    assert sets.shape == (120, T, 2, 2)  # no and yes for each
    torch.testing.assert_close(sets[..., 1], probs >= -limit)
    torch.testing.assert_close(sets[..., 0], 1 - probs >= -limit)
    inside = sets.gather(-1, y[..., None])[4:]
    assert 0.7 < float(inside.double().mean()) < 0.9


def test_a_random_position_is_drawn_among_those_that_count() -> None:
    values = torch.arange(12.0).view(1, 12).expand(6000, 12).clone()
    counts = torch.zeros(6000, 12, dtype=torch.bool)
    counts[:, [1, 5, 6, 11]] = True
    counts[-1] = False
    found = one_position(values, counts, seeded())
    assert found[-1].isnan()
    number = [int((found == value).sum()) for value in range(12)]
    assert sum(number) == 5999
    assert all((abs(k - 1500) < 150) if i in (1, 5, 6, 11) else k == 0 for i, k in enumerate(number))
