"""The columns of the inputs that a network looks up in tables of embeddings are found, whatever it does with others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.jacobian.network import Network
from nullbayes.jacobian.tables import find_lookups, takes
from support.drawing import randint, randn


class Sentences(nn.Module):
    """Tokens with positions, whose table has as many lines as there are positions."""

    def __init__(self, words: int = 50, length: int = 6) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, 4), nn.Embedding(length, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.last((self.words(input_ids) + self.positions(places)).mean(1))


class Categories(nn.Module):
    """Two categories and numbers; the third category is no line of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(5, 3), nn.Embedding(8, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        return self.last(numbers + self.first(categories[:, 0]) * categories[:, 1:2] + self.second(categories[:, 2]))


def found(module: nn.Module, x: Any) -> list[tuple[int, list[int], int]]:
    return [(one.leaf, one.columns.tolist(), one.lines) for one in find_lookups(Network(module.eval()), x)]


def tokens(n: int = 40, length: int = 6) -> Tensor:
    return randint(50, (n, length), generator=torch.Generator().manual_seed(0))


def test_tokens_of_a_sentence_are_lines_of_one_table() -> None:
    assert found(Sentences(), tokens()) == [(0, [0, 1, 2, 3, 4, 5], 50)]


def test_columns_beyond_the_range_of_a_small_dtype_are_numbered_rightly() -> None:
    """Bytes as tokens: three hundred columns are more than a byte can number."""

    class Bytes(Sentences):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.words(x.long()).mean(1))

    x = randint(50, (40, 300), generator=torch.Generator().manual_seed(5)).byte()
    assert found(Bytes(), x) == [(0, list(range(300)), 50)]


def test_a_token_that_begins_every_sentence_is_left_out() -> None:
    x = tokens()
    x[:, 0] = 7
    assert found(Sentences(), x) == [(0, [1, 2, 3, 4, 5], 50)]


def test_a_mask_is_no_token() -> None:
    mask = (torch.arange(6) < torch.tensor([3, 6]).repeat(20)[:, None]).long()
    x = {"attention_mask": mask.to(tokens().device), "input_ids": tokens()}
    assert found(Sentences(), x) == [(1, [0, 1, 2, 3, 4, 5], 50)]


def test_each_category_has_its_own_table() -> None:
    generator = torch.Generator().manual_seed(1)
    categories = torch.stack([randint(size, (40,), generator=generator) for size in (5, 3, 8)], dim=1)
    x = (randn(40, 3, generator=generator), categories)
    assert sorted(found(Categories(), x)) == [(1, [0], 5), (1, [2], 8)]


def test_a_category_may_be_a_tensor_of_one_dimension() -> None:
    x = randint(5, (40,), generator=torch.Generator().manual_seed(4))
    assert found(nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)), x) == [(0, [0], 9)]


def test_a_column_that_goes_into_two_tables_has_the_lines_of_the_smaller_one() -> None:
    generator = torch.Generator().manual_seed(2)
    x = randint(5, (40, 1), generator=generator).expand(-1, 3)
    assert found(Categories(), (randn(40, 3, generator=generator), x)) == [(1, [0, 1, 2], 5)]


def test_networks_without_tables_and_inputs_without_whole_numbers_have_none() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    class Rounded(Sentences):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((10 * x.abs()).long())

    assert found(Counts(6, 2), tokens()) == []
    assert found(Rounded(), randn(10, 4, generator=torch.Generator().manual_seed(3))) == []


def test_masks_types_and_positions_are_no_words() -> None:
    ids, mask = tokens(), (torch.arange(6) < torch.tensor([3, 6]).repeat(20)[:, None]).long().to(tokens().device)
    ids[:, 5] = mask[:, 5]  # as where one ends a sentence and zero pads it

    class Both(Sentences):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids) * mask[:, :1]

    assert found(Both(), (ids, mask)) == [(0, [0, 1, 2, 3, 4, 5], 50)]
    positions = torch.arange(6, device=ids.device) + torch.arange(40, device=ids.device)[:, None]
    assert found(Sentences(), positions) == []


def test_a_table_that_is_given_nothing_does_no_harm() -> None:
    class Rare(Sentences):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.words(x[x > 1000]).sum()

    assert found(Rare(), tokens()) == [(0, [0, 1, 2, 3, 4, 5], 50)]


def test_a_network_says_whether_it_takes_inputs() -> None:
    network = Network(Sentences().eval())
    assert takes(network, tokens())
    assert not takes(network, tokens() + 30)


def test_the_model_keeps_no_hooks() -> None:
    network = Network(Sentences().eval())
    find_lookups(network, tokens())
    assert not any(part._forward_pre_hooks for part in network.module.modules())
