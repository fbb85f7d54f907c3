"""What is refused says what to change, and the page for users says what the tests say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from nullbayes.errors import DataError, LikelihoodError, ModelError
from support.compatibility_page import FILE, document
from support.compatibility_table import CASES, REFUSED

ADVICE = re.compile(r"use|pass|set|call|leave|say|make|train|move|clean|restrict|bring", flags=re.IGNORECASE)


@pytest.mark.parametrize("attempt", REFUSED.values(), ids=REFUSED)
def test_refusal_says_what_to_change(attempt: Callable[[], Any]) -> None:
    with pytest.raises((ModelError, DataError, LikelihoodError)) as refused:
        attempt()
    first, *rest = re.split(r": |\. ", str(refused.value))
    assert rest, first
    assert ADVICE.search(" ".join(rest))


def test_names_in_the_table_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.cpu
def test_page_is_written_from_the_table() -> None:
    assert FILE.read_text() == document(), "make docs"
