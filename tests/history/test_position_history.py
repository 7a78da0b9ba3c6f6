"""A history in the order of the sequence against what came in: blocks up to every token, places, extents, changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import StoreFullError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.history import PositionHistory, RecordFormat
from hf_offload_cache.history.records import block_groups

ROWS, HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM, GROUP, RECENT = 2, 2, 3, 1, 5, 4, 6
FORM = RecordFormat(HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM, torch.float32, GROUP)
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = Storage(OffloadConfig(engine="memory"), None)
    yield storage
    storage.close()


def pair(tokens: int, rows: int = ROWS, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, HEADS, tokens, KEY_DIM, generator=generator),
        torch.randn(rows, VALUE_HEADS, tokens, VALUE_DIM, generator=generator),
    )


def history_of(storage: Storage, both: Pair, *pieces: int, block: int = 16) -> PositionHistory:
    """Given `both` in pieces of these sizes; reads go through blocks of `block` tokens."""
    config = OffloadConfig(engine="memory", num_recent=RECENT, block_tokens=block, group_size=GROUP)
    history = PositionHistory(storage, FORM, both[0].shape[0], torch.device("cpu"), config, "layer 0")
    start = 0
    for piece in pieces or (both[0].shape[2],):
        history.append(*(tensor[:, :, start : start + piece] for tensor in both))
        start += piece
    assert start == both[0].shape[2] == history.length
    return history


def test_blocks_are_longer_on_a_device() -> None:
    """Up to 16,384 tokens, as many as fit 32 MiB; not with a budget, which books less, nor where the user says."""
    form = RecordFormat(3, 64, 3, 64, torch.bfloat16, 16)  # 768 bytes a token

    def tokens(device: str, rows: int, records: int | None = None, **fields: Any) -> int:
        return 16 * block_groups(form, OffloadConfig(**fields), torch.device(device), rows, records)

    assert [tokens("cpu", rows) for rows in (1, 8, 200)] == [1024] * 3
    assert [tokens("cuda", rows) for rows in (1, 8, 200)] == [16384, 4096, 1024]
    assert [tokens("cuda", 1, records) for records in (10, 100, 5000)] == [1024, 1600, 16384]
    assert tokens("cuda", 1, memory="1GiB") == 1024
    assert [tokens("cuda", 1, block_tokens=block) for block in (256, 1024, 40000)] == [256, 1024, 40000]


@pytest.mark.parametrize("pieces", [(61,), (1,) * 61, (30, 1, 1, 7, 22), (5, 56)])
@pytest.mark.parametrize("block", [16, 24, 1024])
def test_blocks_up_to_every_token(storage: Storage, pieces: tuple[int, ...], block: int) -> None:
    """Groups that `stop` cuts, the tail, a stop within it, nothing and all: in order, and no more than a block each."""
    both = pair(61)
    history = history_of(storage, both, *pieces, block=block)
    assert history.units == (61 - RECENT) // GROUP
    for stop in (*range(62), None):
        parts = [(part.keys.clone(), part.values.clone(), part.positions) for part in history.blocks(stop)]
        until = 61 if stop is None else stop
        assert all(positions is None for *_, positions in parts)
        sizes = [keys.shape[2] for keys, *_ in parts]
        assert sum(sizes) == until
        assert all(0 < size <= max(block, RECENT + GROUP) for size in sizes)
        for which, whole in enumerate(both):
            joined = torch.cat([part[which] for part in parts], 2) if parts else whole[:, :, :0]
            assert torch.equal(joined, whole[:, :, :until]), stop
        assert all(torch.equal(got, want[:, :, :until]) for got, want in zip(history.whole(stop), both, strict=True))


def test_where_units_lie(storage: Storage) -> None:
    """Places in the sequence and records, -1 where there is no unit; a record's entries are those of these places."""
    both = pair(40)
    history = history_of(storage, both)
    units = np.array([[0, 3, 7], [5, -1, -1]])
    places = history.positions(units)
    assert places.shape == (ROWS, 3 * GROUP)
    assert places[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 28, 29, 30, 31]
    assert places[1].tolist() == [20, 21, 22, 23] + [-1] * 8
    extents = history.extents(units)
    assert (extents.first, extents.count, extents.unit) == (None, None, None)
    assert (extents.records[1, 1:] == -1).all()
    storage.prefetcher.flush()
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 0)):
        raw = torch.empty(1, FORM.record_bytes, dtype=torch.uint8)
        for records in storage.stream(history.store, extents.records[row, [column]], 1, history.device):
            raw.copy_(records)
        keys, values = FORM.split(FORM.payload(raw).view(1, GROUP, FORM.entry_width))
        own = torch.from_numpy(places[row].reshape(3, GROUP)[column])
        assert torch.equal(keys[0], both[0][row][:, own])
        assert torch.equal(values[0], both[1][row][:, own])
    assert history.extents(np.empty((ROWS, 0), dtype=np.int64)).records.shape == (ROWS, 0)
    assert history.positions(np.empty((ROWS, 0), dtype=np.int64)).shape == (ROWS, 0)


def test_a_store_that_is_full_takes_nothing_in(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    both, more = pair(20), pair(15, seed=1)
    history = history_of(storage, both)
    with monkeypatch.context() as patch:

        def full(count: int) -> np.ndarray:
            raise StoreFullError(28, "no room")

        patch.setattr(history.store, "allocate", full)
        with pytest.raises(StoreFullError):
            history.append(*more)
    assert (history.length, history.units, storage.torn) == (20, 3, False)
    assert torch.equal(history.whole()[1], both[1])
    history.append(*more)
    assert torch.equal(history.whole()[1], torch.cat([both[1], more[1]], 2))
