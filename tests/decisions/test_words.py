"""Strangers with other tokens take lines of the table that no familiar input has, and `calibrate` learns from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions.strangers import strangers
from nullbayes.jacobian.batches import leaves
from nullbayes.jacobian.tables import Lookup
from support.drawing import randint, seeded

WORDS = ["words", "some_words", "repeat"]


def tokens(n: int = 60, length: int = 8, used: int = 10) -> Tensor:
    return randint(used, (n, length), generator=seeded())


def made(x: Any, lines: int = 30, leaf: int = 0, seed: int = 0) -> dict[str, Any]:
    columns = torch.arange(list(leaves(x))[leaf].shape[1])
    return dict(strangers(x, seeded(seed), [Lookup(leaf, columns, lines)]))


def test_new_words_are_lines_that_no_familiar_input_has() -> None:
    x = tokens()
    found = made(x)
    assert set(WORDS) <= set(found)
    assert int(found["words"].min()) >= 10
    assert int(found["words"].max()) < 30
    assert len(found["words"].unique()) == 20
    share = float((found["some_words"] >= 10).double().mean())
    assert 0.2 < share < 0.35  # a quarter, of sentences with one at least
    assert found["words"].dtype == x.dtype


def test_a_table_without_other_lines_gives_no_new_words() -> None:
    assert set(WORDS) & set(made(tokens(), lines=10)) == {"repeat"}


def test_a_repeated_token_is_one_of_the_same_example() -> None:
    x = tokens()
    repeated = made(x)["repeat"]
    assert len(repeated) == len(x)
    assert bool((repeated == repeated[:, :1]).all())
    assert bool((x == repeated[:, :1]).any(1).all())


def test_padding_and_the_ends_of_sentences_stay() -> None:
    mask = (torch.arange(8) < torch.tensor([4, 6, 8]).repeat(20)[:, None]).long()
    ids = tokens() * mask
    x = {"input_ids": ids, "attention_mask": mask}
    ends = (mask == 0) | (torch.arange(8) == 0) | (torch.arange(8) == mask.sum(1, keepdim=True) - 1)
    found = made(x)
    assert torch.equal(found["words"]["attention_mask"], mask)
    assert torch.equal(found["words"]["input_ids"][ends], ids[ends])
    assert int(found["words"]["input_ids"][~ends].min()) >= 10
    repeated = found["repeat"]
    assert not bool((repeated["input_ids"] * (1 - repeated["attention_mask"])).any())


def test_two_categories_are_not_repeated() -> None:
    x = randint(4, (40, 2), generator=seeded())
    found = made(x, lines=9)
    assert "words" in found
    assert "repeat" not in found


def test_a_category_may_be_a_tensor_of_one_dimension() -> None:
    x = randint(4, (40,), generator=seeded())
    found = dict(strangers(x, seeded(), [Lookup(0, torch.tensor([0]), 9)]))
    assert found["words"].shape == (40,)
    assert int(found["words"].min()) >= 4


@pytest.mark.parametrize("padding", [0, None])
@pytest.mark.parametrize("left", [False, True])
def test_padding_without_a_mask_stays(padding: int | None, left: bool) -> None:
    x = 1 + tokens()
    x[torch.arange(8, device=x.device) >= 3 + torch.arange(60, device=x.device)[:, None] % 6] = 0
    x = x.flip(1) if left else x
    found = dict(strangers(x, seeded(), [Lookup(0, torch.arange(8, device=x.device), 30, padding)]))
    for kind in WORDS:
        lengths = [sorted((some != 0).sum(1).tolist()) for some in (found[kind], x)]
        assert len(found[kind]) < len(x) or lengths[0] == lengths[1]
        assert bool(((found[kind] == 0).sum(1) < 6).all())  # no example is all padding


def test_bytes_have_no_lines_beyond_their_range() -> None:
    x = tokens().to(torch.int8)
    assert int(made(x, lines=400)["words"].min()) >= 10


def test_a_word_of_another_column_or_length_is_familiar() -> None:
    x, longer = tokens(), tokens(length=12) + 5  # which has the words 5 to 14
    x[:, 0] = 29  # begins every sentence, and is no column of the lookup
    lookup = [Lookup(0, torch.arange(1, 8, device=x.device), 30)]
    new = dict(strangers(x, seeded(), lookup, [x, longer]))["words"][:, 1:]
    assert set(new.unique().tolist()) == set(range(15, 29))


def test_numbers_that_are_no_lines_of_the_table_stay() -> None:
    x = tokens()
    x[40, 2] = 77
    assert not set(WORDS) & set(made(x))


def test_kinds_are_made_one_after_the_other() -> None:
    """All kinds at once would take many times the memory of the inputs."""
    kinds = strangers(tokens(), generator := seeded(), [Lookup(0, torch.arange(8), 30)])
    next(kinds)
    before = generator.get_state()
    next(kinds)
    assert not torch.equal(generator.get_state(), before)


def test_a_seed_determines_the_new_words() -> None:
    one, same, other = made(tokens())["words"], made(tokens())["words"], made(tokens(), seed=1)["words"]
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.rest = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.words(x).mean(1))


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of twenty words, which knows ten of them: three classes with words of their own."""
    generator = seeded(1)
    y = torch.randint(3, (900,), generator=generator, device="cpu")
    often = torch.rand(3, 10, generator=generator, device="cpu") ** 3 + 0.05
    x = torch.multinomial(often[y], 8, replacement=True, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Bag().cpu()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
            optimizer.step()
    return model.eval(), x, y


@pytest.mark.cpu
def test_a_calibrated_score_tells_words_that_the_network_never_saw(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    posterior = nb.ProjectedPosterior(model).fit(x[:300], y[:300], progress=False, generator=seeded())
    posterior.calibrate(x[300:600], y[300:600])
    assert set(WORDS) <= set(posterior.calibration.strangers)
    one = x[600:].clone()  # a single word is new
    one[:, 3] = torch.randint(10, 20, (300,), generator=seeded(2), device="cpu")
    scores = [posterior.ood_score(some) for some in (x[600:], one)]
    confidence = [posterior.ood_score(some, "max_probability") for some in (x[600:], one)]
    assert nb.metrics.auroc(*scores) > 0.9
    assert nb.metrics.auroc(*confidence) < 0.8


class Biased(Bag):
    """A table with more lines than the network takes: sizes are often rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias[x].mean(1, keepdim=True)


class Packed(nn.Module):
    """A recurrent network that leaves padding out, and refuses an input of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rest = nn.Embedding(30, 6, padding_idx=0), nn.GRU(6, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x), (x != 0).sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        return self.last(self.rest(packed)[1][0])


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [Biased, Packed])
@pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning")
def test_networks_that_do_not_take_every_line_are_calibrated(kind: type[nn.Module]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind().cpu().eval()
    x, y = 1 + tokens(160).cpu(), randint(3, (160,), generator=seeded(5)).cpu()
    x[torch.arange(8) >= 3 + torch.arange(160)[:, None] % 6] = 0
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:80], y[:80], 5, progress=False)
    posterior.calibrate(x[80:], y[80:])
    assert ("words" in posterior.calibration.strangers) == (kind is Packed)
