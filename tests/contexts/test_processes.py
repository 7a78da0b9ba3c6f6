"""Several processes and one context: each answers what it answers alone, whatever becomes of the context's name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import context_process
import pytest
from context_process import Other, digest
from saved_contexts import files_of, opened, prefilled

from hf_offload_cache import ContextLibrary
from hf_offload_cache.contexts import entries, remove, total_bytes
from hf_offload_cache.errors import ContextError

STEPS = 6
FIELDS = ({"exact": True}, {"engine": "auto"})
"""What two readers open it with: all is read in every step, or what is selected."""


@pytest.fixture(scope="module")
def others() -> Iterator[list[Other]]:
    """Three processes, for all tests."""
    with context_process.others(3) as found:
        yield found


@pytest.fixture
def context(tmp_path: Path) -> Path:
    with prefilled() as cache:
        cache.save(tmp_path / "context")
    return tmp_path / "context"


def alone(context: Path, seeds: tuple[int, int], steps: int = STEPS) -> list[str]:
    """What each of `FIELDS` answers in this process, to each seed."""
    found = []
    for fields, seed in zip(FIELDS, seeds, strict=True):
        with opened(context, **fields) as cache:
            found.append(digest(cache, seed, steps))
    return found


def begin_decoding(readers: list[Other], seeds: tuple[int, int], steps: int = STEPS) -> None:
    for reader, seed in zip(readers, seeds, strict=True):
        reader.begin("decode", seed, steps)


@pytest.mark.parametrize("then", ["nothing", "overwritten", "removed", "replaced and removed"])
def test_who_has_it_open_goes_on(others: list[Other], context: Path, then: str) -> None:
    *readers, writer = others
    expected, later = alone(context, (11, 12)), alone(context, (21, 22))
    files = {path.name: path.read_bytes() for path in context.iterdir()}
    for reader, fields in zip(readers, FIELDS, strict=True):
        reader.ask("open", str(context), fields)
    begin_decoding(readers, (11, 12))
    if then in ("overwritten", "replaced and removed"):
        writer.ask("open", str(context), {})
        writer.ask("decode", 31, 2)
        writer.ask("save", str(context), 3)
        writer.ask("close")
    if then in ("removed", "replaced and removed"):
        writer.ask("remove", str(context), False)
    assert [reader.end() for reader in readers] == expected
    if then == "nothing":
        assert {path.name: path.read_bytes() for path in context.iterdir()} == files
    elif then == "overwritten":
        with opened(context) as cache:
            assert cache.input_ids.shape[1] == 600 + 11 + 2
            assert set(os.listdir(context)) == set(files_of(context).values())
    else:
        with pytest.raises(ContextError, match="no context"):
            opened(context)
        assert os.listdir(context.parent) == []
    for reader in readers:  # and on, when the name has long gone
        reader.ask("decode", 41, 1)
        reader.ask("close")
    if then == "nothing":
        assert alone(context, (21, 22)) == later


def test_a_reader_saves_what_has_lost_its_name(others: list[Other], context: Path) -> None:
    """No other name leads to the records: they are copied, not linked."""
    reader, target = others[0], context.parent / "again"
    expected = alone(context, (11, 12))
    reader.ask("open", str(context), FIELDS[1])
    remove(context)
    reader.ask("save", str(target), 1)
    reader.ask("close")
    assert alone(target, (11, 12)) == expected


def test_who_has_wiped_records_open_is_told(others: list[Other], context: Path) -> None:
    """Nobody answers from random bytes; and nobody dies of it."""
    expected = alone(context, (11, 12))
    for reader, fields in zip(others, FIELDS, strict=False):
        reader.ask("open", str(context), fields)
    copy = context.parent / "copy"
    others[2].ask("open", str(context), {})
    others[2].ask("save", str(copy), 1)  # shares its records, which a wipe then leaves as they are
    others[2].ask("close")
    assert others[2].ask("remove", str(context), True) >= 0
    for reader, seed, reply in zip(others, (11, 12), expected, strict=False):
        assert reader.ask("decode", seed, STEPS) == reply
    others[2].ask("remove", str(copy), True)
    for reader in others[:2]:
        with pytest.raises(RuntimeError, match=r"CorruptRecordError.*layer \d"):
            for seed in range(50):  # a sparse one looks elsewhere sooner or later
                reader.ask("decode", 70 + seed, 4)
        reader.ask("close")
    assert os.listdir(context.parent) == []


def test_two_save_into_one_place(others: list[Other], context: Path) -> None:
    """Again and again, at the same time: what is there is what one of them holds, every time."""
    target = context.parent / "target"
    for number, other in enumerate(others):
        other.ask("open", str(context), {})
        other.ask("decode", 50 + number, 1 + number)
    for _ in range(4):
        for other in others:
            other.begin("save", str(target), 3)
        held = {other.end() for other in others}
        assert len(held) == 3
        with opened(target) as cache:
            assert hashlib.sha256(cache.input_ids.numpy().tobytes()).hexdigest() in held
            digest(cache, 60, 2)
        assert set(os.listdir(target)) == set(files_of(target).values())
        assert entries(context.parent) == [context, target]
        assert sorted(os.listdir(context.parent)) == ["context", "target"]
    for other in others:
        other.ask("close")


def test_two_save_into_one_library(others: list[Other], tmp_path: Path) -> None:
    """Both save and evict, the same contexts too: no error, no rest, and the cap holds when both are done."""
    for own, other in enumerate(others[:2]):
        other.begin("keep", str(tmp_path / "library"), 400_000, 1 + own)
    for other in others[:2]:
        told = other.end()
        assert [message for message in told if "passed over" in message or "damaged" in message] == []
    found = ContextLibrary(tmp_path / "library").entries()
    assert {path.name for path in (tmp_path / "library").iterdir()} == {entry.name for entry in found}
    assert 0 < total_bytes(found) <= 400_000
    assert [entry.damage for entry in found] == [None] * len(found)


def test_opening_while_others_save(others: list[Other], context: Path) -> None:
    """Whoever opens gets one context or the other, and reads all of it."""
    target = context.parent / "target"
    lengths = set()
    for number, other in enumerate(others[:2]):
        other.ask("open", str(context), {})
        other.ask("decode", 50 + number, 1 + number)
        lengths.add(600 + 11 + 1 + number)
        other.ask("save", str(target), 1)
        other.begin("save", str(target), 12)
    for _ in range(8):
        with opened(target, exact=True) as cache:
            assert cache.input_ids.shape[1] in lengths
            digest(cache, 60, 1)
    for other in others[:2]:
        other.end()
        other.ask("close")
    assert sorted(os.listdir(context.parent)) == ["context", "target"]
