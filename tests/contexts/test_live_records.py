"""What a context holds: what its rows name, nothing that was dropped, in few files however often it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import build, config_of
from hostile_files import manifest_of
from pairwise import combinations
from saved_contexts import FIELDS, LONG, answer, feed, ids, opened, prefilled, same
from transformers import LlamaForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.contexts import bytes_of
from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.stores import aligned_empty
from hf_offload_cache.testing import open_descriptors


def records_of(cache: Any, columns: slice, row: int) -> list[bytes]:
    """The groups `columns` of one row as they lie on the disk, of every layer."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, OffloadLayer):
            store, named = layer.history.store, layer.history.table.ids[row, columns].astype(np.int64)
            out = aligned_empty(len(named), store.record_bytes)
            store.read(named, out)
            found += [record.numpy().tobytes() for record in out]
    return found


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def records_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.records"))


@pytest.mark.parametrize(("way", "engine"), combinations(["forked", "opened"], ["auto", "memory"]))
def test_a_row_that_was_dropped_is_not_saved(tmp_path: Path, way: str, engine: str) -> None:
    """Though it was frozen before, so that forks, and the context it came from, have it still."""
    both, one = tmp_path / "both", tmp_path / "one"
    with prefilled(rows=2, engine=engine) as cache:
        cache.save(both)
        with opened(both) as other:
            other.batch_select_indices(torch.tensor([0]))
            expected = answer(other)
        twin = cache.fork() if way == "forked" else opened(both, engine=engine)
        kept, gone = (records_of(twin, slice(None), row) for row in (0, 1))
        with twin:
            twin.batch_select_indices(torch.tensor([0]))
            twin.save(one)
            inodes = {(path.stat().st_dev, path.stat().st_ino) for path in both.iterdir()}
            expected_bytes = bytes_of(twin, inodes)
            assert same(answer(twin), expected), "the one that goes on reads on as before"
        assert len(gone) > 100 and all(record in content(both) for record in (gone[0], gone[-1], kept[0]))
        saved = content(one)
        assert all(record in saved for record in kept) and not any(record in saved for record in gone)
        files = [path for path in one.iterdir() if path.suffix != ".json"]
        assert abs(sum(path.stat().st_blocks * 512 for path in files) - expected_bytes) < 0.05 * expected_bytes
        assert records_on_disk(one) < 0.6 * records_on_disk(both)
        with opened(one) as again:
            assert same(answer(again), expected)
        with opened(both, exact=True) as again:
            again.batch_select_indices(torch.tensor([1]))
            assert records_of(again, slice(None), 0) == gone


@pytest.mark.parametrize("key", [None, lambda: bytes(range(32))], ids=["plain", "encrypted"])
def test_what_was_cropped_after_opening_is_not_saved(tmp_path: Path, key: Any) -> None:
    """And what is opened then goes on to the last bit as the cache that was cropped."""
    config = config_of("llama")
    config.max_position_embeddings = 2048
    model = build(LlamaForCausalLM, config)  # without a window, which cannot be cropped
    whole, short = tmp_path / "whole", tmp_path / "short"

    def logits(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(ids(50, seed=2), past_key_values=cache)
            return torch.stack([model(ids(1, seed=seed), past_key_values=cache).logits for seed in range(3)])

    with DiskSwapCache(model, **FIELDS, encryption_key=key) as cache:
        with torch.no_grad():
            model(ids(), past_key_values=cache)
        cache.save(whole)
    with DiskSwapCache.open(whole, model, engine="mapped", encryption_key=key) as cache:
        gone = records_of(cache, slice((LONG - 300) // 8 + 1, None), 0)
        cache.crop(-300)
        cache.save(short)
        expected = logits(cache)
    assert records_on_disk(short) < 0.55 * records_on_disk(whole)
    if key is None:
        assert gone[0] in content(whole) and not any(record in content(short) for record in gone)
    with DiskSwapCache.open(short, model, engine="mapped", encryption_key=key) as cache:
        assert cache.tokens == LONG - 300
        assert torch.equal(logits(cache), expected)


def test_a_conversation_that_is_saved_after_every_turn(tmp_path: Path) -> None:
    """Its descriptors and the context's files stay few, and the answers are those of one that was never saved."""
    target, most = tmp_path / "context", 0
    before = open_descriptors()
    with prefilled() as plain, prefilled(engine="direct") as cache:
        started = open_descriptors()
        for turn in range(30):
            for each in (plain, cache):
                feed(each, ids(11, seed=turn))
            cache.save(target, overwrite=True)
            files = [len(layer["parts"]) for layer in manifest_of(target)["layers"]]
            most = max(most, *files)
            assert open_descriptors() - started <= 2 * 6
        assert most == 4
        expected = answer(plain)
        assert same(answer(cache), expected)
    with opened(target) as cache:
        assert same(answer(cache), expected)
    assert open_descriptors() == before
