"""Streams of a device run in any order that waits and events allow: a wait that is missing changes values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_device import CUDA, QUEUES, Event, Fake, Stream, fake_cuda, on_the_device, values_of
from harness import COMMON, build, prompt
from torch.utils._device import _device_constructors
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.fetch import Staging, Storage
from hf_offload_cache.fetch import storage as fetch_storage
from hf_offload_cache.fetch.areas import PLACE_BYTES, Outgoing
from hf_offload_cache.kernels.on_a_device import to_host, to_host_later
from hf_offload_cache.methods.spec import ChosenEntries
from hf_offload_cache.registry import CACHES, cache_class
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
    """Stored records as they are streamed to the device, which computes with them; through the host's memory."""
    with storage(folder) as made, mock.patch.object(fetch_storage, "has_step", return_value=False):
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


def streamed_by_a_kernel(folder: Path) -> list[torch.Tensor]:
    """As `streamed_in_place`, of records that do not follow each other."""
    with storage(folder, "cuda") as made:
        store = made.open_store(RECORD, "layer 0")
        ids, found = store.allocate(COUNT * TURNS), list[torch.Tensor]()
        for turn in range(TURNS):
            records, new = Fake(pattern(turn)).add(1), ids[turn * COUNT : (turn + 1) * COUNT]
            made.prefetcher.write(store, new, *made.copied_out(records, store, new))
            del records
        for _ in range(2):
            made.account.reset_peaks()
            scattered = ids.reshape(TURNS, COUNT)[:, ::-1].flatten()
            found = [records.flip(0).sub_(1) for records in made.stream(store, scattered, COUNT, CUDA)]
        assert made.account.peak == COUNT * (2 * RECORD + PLACE_BYTES)
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


def on_the_host_later(folder: Path) -> list[torch.Tensor]:
    """As `on_the_host`, all asked for before the first is waited for."""
    asked = [to_host_later(Fake(pattern(turn)).add(1)) for turn in range(TURNS)]
    return [arrived().sub(1) for arrived in asked]


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


WAYS = (written, streamed, streamed_in_place, streamed_by_a_kernel, staged, on_the_host, on_the_host_later)
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
    "records arrive before a kernel reads them": (streamed_by_a_kernel, lambda: without_joins()),
    "attention waits for the kernel": (streamed_by_a_kernel, lambda: without(Stream, "wait_event", is_default)),
    "a kernel reads into free memory": (streamed_by_a_kernel, lambda: without(Staging, "free")),
    "what is asked for is waited for": (on_the_host_later, lambda: without(Event, "synchronize")),
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


# Steps of each cache

PROMPTS, STEPS = {"disk-swap": 560, "cluster": 360, "abstract-tree": 360, "spec": 360}, 6
"""Tokens of prompts, with which each cache selects."""
CHOOSES: dict[str, dict[str, Any]] = {
    "disk-swap": {"num_selected": 496, "group_size": 4, "reuse_capacity": 0},
    "cluster": {"num_selected": 64, "reuse_capacity": 0},
    "abstract-tree": {
        "num_selected": 64, "reuse_capacity": 0, "chunk_size": 16, "dense_layers": 0, "early_steps": 0,
    },
    "spec": {"num_selected": 20, "num_recent": 32, "quant_group": 32},
}  # fmt: skip
"""Fields with which a step of so short a context reads records; with `DiskSwapCache` also those that a step sealed."""


def steps(
    name: str, seed: int | None, broken: Callable[[], Any] = contextlib.nullcontext, pieces: int = 2
) -> torch.Tensor:
    """Logits of a prompt in pieces and of steps after it, of a device without a wait."""
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "num_hidden_layers": 2}))
    first = PROMPTS[name]
    ids, sizes = prompt(model, 1, first + STEPS), {"max_context": first + 64, "max_batch": 1, "engine": "memory"}
    with on_the_device(model, seed) as (there, _), broken(), torch.no_grad():
        with cache_class(name)(there, **sizes, **CHOOSES[name]) as cache:
            logits = [
                there(Fake(part), past_key_values=cache, logits_to_keep=1).logits
                for part in ids.split([*[first // pieces] * pieces, *[1] * STEPS], 1)
            ]
            assert cache.report().bytes_read and all(layer.on_device or name == "spec" for layer in cache.selective)
            sealed = [layer.history.units * layer.history.form.group_size for layer in cache.selective]
            assert name != "disk-swap" or min(sealed) > first - cache.config.num_recent
            assert name == "spec" or all(layer.device_slots is not None for layer in cache.selective)
        return torch.cat([values_of(one) for one in logits], 1)


@functools.cache
def in_order(name: str, pieces: int = 2) -> torch.Tensor:
    return steps(name, None, pieces=pieces)


@contextlib.contextmanager
def without_catching_up() -> Iterator[None]:
    with without(Storage, "catch_up"), without(Event, "synchronize"):
        yield


def of_reads(stream: Any) -> bool:
    """Whether it is the stream that reads entries for a later step."""
    return stream in READING


READING: set[Any] = set()


@contextlib.contextmanager
def reading_at_once() -> Iterator[None]:
    """The stream that reads for later steps waits for nothing."""
    original = Storage.reading_stream

    def noted(self: Storage, device: torch.device) -> Any:
        READING.add(stream := original(self, device))
        return stream

    with mock.patch.object(Storage, "reading_stream", noted), without(Stream, "wait_stream", of_reads):
        yield
    READING.clear()


@contextlib.contextmanager
def without_joins_of_copies() -> Iterator[None]:
    """What is streamed, to a piece of a prompt or to a fit, does not wait for records in place; a step does."""
    original = Outgoing.join

    def joined(self: Outgoing, stream: Any) -> None:
        if is_default(stream):
            original(self, stream)

    with mock.patch.object(Outgoing, "join", joined), without(Event, "synchronize"):
        yield


OF_STEPS: dict[str, Callable[[], Any]] = {
    **{f"{name}: a step waits for records that were written": without_catching_up for name in CACHES},
    "disk-swap: a second piece waits for records that were written": without_joins_of_copies,
    "spec: reads wait for what chooses them": reading_at_once,
    "spec: a step waits for entries that were read ahead": lambda: without(ChosenEntries, "join"),
    "spec: freed choices wait for their read": lambda: without(torch.Tensor, "record_stream"),
}
"""The waits that steps of each cache need, and the device without them."""


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize("name", CACHES)
def test_steps_are_the_same_in_any_order(name: str, seed: int) -> None:
    """To the last bit."""
    assert torch.equal(steps(name, seed), in_order(name))


@pytest.mark.parametrize("what", OF_STEPS)
def test_a_wait_that_a_step_lacks_changes_logits(what: str) -> None:
    name, pieces = what.partition(":")[0], 1 if "a step waits for records" in what else 2  # which waits for them, too
    found = (steps(name, seed, OF_STEPS[what], pieces) for seed in MANY_SEEDS)
    assert not all(torch.equal(one, in_order(name, pieces)) for one in found)


def turns(name: str, modes: str) -> torch.Tensor:
    """Logits of a prompt in two pieces, steps, and after a crop of a second turn and steps; each part in the mode of
    the next letter of `modes`, again and again: inference mode or no_grad."""
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "num_hidden_layers": 2}))
    first = PROMPTS[name]
    ids, sizes = prompt(model, 1, first + 50), {"max_context": first + 64, "max_batch": 1, "engine": "memory"}
    parts, end, logits = [first // 2] * 2 + [1] * STEPS + [-STEPS // 2] + [38, 1, 1, 1], 0, []
    with on_the_device(model) as (there, _), cache_class(name)(there, **sizes, **CHOOSES[name]) as cache:
        for part, mode in zip(parts, itertools.cycle(modes), strict=False):
            with torch.inference_mode() if mode == "i" else torch.no_grad():
                if part < 0:
                    cache.crop(part)
                else:
                    given = Fake(ids[:, end : end + part])
                    logits.append(values_of(there(given, past_key_values=cache, logits_to_keep=1).logits))
                    end += part
        return torch.cat(logits, 1)


@pytest.mark.parametrize("name", CACHES)
def test_inference_mode_changes_nothing(name: str) -> None:
    """Each kind of part runs in it, and some follow a part in the other mode."""
    assert torch.equal(turns(name, "iini"), turns(name, "n"))


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
    at_once: dict[str, Any] = {"random": lambda: 1.0, "choice": lambda _: 0}
    with fake_cuda(0), mock.patch.multiple(QUEUES.random, **at_once), storage(tmp_path, kind) as made:
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
        far = made.open_store(RECORD, "layer 1")
        ends = far.allocate(3)
        made.prefetcher.write(far, ends[::2], *made.copied_out(Fake(pattern(0)[:2]), far))
        assert made.prefetcher.is_queued(far, ends[1:]) and not made.prefetcher.is_queued(far, ends[1:2])
        arrives.set()
        made.prefetcher.flush()
        assert not made.prefetcher.is_queued(store, ids)
        out = aligned_empty(COUNT * TURNS, RECORD)
        store.read(ids, out)
        arrives.clear()
        made.prefetcher.write(store, ids[:COUNT], *made.copied_out(Fake(pattern(1)), store))
        assert made.account.by_owner["write queue"] == COUNT * RECORD
        arrives.set()
    assert torch.equal(out, torch.cat([pattern(turn) for turn in range(TURNS)]))
