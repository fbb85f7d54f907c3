"""Padding does not count: masks at prediction, scores of positions, and how they become one number per input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import DataError, InputError, NullBayesWarning, SettingsError
from nullbayes.predictive import OF_MEAN, SCORES
from support.drawing import randint, randn

VOCABULARY, CLASSES, LENGTH = 30, 4, 12
KINDS = [nb.ProjectedPosterior, nb.LossProjectedPosterior, nb.baselines.LastLayerLaplace]


class Tagger(nn.Module):
    """Tags each word of a sentence; takes a mask, as models of Hugging Face do, and answers the same without."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids))


def sentences() -> tuple[Tensor, Tensor]:
    """Return words, 0 at padding, and labels, which ignore it."""
    generator = torch.Generator().manual_seed(0)
    ids, n = (
        randint(VOCABULARY // 2 - 1, (40, LENGTH), generator=generator) + 1,
        randint(10, (40,), generator=generator),
    )
    pad = torch.arange(LENGTH, device=ids.device) >= 3 + n[:, None]
    ids = ids.masked_fill(pad, 0)
    return ids, (ids % CLASSES).masked_fill(pad, -100)


IDS, TAGS = sentences()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tagger().to(IDS.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(IDS).flatten(0, 1), TAGS.flatten()).backward()
        optimizer.step()
    return model.eval()


def fit(kind: type, model: nn.Module, x: Any = IDS) -> Any:
    posterior = kind(model, prior_precision=1.0)
    return posterior.fit([(x, TAGS)], 10, generator=torch.Generator().manual_seed(0), progress=False)


def padded(ids: Tensor, more: int) -> Tensor:
    return F.pad(ids, (0, more))


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_score(kind: type, model: nn.Module) -> None:
    posterior, few = fit(kind, model), torch.tensor([[3, 5, 7, 9], [2, 4, 6, 8]], device=IDS.device)
    for name in SCORES:
        short = posterior.ood_score(few, name, mask="all")
        long = padded(few, 8)
        torch.testing.assert_close(posterior.ood_score(long, name, mask=long != 0), short)
        torch.testing.assert_close(posterior.ood_score([long[:1], long[1:]], name, mask=lambda ids: ids != 0), short)
        if kind is nb.ProjectedPosterior:  # padding, whose rows were ignored, would drown the rest
            share = 0.1 if name in ("energy", "max_logit", "generalized_entropy") else 0.5  # logarithms, almost
            assert (posterior.ood_score(long, name, mask="all") > short + share * short.abs()).any()


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_attention_mask_is_found_in_the_input(kind: type, model: nn.Module) -> None:
    posterior = fit(kind, model, {"input_ids": IDS, "attention_mask": (IDS != 0).long()})
    x = {"input_ids": IDS[:6], "attention_mask": (IDS[:6] != 0).long()}
    prediction = posterior.predict(x)
    assert torch.equal(prediction.mask, IDS[:6] != 0)
    named = posterior.ood_score(x, "mutual_information")
    torch.testing.assert_close(named, posterior.ood_score(x, "mutual_information", mask=IDS[:6] != 0))
    positions = posterior.ood_score(x, "mutual_information", per="position")
    assert torch.equal(positions.isnan(), IDS[:6] == 0)
    torch.testing.assert_close(positions.nanmean(1), named)
    largest = posterior.ood_score(x, "max_variance", per="position").nan_to_num(-1.0).amax(1)
    torch.testing.assert_close(posterior.ood_score(x, "max_variance"), largest)


def test_inputs_without_a_mask_are_warned_of_where_training_ignored_positions(model: nn.Module) -> None:
    posterior = fit(nb.ProjectedPosterior, model)
    with pytest.warns(
        NullBayesWarning, match=r'without a mask.*mask=\.\.\., true where a position counts, or mask="all"'
    ):
        posterior.ood_score(IDS[:3])
    posterior.ood_score(IDS[:3], per="position")
    posterior.ood_score(IDS[:3], mask="all")


def test_positions_that_training_ignored_and_the_mask_counts_are_warned_of(model: nn.Module, tmp_path: Any) -> None:
    x, tags = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}, TAGS.clone()
    tags[:, 0] = -100  # as of special tokens
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, tags)], 5, progress=False)
    posterior.save(tmp_path / "file")
    for each in (posterior, nb.load(tmp_path / "file", model)):
        with pytest.warns(NullBayesWarning, match=r"ignored positions that attention_mask counts \(special tokens"):
            each.ood_score(x)
        each.ood_score(x, mask=tags != -100)


def test_labels_that_count_at_padding_are_warned_of(model: nn.Module) -> None:
    x = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
    with pytest.warns(NullBayesWarning, match=r"count where attention_mask is 0.*ignore_index \(-100\)"):
        nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, TAGS.clamp_min(0))], 5, progress=False)


def test_batches_may_have_lengths_of_their_own_where_a_score_is_one_number(model: nn.Module) -> None:
    posterior, parts = fit(nb.ProjectedPosterior, model), [IDS[:3, :5], IDS[3:8, :9]]
    wanted = [posterior.ood_score(part, mask=part != 0) for part in parts]
    torch.testing.assert_close(posterior.ood_score(parts, mask=lambda ids: ids != 0), torch.cat(wanted))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 5), r"shape of the positions, \(3, 12\), not \(3, 5\)"),
        (torch.ones(3), r"not \(3,\)"),
        (lambda ids: ids.tolist(), "not list"),
        ([[True] * 12] * 3, "not a list"),
        ("some", 'a function of the inputs, "all" or None'),
        (torch.zeros(3, 12), "leaves nothing of input 0"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Any, message: str, model: nn.Module) -> None:
    with pytest.raises(DataError, match=message):
        fit(nb.ProjectedPosterior, model).ood_score(IDS[:3], mask=mask)


def test_an_input_that_is_all_padding_is_named() -> None:
    """Attention over nothing is NaN; no prior precision helps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Padded().eval()
    x, y = randn(9, 5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2
    mask = torch.ones(9, 5)
    mask[::2, 3:] = 0
    posterior = nb.ProjectedPosterior(model, parameters="head.*", prior_precision=100.0)
    posterior.fit([{"x": x[:2], "attention_mask": mask[:2], "labels": y[:2]}], 5, progress=False)
    mask[4] = 0
    with pytest.warns(NullBayesWarning, match=r"NaN or Inf for 1 of 9 inputs.*input 4: is it all padding") as caught:
        assert posterior.predict({"x": x, "attention_mask": mask}).mean.isnan().any(1).nonzero().tolist() == [[4]]
    assert not any("prior_precision" in str(warning.message) for warning in caught)


class Padded(nn.Module):
    """Pools what it attends to, without padding, and has one prediction per input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        weights = self.attention(x).masked_fill(attention_mask[..., None] == 0, -torch.inf).softmax(1)
        return self.head((weights * x).sum(1))


def test_masks_may_be_arrays(model: nn.Module) -> None:
    posterior, few = fit(nb.ProjectedPosterior, model), IDS[:3]
    wanted = posterior.ood_score(few, "entropy", mask=few != 0)
    array = (few != 0).cpu().numpy()
    torch.testing.assert_close(posterior.ood_score(few, "entropy", mask=array), wanted)
    torch.testing.assert_close(posterior.ood_score(few, "entropy", mask=lambda _: array), wanted)
    assert not torch.allclose(posterior.ood_score(few, "entropy", mask="all"), wanted)
    with pytest.raises(SettingsError, match="takes no mask"):
        fit(nb.baselines.SCOD, model).ood_score(few, mask=array)


def test_a_batch_with_its_targets_can_be_predicted(model: nn.Module) -> None:
    batch = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": TAGS}
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([batch], 5, progress=False)
    torch.testing.assert_close(posterior.predict(batch).mean, posterior.predict([batch]).mean)


def test_a_mask_is_refused_where_outputs_have_no_positions(model: nn.Module) -> None:
    flat = nn.Sequential(model, nn.Flatten(), nn.Linear(CLASSES * LENGTH, 2)).to(IDS.device)
    posterior = nb.ProjectedPosterior(flat, prior_precision=1.0).fit(IDS, TAGS[:, 0] % 2, 5, progress=False)
    with pytest.raises(DataError, match="one prediction: leave mask out"):
        posterior.ood_score(IDS, mask=IDS != 0)
    for kind in ("max_variance", "relative_variance"):
        with pytest.raises(SettingsError, match="one prediction per input"):
            posterior.ood_score(IDS, kind, per="position")
    with pytest.raises(SettingsError, match="not 'token': per=\"position\" gives one score per token"):
        posterior.ood_score(IDS, per="token")


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_scores_of_images_have_one_number_per_pixel() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).to(IDS.device)
    x = IDS[:4, :, None].float().reshape(4, 1, 3, 4)
    posterior = nb.LossProjectedPosterior(model, prior_precision=1.0).fit(
        x, IDS[:4].reshape(4, 3, 4) % 3, 5, progress=False
    )
    prediction = posterior.predict(x)
    assert posterior.ood_score(x, per="position").shape == (4, 3, 4)
    torch.testing.assert_close(posterior.ood_score(x, "max_variance", per="position"), prediction.variance.amax(1))
    torch.testing.assert_close(posterior.ood_score(x, "max_variance"), prediction.variance.amax((1, 2, 3)))


def test_scores_of_the_map_network_ignore_padding(model: nn.Module) -> None:
    posterior, long = fit(nb.baselines.MAP, model), padded(IDS[:5, :3], 4)
    for kind in OF_MEAN:
        short = posterior.ood_score(IDS[:5, :3], kind, mask="all")
        torch.testing.assert_close(posterior.ood_score(long, kind, mask=long != 0), short)
        assert posterior.ood_score(long, kind, mask=long != 0, per="position").isnan().sum() == 20


# --- the form of inputs -----------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Takes a mask that may be left out, which changes the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.body(x if mask is None else x * mask)


@pytest.fixture(scope="module")
def pairs() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Masked()
    x, mask = randn(30, 4, generator=generator), (randn(30, 4, generator=generator) > 0).float()
    y = (x * mask).sum(1).gt(0).long()
    return model.to(IDS.device), x.to(IDS.device), mask.to(IDS.device), y.to(IDS.device)


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.baselines.MAP])
def test_inputs_are_distinguished_from_targets_by_their_structure(kind: type, pairs: Any, tmp_path: Any) -> None:
    model, x, mask, y = pairs
    posterior = kind(model).fit([((x, mask), y)], 5, progress=False)
    posterior.save(tmp_path / "file")
    wanted = model(x, mask).detach()
    for each in (posterior, nb.load(tmp_path / "file", model)):
        for inputs in ((x, mask), [(x, mask)], [((x, mask), y)], [(x[:20], mask[:20]), (x[20:], mask[20:])]):
            torch.testing.assert_close(each.predict(inputs).mean, wanted)
        for forgotten in (x, [x], [x[:3], x[3:]], {"x": x}):
            with pytest.raises(InputError, match=r"Pass all of its inputs.*tuple \(a, b\)"):
                each.predict(forgotten)


def test_a_mask_that_is_missing_in_a_mapping_is_refused(model: nn.Module) -> None:
    posterior = fit(nb.ProjectedPosterior, model, {"input_ids": IDS, "attention_mask": (IDS != 0).long()})
    with pytest.raises(InputError, match="attention_mask"):
        posterior.predict({"input_ids": IDS})
    with pytest.raises(InputError, match="attention_mask"):
        posterior.check_fit([({"input_ids": IDS}, TAGS)])


def test_batches_padded_to_different_lengths_are_refused_with_advice(model: nn.Module) -> None:
    posterior = fit(nb.ProjectedPosterior, model)
    with pytest.raises(DataError, match=r"outputs of shapes .*: pad them to one length, or predict batch by batch"):
        posterior.predict([IDS[:3, :5], IDS[3:6, :7]])
