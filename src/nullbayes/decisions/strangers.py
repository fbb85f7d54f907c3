"""Artificial strangers: inputs that no network was trained on, made of inputs that are familiar.

They stand in for real strangers when the weights of a combined score are learned. No kind is like all real strangers,
so there are many kinds, each made of the same familiar inputs:

- *features*: every feature is taken from another example, so that only the distribution of each feature is left;
- *halves*: one half of an example, and the other half of another one;
- *mixture*: the mean of two examples;
- *noise*, *some_noise*: noise of the size of the features, and three tenths of it;
- *negative*: every feature mirrored at the middle of the range;
- for rows of a table *far* (three times as far from the mean), *near* (a tenth as far, as where missing numbers were
  replaced by means) and *shift* (four standard deviations to one side);
- for images *lower_halves* (halves from top to bottom), *patches* (sixteen patches, shuffled), *pixels* (all pixels in
  another order), *blur* (averages over four by four pixels), *flip* (upside down) and *turn* (by ninety degrees);
- for whole numbers *half_features* (half of the features are taken from other examples), for sequences of tokens
  *order* (the same tokens in another order), and for those that are looked up in tables of embeddings the kinds of
  `words.py`.

Whole numbers (tokens, categories) are exchanged and never averaged. Images whose pixels are bytes are changed like
other images and rounded afterwards. Masks stay as they are, and tokens are exchanged only between positions that count.
Of inputs with several parts, such as two images, half of the strangers have one part that is strange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from nullbayes.decisions.words import strange_words
from nullbayes.jacobian.batches import input_checksums, leaves, map_leaves, n_examples
from nullbayes.jacobian.tables import Lookup

_SIDE, _SMALL = 4, 8  # patches per side of an image, and the smallest image that is cut
_CHANGED = 0.5  # of the examples of a kind differ from the familiar ones, at least
Make = Callable[[Tensor, torch.Generator], Tensor]


def strangers(
    x: Any, generator: torch.Generator, lookups: Sequence[Lookup] = (), others: Sequence[Any] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over the kinds of strangers that can be made of some inputs, each of those inputs that it changes.

    Parameters
    ----------
    x : Tensor, tuple or mapping of tensors
        Familiar inputs, at least two.
    generator : torch.Generator
        On the CPU. The same seed gives the same strangers on every device.
    lookups : sequence of Lookup
        The columns of the inputs that are looked up in tables of embeddings.
    others : sequence of inputs
        Further familiar inputs, such as those of other lengths, whose tokens are familiar, too.
    """
    n = n_examples(x)
    familiar = input_checksums(x, n)
    for name, whole in chain(_exchanged(x, generator, lookups), strange_words(x, lookups, generator, others)):
        made = _in_part(whole, x, generator)
        both = ((new, old) for new, old in zip(leaves(made), leaves(x), strict=True) if old.ndim)
        pairs = [(new.flatten(1) if new.ndim > 1 else new[:, None], old) for new, old in both]
        changed = torch.stack([(new != old.reshape(new.shape)).any(1) for new, old in pairs]).any(0)
        usable = changed & torch.stack([torch.isfinite(new).all(1) for new, _ in pairs]).all(0)
        usable &= ~torch.isin(input_checksums(made, n), familiar).to(usable.device)  # no other familiar input either
        if float(usable.double().mean()) >= _CHANGED:
            yield name, map_leaves(lambda leaf, some=usable: leaf[some] if leaf.ndim else leaf, made)


def _exchanged(x: Any, generator: torch.Generator, lookups: Sequence[Lookup]) -> Iterator[tuple[str, Any]]:
    """Iterate over the kinds of strangers that are made of what the inputs hold."""
    parts = [leaf for leaf in leaves(x) if leaf.ndim]
    tables = {lookup.leaf for lookup in lookups}
    images = [leaf for i, leaf in enumerate(leaves(x)) if i not in tables and _is_image_of_bytes(leaf, parts)]
    numbers = [leaf for leaf in parts if leaf.is_floating_point()] + images
    tokens = [leaf for leaf in parts if _is_tokens(leaf, parts) and all(leaf is not image for image in images)]
    kinds = {"features": _features, "halves": _halves} if numbers or tokens else {}
    if numbers:
        kinds |= _CHANGES
        if all(leaf.ndim <= 2 for leaf in numbers):
            kinds |= _OF_TABLES
        if all(leaf.ndim == 4 and min(leaf.shape[-2:]) >= _SMALL for leaf in numbers):
            kinds |= _OF_IMAGES
    else:
        kinds |= {"half_features": _half_features, "order": _order} if tokens else {}
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    for name, make in kinds.items():

        def changed(leaf: Tensor, make: Make = make) -> Tensor:
            if any(leaf is image for image in images):
                return make(leaf.float(), generator).round().clamp(leaf.min(), leaf.max()).to(leaf.dtype)
            return _made(leaf, make, parts, mask, generator)

        yield name, map_leaves(changed, x)


def _in_part(made: Any, x: Any, generator: torch.Generator) -> Any:
    """Put back, in half of the strangers, all parts but one of those that were changed; columns are one part."""
    pairs = enumerate(zip(leaves(made), leaves(x), strict=True))
    changed = {i: i if new.ndim > 2 else -1 for i, (new, old) in pairs if new is not old and bool((new != old).any())}
    parts = sorted(set(changed.values()))
    if len(parts) < 2:
        return made
    chosen = torch.randint(2 * len(parts), (n_examples(x),), generator=generator, device="cpu")  # beyond: all of them
    numbers = iter(range(len(list(leaves(x)))))

    def mixed(new: Tensor, old: Tensor) -> Tensor:
        if (i := next(numbers)) not in changed:
            return new
        stays = (chosen >= len(parts)) | (chosen == parts.index(changed[i]))
        return torch.where(stays.to(new.device).view(-1, *(1,) * (new.ndim - 1)), new, old)

    return map_leaves(mixed, made, x)


def _made(leaf: Tensor, make: Make, parts: list[Tensor], mask: Any, generator: torch.Generator) -> Tensor:
    """Return a changed leaf of an input, or the leaf itself where it must not change."""
    if leaf is mask or not leaf.ndim or not (leaf.is_floating_point() or _is_tokens(leaf, parts)):
        return leaf
    if not leaf.is_floating_point():
        if make in (*_CHANGES.values(), *_OF_TABLES.values(), *_OF_IMAGES.values()):
            return leaf
        if isinstance(mask, Tensor) and leaf.shape == mask.shape:
            return _in_spans(leaf, mask.bool(), make, generator)
        if make is _order:  # the columns may be categories of different vocabularies: none gets a larger number
            made = make(leaf, generator)
            return torch.where((made >= leaf.amin(0)) & (made <= leaf.amax(0)), made, leaf)
    return make(leaf, generator)


def _is_tokens(leaf: Tensor, parts: list[Tensor]) -> bool:
    """Whether a leaf holds tokens or categories: whole numbers that are no mask and do not repeat in every example."""
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool or not leaf.ndim:
        return False
    if len(parts) > 1 and bool(((leaf == 0) | (leaf == 1)).all()):
        return False  # a mask, or types of segments
    return bool((leaf != leaf[:1]).any())


def _is_image_of_bytes(leaf: Tensor, parts: list[Tensor]) -> bool:
    """Whether a leaf holds images whose pixels are whole numbers of eight bits."""
    size = leaf.ndim == 4 and min(leaf.shape[-2:]) >= _SMALL
    return size and leaf.dtype in (torch.uint8, torch.int8) and _is_tokens(leaf, parts)


def _in_spans(leaf: Tensor, counts: Tensor, make: Make, generator: torch.Generator) -> Tensor:  # (n, T)
    """Change tokens of examples of the same length together, so that padding stays where it is."""
    result = leaf.clone()
    lengths = counts.sum(1)
    for length in lengths.unique().tolist():
        some = lengths == length
        spans = leaf[some][counts[some]].view(-1, int(length))
        if len(spans) > 1 and length > 2:  # without the first and the last token, which often mark the ends
            changed = spans.clone()
            changed[:, 1:-1] = make(spans[:, 1:-1], generator)
            part = result[some]
            part[counts[some]] = changed.flatten()
            result[some] = part
    return result


def _uniform(shape: Any, generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


def _partner(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return, for each example, another one."""
    shift = int(torch.randint(1, max(2, len(x)), (), generator=generator, device="cpu"))
    return x.roll(shift, 0)


def _features(x: Tensor, generator: torch.Generator) -> Tensor:
    flat = x.reshape(len(x), -1)
    return flat.gather(0, _uniform(flat.shape, generator, x).argsort(0)).view_as(x)


def _half_features(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(_uniform(x.shape, generator, x) < 0.5, _features(x, generator), x)


def _halves(x: Tensor, generator: torch.Generator) -> Tensor:
    if x[0].numel() < 2:
        return x
    axis = x.ndim - 1 if x.shape[-1] > 1 else max(range(1, x.ndim), key=lambda i: x.shape[i])
    first, second = x.tensor_split([x.shape[axis] // 2], dim=axis)
    return torch.cat([first, _partner(second, generator)], dim=axis)


def _mixture(x: Tensor, generator: torch.Generator) -> Tensor:
    return x / 2 + _partner(x, generator) / 2


def _noise(x: Tensor, generator: torch.Generator, size: float = 1.0) -> Tensor:
    spread = x.std(0) if x.ndim <= 2 else x.std()  # the columns of a table have units of their own
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
    return x + size * spread * drawn.to(x)


def _some_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return _noise(x, generator, 0.3)


def _negative(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.ndim <= 2:
        return x.amax(0) + x.amin(0) - x
    return x.amax() + x.amin() - x


def _far(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, ...)
    return x.mean(0) + 3.0 * (x - x.mean(0))


def _near(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, ...)
    return x.mean(0) + 0.1 * (x - x.mean(0))


def _shift(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, ...)
    side = 1.0 if float(_uniform((1,), generator, x)) < 0.5 else -1.0
    return x + 4.0 * side * x.std(0)


def _patches(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    n, channels, h, w = *x.shape[:2], x.shape[2] // _SIDE, x.shape[3] // _SIDE
    inside = x[:, :, : h * _SIDE, : w * _SIDE]
    cut = inside.unfold(2, h, h).unfold(3, w, w).reshape(n, channels, _SIDE**2, h, w)
    order = _uniform((n, _SIDE**2), generator, x).argsort(1)
    mixed = cut.gather(2, order[:, None, :, None, None].expand_as(cut)).view(n, channels, _SIDE, _SIDE, h, w)
    result = x.clone()
    result[:, :, : h * _SIDE, : w * _SIDE] = mixed.permute(0, 1, 2, 4, 3, 5).reshape(inside.shape)
    return result


def _blur(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    return interpolate(avg_pool2d(x, _SIDE, ceil_mode=True), size=x.shape[-2:], mode="bilinear")


def _lower_halves(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    return _halves(x.transpose(2, 3), generator).transpose(2, 3)


def _pixels(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    flat = x.flatten(2)
    return flat[..., _uniform(flat.shape[-1:], generator, x).argsort()].view_as(x)


def _flip(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    return x.flip(2)


def _turn(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, c, h, w)
    return x.transpose(2, 3).flip(2) if x.shape[2] == x.shape[3] else x


def _order(x: Tensor, generator: torch.Generator) -> Tensor:  # (n, T)
    if x.ndim != 2:
        return x
    return x.gather(1, _uniform(x.shape, generator, x).argsort(1))


_CHANGES: dict[str, Make] = {"mixture": _mixture, "noise": _noise, "some_noise": _some_noise, "negative": _negative}
_OF_TABLES: dict[str, Make] = {"far": _far, "near": _near, "shift": _shift}
_OF_IMAGES: dict[str, Make] = {
    "lower_halves": _lower_halves, "patches": _patches, "pixels": _pixels, "blur": _blur, "flip": _flip, "turn": _turn,
}  # fmt: skip
