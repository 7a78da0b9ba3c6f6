"""Several caches and one context: each answers what it answers alone, whatever becomes of the context's name."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from background import in_threads
from harness import SMALL, Decoded, prompt, tiny
from saved_contexts import LONG, answer, feed, files_of, ids, opened, same

from hf_offload_cache import ContextLibrary, DiskSwapCache
from hf_offload_cache.contexts import entries, remove, total_bytes
from hf_offload_cache.errors import ContextError, CorruptRecordError

FIELDS = ({"exact": True}, {"engine": "auto"})
"""What two readers open it with: all is read in every step, or what is selected."""


@pytest.fixture
def context(saved_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_once, tmp_path / "context"))


def goes_on(cache: Any, seed: int, steps: int = 4) -> Decoded:
    feed(cache, ids(11, seed))
    return answer(cache, steps)


@pytest.fixture
def readers(context: Path) -> Any:
    """Two, and whether each answers what it answers alone."""
    alone = []
    for fields in FIELDS:
        with opened(context, **fields) as cache:
            alone.append(goes_on(cache, 11))
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(opened(context, **fields)) for fields in FIELDS]
        yield found, lambda: all(same(goes_on(one, 11), own) for one, own in zip(found, alone, strict=True))


@pytest.mark.parametrize("then", ["overwritten", "removed", "replaced and removed"])
def test_who_has_it_open_goes_on(readers: Any, context: Path, then: str) -> None:
    if then != "removed":
        with opened(context) as writer:
            goes_on(writer, 31, 2)
            for _ in range(3):
                writer.save(context, overwrite=True)
    if then != "overwritten":
        remove(context)
    assert readers[1]()
    if then == "overwritten":
        with opened(context) as cache:
            assert cache.tokens == LONG + 11 + 2
        assert set(os.listdir(context)) == set(files_of(context).values())
    else:
        with pytest.raises(ContextError, match="no context"):
            opened(context)
        assert os.listdir(context.parent) == []


def test_who_has_wiped_records_open_is_told(readers: Any, context: Path) -> None:
    """Nobody answers from random bytes. Records that a copy shares are left as they are."""
    copy = context.parent / "copy"
    with opened(context) as cache:
        cache.save(copy)
    assert remove(context, wipe=True) >= 0 and readers[1]()
    remove(copy, wipe=True)
    for reader in readers[0]:
        with pytest.raises(CorruptRecordError, match=r"layer \d"):
            for seed in range(50):  # a sparse one looks elsewhere sooner or later
                goes_on(reader, 70 + seed)
    assert os.listdir(context.parent) == []


def test_three_save_into_one_place(context: Path) -> None:
    """Again and again, at the same time: what is there is what one of them holds, every time."""
    target = context.parent / "target"
    with contextlib.ExitStack() as stack:
        caches = [stack.enter_context(opened(context)) for _ in range(3)]
        for number, cache in enumerate(caches):
            goes_on(cache, 50 + number, 1 + number)
        for _ in range(4):
            saves = (lambda cache=cache: [cache.save(target, overwrite=True) for _ in range(3)] for cache in caches)
            in_threads(*saves)
            with opened(target) as cache:
                assert any(torch.equal(cache.input_ids, own.input_ids) for own in caches)
                goes_on(cache, 60, 1)
            assert set(os.listdir(target)) == set(files_of(target).values())
            assert entries(context.parent) == [context, target]
            assert sorted(os.listdir(context.parent)) == ["context", "target"]


def test_two_save_into_one_library(tmp_path: Path) -> None:
    """Both save and evict, the same contexts too: no error, no rest, and the cap holds when both are done."""
    model, place = tiny("llama"), tmp_path / "library"

    def keep(own: int) -> None:
        contexts = ContextLibrary(place, max_bytes=400_000)
        for turn in range(10):
            tokens = prompt(model, 1, 10 + turn % 5, seed=turn if turn % 2 else 100 * own + turn)
            with DiskSwapCache(model, engine="mapped", **SMALL) as cache, torch.no_grad():
                model(tokens, past_key_values=cache)
                contexts.save(cache)
            found = contexts.open(torch.cat([tokens, tokens], 1), model, engine="mapped")
            if found is not None:
                found[0].close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        in_threads(lambda: keep(1), lambda: keep(2))
    said = [str(warning.message) for warning in told]
    assert [message for message in said if "passed over" in message or "damaged" in message] == []
    found = ContextLibrary(place).entries()
    assert {path.name for path in place.glob("[!.]*")} == {entry.name for entry in found}
    assert 0 < total_bytes(found) <= 400_000 and [entry.damage for entry in found] == [None] * len(found)
