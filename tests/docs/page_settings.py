"""What the blocks of some pages find when they run, in the place of what a reader has: a machine to tune, a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from short_tuning import tune_shortly


@dataclass(frozen=True)
class Setting:
    """How a page is changed, and what its blocks have beside what all have."""

    replaced: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def of(self, page: str) -> str:
        """The page, changed. Raises `AssertionError` where it has nothing of the kind."""
        for old, new in self.replaced.items():
            assert old in page, old
            page = page.replace(old, new)
        return page


@contextlib.contextmanager
def as_it_is(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    yield Setting()


@contextlib.contextmanager
def short_tuning(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """What the page tunes for is what the file has then."""
    tune_shortly(patch)
    yield Setting()
    with open("config.json", encoding="utf-8") as file:
        tuned = json.load(file)
    assert [(row["batch"], row["context"]) for row in tuned["rows"]] == [(8, 32768)]
    assert tuned["memory"] == 8 * 32768 * session["model"].config.num_hidden_layers * 2 * 128 * 4 // 13


SETTINGS = {"docs/tuning.md": short_tuning}
"""By page; all others run as they are."""
