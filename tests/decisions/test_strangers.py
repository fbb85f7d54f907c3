"""Strangers of every kind are inputs that a network takes, made of familiar inputs that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nullbayes.decisions.strangers import strangers
from nullbayes.jacobian.batches import leaves, map_leaves
from nullbayes.jacobian.tables import Lookup
from support.drawing import rand, randint, randn, seeded

EXCHANGES = ["features", "halves"]
OF_TOKENS = [*EXCHANGES, "half_features", "order"]
CHANGES = ["mixture", "noise", "some_noise", "negative"]
OF_TABLES = ["far", "near", "shift"]
OF_IMAGES = ["lower_halves", "patches", "pixels", "blur", "flip"]  # and "turn", for square ones


def made(x: Any, seed: int = 0) -> dict[str, Any]:
    return dict(strangers(x, seeded(seed)))


def table(n: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(n, 5, generator=seeded(1), dtype=dtype) * torch.tensor([1.0, 10.0, 100.0, 1e3, 1e4], dtype=dtype)


def images(n: int = 6, height: int = 12, width: int = 9, channels: int = 3) -> Tensor:
    return rand(n, channels, height, width, generator=seeded(2))


def sentences(n: int = 30, length: int = 8) -> dict[str, Tensor]:
    """Tokens from 100 on, each used once, with padding of zeros behind; in groups of the same length."""
    tokens = torch.arange(100, 100 + n * length).view(n, length)
    lengths = torch.tensor([4, 6, 8]).repeat(n)[:n]
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


INPUTS: dict[str, Any] = {
    "table": table(),
    "float64": table(dtype=torch.float64),
    "one column": table()[:, :1],
    "numbers": table()[:, 0],
    "two": table(2),
    "images": images(),
    "images of one pixel": images(height=1, width=1),
    "small images": images(height=7, width=7),
    "square images": images(height=9, width=9),
    "odd images": images(height=9, width=13, channels=1),
    "whole images": (255 * images()).byte(),
    "small whole images": (255 * images(height=7, width=7)).byte(),
    "volumes": randn(4, 2, 3, 3, 3, generator=seeded(3)),
    "tokens": randint(9, (20, 6), generator=seeded(4)),
    "sentences": sentences(),
    "categories": (table(), randint(4, (20, 2), generator=seeded(5))),
    "one category": (table(), randint(4, (20,), generator=seeded(5))),
    "images and categories": (images(20), randint(4, (20, 2), generator=seeded(5))),
    "shared number": {"x": table(), "scale": torch.tensor(2.0), "depth": 3},
    "embeddings": {"inputs_embeds": randn(9, 4, 3, generator=seeded(6)), "attention_mask": torch.ones(9, 4).tril(2)},
}  # fmt: skip
KINDS: dict[str, list[str]] = {
    "images": EXCHANGES + CHANGES + OF_IMAGES,
    "odd images": EXCHANGES + CHANGES + OF_IMAGES,
    "images and categories": EXCHANGES + CHANGES + OF_IMAGES,
    "square images": [*EXCHANGES, *CHANGES, *OF_IMAGES, "turn"],
    "whole images": EXCHANGES + CHANGES + OF_IMAGES,
    "small whole images": [*EXCHANGES, "half_features"],
    "tokens": OF_TOKENS,
    "sentences": OF_TOKENS,
    "numbers": ["features", *CHANGES, *OF_TABLES],
    "images of one pixel": EXCHANGES + CHANGES,
    "small images": EXCHANGES + CHANGES,
    "volumes": EXCHANGES + CHANGES,
    "embeddings": EXCHANGES + CHANGES,
}
each_input = pytest.mark.parametrize("name", INPUTS)


@each_input
def test_every_kind_that_applies_is_made(name: str) -> None:
    found, wanted = set(made(INPUTS[name])), set(KINDS.get(name, EXCHANGES + CHANGES + OF_TABLES))
    assert found <= wanted
    if name not in ("numbers", "one column", "two"):  # where an exchange may change too few
        assert found == wanted


@each_input
def test_strangers_have_the_form_of_the_inputs(name: str) -> None:
    x = INPUTS[name]
    n = max(len(leaf) for leaf in leaves(x) if leaf.ndim)
    for stranger in made(x).values():
        pairs = list(zip(leaves(stranger), leaves(x), strict=True))
        assert all(new.dtype == old.dtype and new.shape[1:] == old.shape[1:] for new, old in pairs)
        sizes = {len(new) for new, _ in pairs if new.ndim}
        assert len(sizes) == 1
        assert n / 2 <= sizes.pop() <= n
        assert all(torch.isfinite(new).all() for new, _ in pairs)


@each_input
def test_the_familiar_inputs_stay_as_they_are(name: str) -> None:
    x = INPUTS[name]
    before = map_leaves(torch.clone, x)
    for stranger in made(x).values():
        for new in leaves(stranger):
            if new.ndim:
                new.zero_()
        for old, kept in zip(leaves(x), leaves(before), strict=True):
            assert torch.equal(old, kept)


@each_input
def test_a_seed_determines_the_strangers(name: str) -> None:
    one, same, other = made(INPUTS[name]), made(INPUTS[name]), made(INPUTS[name], seed=1)
    for kind, stranger in one.items():
        assert all(torch.equal(a, b) for a, b in zip(leaves(stranger), leaves(same[kind]), strict=True))
    assert any(
        a.shape != b.shape or not torch.equal(a, b)
        for kind in {"features", "noise"} & one.keys() & other.keys()
        for a, b in zip(leaves(one[kind]), leaves(other[kind]), strict=True)
    )


@each_input
def test_every_stranger_differs_from_what_it_is_made_of(name: str) -> None:
    """An unchanged input would teach that a familiar input is strange."""
    x = INPUTS[name]
    rows = {tuple(torch.cat([leaf[i].double().flatten() for leaf in leaves(x) if leaf.ndim]).tolist())
            for i in range(max(len(leaf) for leaf in leaves(x) if leaf.ndim))}  # fmt: skip
    for kind, stranger in made(x).items():
        parts = [leaf for leaf in leaves(stranger) if leaf.ndim]
        new = [tuple(torch.cat([p[i].double().flatten() for p in parts]).tolist()) for i in range(len(parts[0]))]
        if name not in ("numbers", "one column", "two", "images of one pixel"):  # where an exchange gives another input
            assert not rows & set(new), kind


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_exchanged_features_keep_the_distribution_of_each_feature() -> None:
    x = table(400)
    found = made(x)["features"]
    assert len(found) == 400
    assert torch.equal(found.sort(0).values, x.sort(0).values)


def test_half_of_the_tokens_are_exchanged() -> None:
    x = torch.arange(400 * 5).view(400, 5)  # which tells where each comes from
    half = made(x)["half_features"]
    assert 0.9 * 400 < len(half) < 400  # one in 32 keeps all of its tokens
    kept = [int((x == row).sum(1).max()) for row in half]
    assert 2.0 < sum(kept) / len(kept) < 3.0
    assert all(bool(torch.isin(half[:, j], x[:, j]).all()) for j in range(5))


def test_images_are_cut_turned_and_stirred() -> None:
    x = images(height=9, width=9)
    found = made(x)
    assert torch.equal(found["flip"], x.flip(2))
    assert torch.equal(found["turn"].transpose(2, 3).flip(3), x)
    assert torch.equal(found["pixels"].flatten(2).sort(2).values, x.flatten(2).sort(2).values)
    order = found["pixels"][0, 0].flatten()[:, None] == x[0, 0].flatten()  # the same for all images and channels
    assert torch.equal(found["pixels"].flatten(2), x.flatten(2)[..., order.double().argmax(1)])
    upper, lower = found["lower_halves"][:, :, :4], found["lower_halves"][:, :, 4:]
    assert torch.equal(upper, x[:, :, :4])
    assert all(any(torch.equal(part, other) for other in x[:, :, 4:]) for part in lower)
    assert not torch.equal(lower, x[:, :, 4:])


def test_images_of_bytes_are_changed_as_images_of_numbers_and_rounded() -> None:
    x = (20 + 200 * images()).byte()
    found, wanted = made(x), made(x.float())
    assert found.keys() == wanted.keys()
    for kind, new in found.items():
        assert new.dtype == torch.uint8
        assert int(x.min()) <= int(new.min()) <= int(new.max()) <= int(x.max())
        torch.testing.assert_close(new.float(), wanted[kind].clamp(x.min(), x.max()), atol=0.51, rtol=0)


def test_a_map_of_categories_that_are_looked_up_is_never_averaged() -> None:
    x = randint(9, (20, 1, 8, 8), generator=seeded(4), dtype=torch.uint8)
    lookup = Lookup(0, torch.arange(64), 9, None)
    assert not {*CHANGES, "blur"} & set(dict(strangers(x, seeded(), [lookup])))
    assert {*CHANGES, "blur"} <= set(made(x))


def test_halves_are_those_of_two_examples() -> None:
    x = table(20)
    found = made(x)["halves"]
    assert torch.equal(found[:, :2], x[:, :2])
    partner = [int((x[:, 2] == value).nonzero()) for value in found[:, 2]]
    assert torch.equal(found[:, 2:], x[partner][:, 2:])
    assert all(i != j for i, j in enumerate(partner))


def test_a_mixture_is_the_mean_of_two_examples() -> None:
    x = table(dtype=torch.float64)
    found = made(x)["mixture"]
    other = 2 * found - x
    assert all(float((x - row).abs().sum(1).min()) < 1e-9 for row in other)


def test_noise_has_the_size_of_each_column_of_a_table() -> None:
    x = table(4000, dtype=torch.float64)
    found = made(x)
    for kind, size in (("noise", 1.0), ("some_noise", 0.3)):
        assert torch.allclose((found[kind] - x).std(0) / x.std(0), torch.full((5,), size).double(), rtol=0.06)


def test_the_negative_has_the_range_of_the_inputs() -> None:
    x = table()
    found = made(x)["negative"]
    assert torch.allclose(found.amax(0), x.amax(0))
    assert torch.equal(found.argmin(0), x.argmax(0))
    pixels = images()
    assert torch.allclose(made(pixels)["negative"], pixels.max() + pixels.min() - pixels)


@pytest.mark.parametrize("shape", [(8, 8), (9, 13), (12, 9), (32, 32)])
def test_patches_are_shuffled_within_each_image(shape: tuple[int, int]) -> None:
    x = images(5, *shape)
    found, h, w = made(x)["patches"], shape[0] // 4, shape[1] // 4
    assert torch.equal(found[:, :, 4 * h :], x[:, :, 4 * h :])
    assert torch.equal(found[..., 4 * w :], x[..., 4 * w :])
    for old, new in zip(x, found, strict=True):
        places = [(slice(i * h, i * h + h), slice(j * w, j * w + w)) for i in range(4) for j in range(4)]
        before, after = (sorted(image[:, a, b].flatten().tolist() for a, b in places) for image in (old, new))
        assert before == after


def test_a_blurred_image_keeps_its_mean_and_loses_its_detail() -> None:
    x = images(5, 32, 32)
    found = made(x)["blur"]
    assert torch.allclose(found.mean((2, 3)), x.mean((2, 3)), atol=0.02)
    assert float(found.std()) < 0.5 * float(x.std())


def test_large_numbers_do_not_overflow() -> None:
    x = torch.full((8, 3), 3e38) * torch.tensor([[1.0], [-1.0]]).repeat(4, 1) * rand(8, 1, generator=seeded())
    for stranger in made(x).values():
        assert torch.isfinite(stranger).all()
    assert "mixture" in made(3e38 * (0.9 + 0.1 * rand(8, 3, generator=seeded())))


# --- whole numbers ----------------------------------------------------------------------------------------------------


def test_masks_stay_as_they_are_and_padding_stays_where_it_is() -> None:
    x = sentences()
    for kind, found in made(x).items():
        mask = found["attention_mask"]
        assert ((found["input_ids"] == 0) == (mask == 0)).all(), kind
        assert set(mask.sum(1).tolist()) <= {4, 6, 8}
        assert (mask.diff(dim=1) <= 0).all()


def test_a_mask_of_floats_stays_as_it_is() -> None:
    for found in made(INPUTS["embeddings"]).values():
        assert set(found["attention_mask"].unique().tolist()) == {0.0, 1.0}


def test_tokens_in_another_order_are_those_of_the_same_example() -> None:
    x = sentences()["input_ids"]
    sets = {frozenset(row.tolist()) for row in x}
    found = made(sentences())["order"]["input_ids"]
    assert all(frozenset(row.tolist()) in sets for row in found)
    firsts, lasts = {int(row[0]) for row in x}, {int(row[row > 0][-1]) for row in x}
    assert all(int(row[0]) in firsts and int(row[row > 0][-1]) in lasts for row in found)  # marks of the ends


@pytest.mark.parametrize("kind", EXCHANGES)
def test_exchanged_tokens_come_from_the_same_position(kind: str) -> None:
    x = sentences()
    found = made(x)[kind]["input_ids"]
    for j in range(8):
        assert set(found[:, j].tolist()) <= set(x["input_ids"][:, j].tolist())


def test_no_category_gets_a_number_that_it_does_not_have() -> None:
    """An embedding of two categories has no row for the ninth."""
    sizes = (2, 9, 3, 40)
    x = torch.stack([randint(size, (50,), generator=seeded(size)) for size in sizes], 1)
    for seed in range(5):
        for kind, found in made(x, seed).items():
            for j, size in enumerate(sizes):
                assert int(found[:, j].min()) >= 0, kind
                assert int(found[:, j].max()) < size, kind


def test_types_of_segments_and_positions_stay_as_they_are() -> None:
    x = {**sentences(), "token_type_ids": (sentences()["input_ids"] % 2), "position_ids": torch.arange(8).expand(30, 8)}
    for found in made(x).values():
        assert (found["position_ids"] == torch.arange(8)).all()
        assert set(found["token_type_ids"].unique().tolist()) <= {0, 1}


def test_nothing_can_be_made_of_equal_inputs() -> None:
    assert made(torch.zeros(9, 4, dtype=torch.long)) == {}
    assert set(made(torch.zeros(9, 4))) == set()
    assert made({"mask": torch.ones(9, 4, dtype=torch.bool)}) == {}


def test_sentences_of_different_lengths_have_no_strangers() -> None:
    lengths = torch.arange(3, 9)
    mask = (torch.arange(8) < lengths[:, None]).long()
    assert made({"input_ids": torch.arange(1, 49).view(6, 8) * mask, "attention_mask": mask}) == {}


@pytest.mark.parametrize("shape", [(40, 1), (40, 12, 1), (40, 1, 12), (40,)])
def test_no_stranger_is_another_familiar_input(shape: tuple[int, ...]) -> None:
    x = randn(*shape, generator=seeded(7))
    for kind, stranger in made(x).items():
        same = (stranger.reshape(len(stranger), 1, -1) == x.reshape(1, 40, -1)).all(2)
        assert not same.any(), kind


def test_a_series_of_one_channel_is_cut_in_time() -> None:
    x = randn(40, 12, 1, generator=seeded(8))
    found = made(x)["halves"]
    assert torch.equal(found[:, :6], x[:, :6])
    assert bool((found[:, 6:] != x[:, 6:]).any(1).all())


def test_of_two_images_one_or_both_are_strange() -> None:
    x = (images(200), images(200).flip(0))
    found = made(x)
    assert len(found) >= 11
    for kind, stranger in found.items():
        assert len(stranger[0]) == 200, kind
        first, second = ((new != old).flatten(1).any(1) for new, old in zip(stranger, x, strict=True))
        shares = [float(part.double().mean()) for part in (first & ~second, second & ~first, first & second)]
        assert shares == pytest.approx([0.25, 0.25, 0.5], abs=0.12), kind


def test_one_image_is_changed_as_a_whole() -> None:
    x = images(200)
    for kind, new in made((x,)).items():
        assert len(new[0]) >= 199, kind  # none is put back; an exchange may find itself


def test_rows_of_a_table_go_far_away() -> None:
    x = table(50, torch.float64)
    found = made(x)
    for kind, times in (("far", 3.0), ("near", 0.1)):
        torch.testing.assert_close(found[kind] - x.mean(0), times * (x - x.mean(0)))
    steps = (found["shift"] - x) / x.std(0)
    torch.testing.assert_close(steps.abs(), torch.full_like(x, 4.0), rtol=1e-2, atol=0)
    assert bool((steps > 0).all()) or bool((steps < 0).all())
