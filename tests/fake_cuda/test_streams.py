"""Streams of a device run in any order that waits and events allow: a wait that is missing changes values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_device import CUDA, QUEUES, Event, Fake, Stream, fake_cuda, values_of
from torch.utils._device import _device_constructors

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.fetch import Staging, Storage
from hf_offload_cache.fetch import storage as fetch_storage
from hf_offload_cache.fetch.areas import Outgoing
from hf_offload_cache.kernels.on_a_device import to_host
from hf_offload_cache.stores import aligned_empty

SEEDS, RECORD, COUNT, TURNS = range(12), 4096, 6, 6
MANY_SEEDS = range(32)
"""So many orders that a missing wait is seen in one."""


def pattern(turn: int) -> torch.Tensor:
    """Records (COUNT, RECORD) uint8, others in each turn."""
    return torch.randint(0, 200, (COUNT, RECORD), dtype=torch.uint8, generator=torch.Generator().manual_seed(turn))


@contextlib.contextmanager
def storage(folder: Path, device_type: str = "cpu") -> Iterator[Storage]:
    """With a `device_type` of "cuda", records are pinned."""
    made = Storage(OffloadConfig(engine="memory"), folder, device_type)
    try:
        yield made
    finally:
        made.close()


def written(folder: Path) -> list[torch.Tensor]:
    """Records that the device computes and drops, as the writer's thread stores them."""
    with storage(folder) as made:
        store = made.open_store(RECORD, "layer 0")
        ids = [store.allocate(COUNT) for _ in range(TURNS)]
        for turn, new in enumerate(ids):
            records = Fake(pattern(turn)).add(1)
            host, arrived = made.copied_out(records, store)
            del records  # later work of the device may get their memory
            Fake(torch.zeros(1)).add_(1)
            made.prefetcher.write(store, new, host, arrived)
        made.prefetcher.flush(store)
        out = aligned_empty(COUNT * TURNS, RECORD)
        store.read(np.concatenate(ids), out)
    return list(out.sub(1).split(COUNT))


def streamed(folder: Path) -> list[torch.Tensor]:
    """Stored records as they are streamed to the device, which computes with them."""
    with storage(folder) as made:
        store = made.open_store(RECORD, "layer 0")
        ids = store.allocate(COUNT * TURNS)
        store.write(ids, torch.cat([pattern(turn) for turn in range(TURNS)]))
        found = []
        for records in made.stream(store, ids, COUNT, CUDA):
            found.append(records.clone().add_(1).sub_(1))
        return [values_of(one) for one in found]


def streamed_in_place(folder: Path) -> list[torch.Tensor]:
    """Records that the device writes to pinned memory, streamed back from there, twice."""
    with storage(folder, "cuda") as made, mock.patch.object(fetch_storage, "_LEAST_RUN", RECORD):
        store = made.open_store(RECORD, "layer 0")
        ids = store.allocate(COUNT * TURNS)
        for turn in range(TURNS):
            records, new = Fake(pattern(turn)).add(1), ids[turn * COUNT : (turn + 1) * COUNT]
            made.prefetcher.write(store, new, *made.copied_out(records, store, new))
            del records
        found = []
        for _ in range(2):
            found = [records.clone().sub_(1) for records in made.stream(store, ids, COUNT, CUDA)]
        assert not any(buffer._host.numel() for buffer in made.stream_buffers)
        return [values_of(one) for one in found]


def staged(folder: Path) -> list[torch.Tensor]:
    """Records of one area, filled again and again."""
    with storage(folder) as made:
        area = Staging(COUNT * RECORD, CUDA, made.account, "staging")
        found = []
        for turn in range(TURNS):
            area.host_rows(COUNT, RECORD).copy_(pattern(turn))
            found.append(area.upload(COUNT, RECORD).add(1).sub_(1))
        area.release()
        return [values_of(one) for one in found]


def on_the_host(folder: Path) -> list[torch.Tensor]:
    """Tensors that the device computes, brought to the host."""
    return [to_host(Fake(pattern(turn)).add(1))[0].sub(1) for turn in range(TURNS)]


def without(owner: Any, name: str, when: Callable[[Any], bool] = lambda owner: True) -> Any:
    """Drop the calls of a method, of the objects for which `when` holds."""
    original = getattr(owner, name)

    def called(self: Any, *args: Any) -> Any:
        return None if when(self) else original(self, *args)

    return mock.patch.object(owner, name, called)


def is_default(stream: Any) -> bool:
    return stream is stream.queues.default


@contextlib.contextmanager
def without_joins() -> Iterator[None]:
    """And without the writer's wait, which would make records arrive as soon."""
    with without(Outgoing, "join"), without(Event, "synchronize"):
        yield


WAYS = (written, streamed, streamed_in_place, staged, on_the_host)
MISSING: dict[str, tuple[Callable[[Path], list[torch.Tensor]], Callable[[], Any]]] = {
    "a copy out waits for what computes its records": (written, lambda: without(Stream, "wait_stream")),
    "the writer waits for the copy": (written, lambda: without(Event, "synchronize")),
    "freed records wait for the copy": (written, lambda: without(torch.Tensor, "record_stream")),
    "a step waits for what was staged": (staged, lambda: without(Stream, "wait_event", is_default)),
    "host rows wait for the upload": (staged, lambda: without(Staging, "wait_uploaded")),
    "an upload waits for readers": (staged, lambda: without(Staging, "free")),
    "attention waits for its block": (streamed, lambda: without(Stream, "wait_event", is_default)),
    "blocks are read into free host memory": (streamed, lambda: without(Staging, "wait_uploaded")),
    "blocks are copied to free device memory": (streamed, lambda: without(Staging, "free")),
    "records in place arrive before they are streamed": (streamed_in_place, lambda: without_joins()),
    "attention waits for its block in place": (streamed_in_place, lambda: without(Stream, "wait_event", is_default)),
    "blocks in place are copied to free memory": (streamed_in_place, lambda: without(Staging, "free")),
    "the host waits for its copies": (on_the_host, lambda: without(Stream, "synchronize")),
}
"""Each wait of the library: what needs it, and the device without it."""


def is_right(way: Callable[[Path], list[torch.Tensor]], folder: Path) -> bool:
    return all(torch.equal(found, pattern(turn)) for turn, found in enumerate(way(folder)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS)
def test_records_are_right_in_any_order(way: Callable[[Path], list[torch.Tensor]], seed: int, tmp_path: Path) -> None:
    with fake_cuda(seed):
        assert is_right(way, tmp_path)


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_wait_changes_values(what: str, tmp_path: Path) -> None:
    way, broken = MISSING[what]

    def is_seen(seed: int) -> bool:
        with fake_cuda(seed), broken():
            return not is_right(way, tmp_path)

    assert any(map(is_seen, MANY_SEEDS))


def test_tensors_on_meta_have_no_data() -> None:
    """In a `with torch.device("meta")`, also if torch notes its functions while the device's are in their place."""
    _device_constructors.cache_clear()
    for _ in range(2):
        with fake_cuda(0), torch.device("meta"):
            made = [torch.tensor([]), torch.zeros(3), torch.nn.Linear(3, 3)(torch.zeros(2, 3)), torch.zeros(3) + 1]
            made.append(torch.cat(made[:2]))
        assert all(type(one) is torch.Tensor and one.is_meta for one in made)
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


def test_an_error_leaves_no_work() -> None:
    with pytest.raises(ZeroDivisionError), fake_cuda(0):
        QUEUES.default.behind = 1000
        Fake(torch.zeros(1)).add_(1).div_(1 // 0)
    assert QUEUES.random is None and not any(stream.queue for stream in QUEUES.streams)


@pytest.mark.parametrize("kind", ["cpu", "cuda"], ids=["staged", "in place"])
def test_blocks_are_copied_while_the_device_works_on_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a block waits for the work on the latest block in its memory, and for no later work; so does that of
    the next history."""
    monkeypatch.setattr(fetch_storage, "_LEAST_RUN", RECORD)
    with fake_cuda(0), storage(tmp_path, kind) as made, mock.patch.object(QUEUES.random, "random", return_value=1.0):
        store, work = made.open_store(RECORD, "layer 0"), QUEUES.default
        ids = store.allocate(COUNT * TURNS)
        store.write(ids, torch.cat([pattern(turn) for turn in range(TURNS)]))
        work.behind = 1000  # it runs what something waits for

        def is_copied(block: torch.Tensor, turn: int) -> bool:
            QUEUES.advance()
            return torch.equal(block.inner, pattern(turn))

        results, ends = [], []
        for turn, block in enumerate(made.stream(store, ids[: 3 * COUNT], COUNT, CUDA)):
            assert is_copied(block, turn) is (turn < 2)
            results.append(block.add(1))
            ends.append(work.given)
        (other,) = made.stream(store, ids[3 * COUNT : 4 * COUNT], COUNT, CUDA)
        assert work.done < ends[0]
        for end, (free, turn) in zip(ends, ((block, 2), (other, 3)), strict=False):
            assert not is_copied(free, turn)
            work.run(end)
            assert is_copied(free, turn)
        assert work.done < ends[2]
        assert all(torch.equal(values_of(result.sub(1)), pattern(turn)) for turn, result in enumerate(results))


def test_records_in_place_wait_in_no_queue(tmp_path: Path) -> None:
    """More of them than a queue may have are handed over while none has arrived; others count as before."""
    arrives = threading.Event()

    def arrived(event: Event) -> None:
        assert arrives.wait(60)

    with fake_cuda(), storage(tmp_path, "cuda") as made, mock.patch.object(Event, "synchronize", arrived):
        store = made.open_store(RECORD, "layer 0")
        ids = store.allocate(COUNT * TURNS)
        made.limit_writes(COUNT * RECORD)
        arrives.clear()
        for turn in range(TURNS):
            new = ids[turn * COUNT : (turn + 1) * COUNT]
            made.prefetcher.write(store, new, *made.copied_out(Fake(pattern(turn)), store, new))
        assert made.prefetcher.is_queued(store, ids[-1:]) and not made.prefetcher.is_queued(store, ids[:0])
        assert made.account.by_owner["write queue"] == 0
        arrives.set()
        made.prefetcher.flush(store)
        assert not made.prefetcher.is_queued(store, ids)
        out = aligned_empty(COUNT * TURNS, RECORD)
        store.read(ids, out)
        arrives.clear()
        made.prefetcher.write(store, ids[:COUNT], *made.copied_out(Fake(pattern(1)), store))
        assert made.account.by_owner["write queue"] == COUNT * RECORD
        arrives.set()
    assert torch.equal(out, torch.cat([pattern(turn) for turn in range(TURNS)]))
