"""Published contexts of somebody who may change what is served, with every name right: they are loaded or computed,
or raise one of our errors, in bounded memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import long_context
import pytest
import torch
import zstandard
from hostile_files import Verdict, blake_name, change_state, faults, judged, packed, state_of
from lanes_in_order import stream_first
from long_llama import long_model

from hf_offload_cache import stream_context

CONTEXT, MORE, SIZE = 768, 8, 128
MIB = 2**20
PEAK, ROOM = 400 * MIB, 3 * 2**30
"""Memory and address space that any of these contexts, of a few hundred KiB, may take."""


@pytest.fixture(autouse=True)
def streamed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is served comes before anything is computed."""
    stream_first(monkeypatch)


def ids() -> torch.Tensor:
    return torch.randint(5, 199, (1, CONTEXT + MORE), generator=torch.Generator().manual_seed(7))


def published(folder: Path) -> Path:
    options = {"level": "default", "chunk_tokens": SIZE, "active_mass": 0.9}
    long_context.published(folder / "right", folder, tokens=ids()[:, :CONTEXT], **options)
    return folder / "right"


def load(place: Path, folder: Path, told: list[str] | None = None, lost: bool = False) -> None:
    """Load what is published there, compute the rest, and decode; what there was trouble with is in `told`. `lost`:
    some of it is of no use."""
    fields: dict[str, Any] = {"num_selected": 64}
    with stream_context(str(place), long_model(), ids(), path=folder, sparse=True, silence=5, **fields) as cache:
        assert cache.get_seq_length() == CONTEXT
        report = cache.stream_report
        assert report is not None and report.streamed > 0 and (report.lost > 0) == lost, report
        if told is not None:
            told += report.trouble
        with torch.no_grad():
            long_model()(ids()[:, CONTEXT:], past_key_values=cache)
            for token in (5, 7):
                long_model()(torch.tensor([[token]]), past_key_values=cache)


def manifest_of(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "stream.json").read_text())
    return found


def serve(place: Path, manifest: Any) -> None:
    (place / "stream.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


def put(place: Path, data: bytes) -> dict[str, Any]:
    """An object of these bytes, as a manifest names it."""
    (place / blake_name(data)).write_bytes(data)
    return {"name": blake_name(data), "bytes": len(data)}


def object_of(place: Path, entry: dict[str, Any]) -> bytes:
    return (place / entry["name"]).read_bytes()


def copied(right: Path) -> tuple[Path, dict[str, Any]]:
    copy = right.with_name("changed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(right, copy)
    return copy, manifest_of(copy)


def told(found: list[Verdict]) -> str:
    return "\n".join(map(str, found))


def changed_objects(right: Path, folder: Path, count: int, seed: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Fitted state and active blocks, with one leaf changed."""
    for number in range(count):
        place, manifest = copied(right)
        name = ("fitted", "active")[number % 4 == 3]
        with contextlib.suppress(ValueError, OverflowError):
            data, what = change_state(object_of(place, manifest[name]), random.Random(f"{name} {seed} {number}"))
            serve(place, {**manifest, name: put(place, data)})
            yield f"{name} {number}: {what}", functools.partial(load, place, folder)


def test_what_comes_along_with_a_context(tmp_path: Path) -> None:
    """It can be done without: the context is loaded whatever it is."""
    right = published(tmp_path)
    cases = [("as it was published", functools.partial(load, right, tmp_path))]
    found = judged(itertools.chain(cases, changed_objects(right, tmp_path, 16, 1)), ROOM)
    assert len(found) > 12 and {one.kind for one in found} == {"answered"}, told(found)
    assert not faults(found, PEAK), told(faults(found, PEAK))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_much_that_comes_along_with_a_context(seed: int, tmp_path: Path) -> None:
    found = judged(changed_objects(published(tmp_path), tmp_path, 100, seed), ROOM)
    assert {one.kind for one in found} == {"answered"}, told([one for one in found if one.kind != "answered"])
    assert not faults(found, PEAK), told(faults(found, PEAK))


def test_active_blocks_that_would_take_memory_are_told(tmp_path: Path) -> None:
    """One tensor for all layers, and blocks of one token each."""
    right, tree = published(tmp_path), {"dict": [["block", 1], ["layers", {"dict": []}]]}
    bits = {"0": torch.zeros(2, CONTEXT, -(-CONTEXT // 8), dtype=torch.uint8)}
    tree["dict"][1][1] = {"dict": [[layer, {"tensor": "0"}] for layer in range(3)]}
    for data, message in (
        (packed(bits, tree), "KeyError"),
        (packed(bits, {"dict": [["block", 1], ["layers", {"dict": [[0, {"tensor": "0"}]]}]]}), "blocks of 1 tokens"),
    ):
        place, manifest = copied(right)
        serve(place, {**manifest, "active": put(place, data)})
        trouble: list[str] = []
        load(place, tmp_path, trouble)
        assert any("active blocks" in line and message in line for line in trouble), trouble


def test_cells_that_are_not_what_they_say(tmp_path: Path) -> None:
    """Their bytes are named by their digest: what they hold is wrong all the same. What is lost is computed."""
    right = published(tmp_path)

    def cells(change: Callable[[bytes], bytes]) -> Callable[[], object]:
        place, manifest = copied(right)
        rows = manifest["cells"]
        rows[1] = [cell and put(place, change(object_of(place, cell))) for cell in rows[1]]
        serve(place, manifest)
        return functools.partial(load, place, tmp_path, lost=True)

    def bomb(data: bytes) -> bytes:  # as many bytes as the header says, and a GiB behind them
        size = int.from_bytes(data[24:32], "little")
        whole = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**28))
        return data[:32] + zstandard.ZstdCompressor().compress(bytes(size)) + whole * 4

    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "cut off", cells(lambda data: data[:40])
        yield "no header", cells(lambda data: bytes(32) + data[32:])
        yield "more heads", cells(lambda data: data[:8] + (2**30).to_bytes(4, "little") + data[12:])
        yield "more bytes", cells(lambda data: data[:24] + (2**40).to_bytes(8, "little") + data[32:])
        yield "a bomb", cells(bomb)
        yield "noise", cells(lambda data: data[:32] + random.Random(3).randbytes(len(data) - 32))

    found = judged(cases(), ROOM)
    assert {one.kind for one in found} == {"answered"}, told(found)
    assert not faults(found, PEAK), told(faults(found, PEAK))


def test_manifests_that_say_too_much(tmp_path: Path) -> None:
    right = published(tmp_path)
    _, said = copied(right)
    text = json.dumps(said)

    def saying(manifest: Any) -> Callable[[], object]:
        def run() -> None:
            place, _ = copied(right)
            serve(place, manifest)
            load(place, tmp_path)

        return run

    wrong: dict[str, Any] = {
        "nested": text.replace('"cells": [[', '"cells": [[' + "[" * 10**6),
        "deep fields": {**said, "config": json.loads("[" * 900 + "]" * 900)},
        "empty rows": text.replace('"cells": [[', '"cells": [' + "[]," * 5 * 10**6 + "["),
        "empty cells": {**said, "cells": [[None] * 3 * 10**6]},
        "larger than is read": text + " " * (17 * MIB),
        "many layers": {**said, "layers": 2**23, "cells": [[None] * 5000] * len(said["cells"])},
        "wide heads": {**said, "heads": 2**20, "key_dim": 2**20},
        "many tokens": {**said, "tokens": 2**39},
        "escapes": {**said, "\x1b[2J" * 1000: 1},
        "a level with escapes": {**said, "level": "\x1b[2J"},
    }
    found = judged([(name, saying(manifest)) for name, manifest in wrong.items()], ROOM)
    assert [one.kind for one in found] == ["refused"] * len(wrong), told(found)
    assert all(one.text.isprintable() for one in found), told(found)
    assert not faults(found, PEAK), told(faults(found, PEAK))


def test_a_state_is_read_back_as_it_was_published(tmp_path: Path) -> None:
    """Else the changes above would be of something else."""
    right = published(tmp_path)
    data = object_of(right, manifest_of(right)["fitted"])
    assert packed(*state_of(data)) == data
