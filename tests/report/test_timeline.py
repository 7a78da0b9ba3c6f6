"""The trace: a file that is valid JSON, whose spans nest and add up, and that is bounded and cleaned up after."""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL, fresh, generate, prompt, tiny

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.report import NO_TIMELINE, Timeline, Trace
from hf_offload_cache.report import Counters as CacheCounters
from hf_offload_cache.stores import aligned_empty
from hf_offload_cache.testing import LatencyStore

PROMPT, NEW, CHUNK = 640, 8, 160
"""More than the 512 tokens from which there are compact keys to select with; the prompt in chunks of `CHUNK`."""

RECORD = 4096

Event = dict[str, Any]


def sparse(model: Any, trace: Path, **fields: Any) -> DiskSwapCache:
    return DiskSwapCache(model, trace=str(trace), **{**SMALL, "num_selected": 32, "reuse_capacity": 32, **fields})


def spans(events: list[Event], track: str | None = None) -> list[Event]:
    """Complete events, with "begin" and "end" in whole nanoseconds and the name of their line as "track"."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = []
    for event in events:
        if event["ph"] == "X" and (track is None or names[event["tid"]].split(" ")[0] == track):
            begin = round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            found.append({**event, "begin": begin, "end": end, "track": names[event["tid"]]})
    return found


def assert_well_formed(events: list[Event]) -> None:
    """No span is negative, and those of one line nest: each pair is apart, or one lies in the other."""
    lines = defaultdict(list)
    for span in spans(events):
        assert span["dur"] >= 0, span
        lines[span["tid"]].append(span)
    for line in lines.values():
        open_ends: list[int] = []
        for span in sorted(line, key=lambda s: (s["begin"], -s["end"])):
            while open_ends and open_ends[-1] <= span["begin"]:
                open_ends.pop()
            assert not open_ends or span["end"] <= open_ends[-1], span
            open_ends.append(span["end"])


def inside(span: Event, outer: Event) -> bool:
    return outer["begin"] <= span["begin"] and span["end"] <= outer["end"]


# ---------------------------------------------------------------------------------------------- a generation


SLOW = [pytest.param(engine, marks=pytest.mark.slow) for engine in ("direct", "mapped")]


@pytest.fixture(scope="module", params=["auto", "memory", *SLOW])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], Any, int]:
    """The events of a sparse generation, its report, and the bytes that had been read when the first token came."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    model = tiny("llama")
    ids = prompt(model, 2, PROMPT)
    with sparse(model, path, engine=request.param, look_ahead=True) as cache:
        with torch.no_grad():
            for start in range(0, PROMPT, CHUNK):
                model(input_ids=ids[:, start : start + CHUNK], past_key_values=cache)
        before = cache.report()
        with torch.no_grad():
            for _ in range(NEW):
                model(input_ids=ids[:, -1:], past_key_values=cache)
        cache.storage.prefetcher.flush()  # what is written later would be in the trace and not in the report
        report = cache.report()
    assert report.selected_fraction is not None, "the steps were not sparse: the test would prove little"
    return json.loads(path.read_text()), report, before.bytes_read


def test_every_step_layer_and_attention_is_there(traced: tuple[list[Event], Any, int]) -> None:
    events, _, _ = traced
    assert_well_formed(events)
    found = spans(events, "compute")
    assert {span["track"] for span in found} == {"compute"}, "what nests belongs on one line"
    steps = [span for span in found if span["name"] in ("prefill", "decode")]
    assert all(any(inside(span, step) for step in steps) for span in found), "something lies between the steps"
    assert [step["name"] for step in steps] == ["prefill"] * (PROMPT // CHUNK) + ["decode"] * NEW
    assert [step["args"]["history"] for step in steps[:3]] == [0, CHUNK, 2 * CHUNK]
    assert steps[-1]["args"] == {"step": len(steps), "sequences": 2, "tokens": 1, "history": PROMPT + NEW - 1}
    assert [e["name"] for e in events if e["ph"] == "i"] == [f"step {i + 1}" for i in range(len(steps))]
    for step in steps:
        within = [span for span in found if inside(span, step)]
        for name in ("attention", "rest of block"):
            assert [span["args"]["layer"] for span in within if span["name"] == name] == [0, 1, 2], name
        blocks = [span for span in within if span["name"].startswith("layer ")]
        assert [block["name"] for block in blocks] == ["layer 0", "layer 1", "layer 2"]
        for part in within:
            if part["name"] in ("attention", "rest of block"):
                assert inside(part, blocks[part["args"]["layer"]])


def test_ranking_looking_ahead_and_gathering_are_apart(traced: tuple[list[Event], Any, int]) -> None:
    events, _, _ = traced
    found = spans(events, "compute")
    by_name = {name: [span for span in found if span["name"] == name] for name in ("rank", "gather", "look ahead")}
    attention = [span for span in found if span["name"] == "attention"][-3 * NEW :]
    for name in ("rank", "gather"):
        assert [span["args"]["layer"] for span in by_name[name]] == [0, 1, 2] * NEW
        assert all(inside(span, whole) for span, whole in zip(by_name[name], attention, strict=True))
    assert {span["args"]["layer"] for span in by_name["look ahead"]} == {0, 1, 2}
    rests = [span for span in found if span["name"] == "rest of block"]
    for ahead in by_name["look ahead"]:
        assert not any(inside(ahead, span) for span in (*attention, *rests)), "it is not the model's own work"
    waits = [span for span in found if span["name"] == "wait" and "layer" in span.get("args", {})]
    waiting = (*by_name["gather"], *by_name["look ahead"])
    assert waits and all(any(inside(wait, span) for span in waiting) for wait in waits)


def test_what_is_waited_for_is_there(traced: tuple[list[Event], Any, int]) -> None:
    events, report, _ = traced
    waits = [span for span in spans(events, "compute") if span["name"] == "wait"]
    waiting = [span for span in spans(events, "compute") if span["name"] in ("attention", "summarise")]
    assert waits and all(any(inside(wait, span) for span in waiting) for wait in waits)
    seconds = sum(wait["dur"] for wait in waits) / 1e6
    assert seconds >= report.stall_seconds, "a wait that the counters know is not on the timeline"


def test_bytes_are_those_of_the_report(traced: tuple[list[Event], Any, int]) -> None:
    events, report, before = traced
    steps = [span for span in spans(events, "compute") if span["name"] == "decode"]
    reads = [span for span in spans(events, "reads") if span["end"] > steps[0]["begin"]]
    assert reads
    assert sum(read["args"]["bytes"] for read in reads) == report.bytes_read - before > 0
    everything = sum(read["args"]["bytes"] for read in spans(events, "reads"))
    assert everything == report.bytes_read
    assert sum(write["args"]["bytes"] for write in spans(events, "writes")) == report.bytes_written > 0


def test_curves_of_hits_and_memory(traced: tuple[list[Event], Any, int]) -> None:
    events, report, _ = traced
    hits = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "selected units"]
    assert len(hits) == NEW
    assert all(0 <= hit["resident"] <= hit["ready"] <= 1 for hit in hits)
    assert np.mean([hit["resident"] for hit in hits]) == pytest.approx(report.hit_rate, abs=1e-3)
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["name"] == "memory, bytes"]
    assert len(held) == PROMPT // CHUNK + NEW
    last = [span for span in spans(events, "compute") if span["name"] == "decode"][-1]
    queued = sum(w["args"]["bytes"] for w in spans(events, "writes") if w["end"] > last["begin"])
    assert 0 <= held[-1] - report.memory_bytes <= queued, "more than the writes that the report waited for"


def test_the_report_says_how_much_was_overlapped(traced: tuple[list[Event], Any, int]) -> None:
    _, report, _ = traced
    assert 0 < report.decode_stall_seconds < report.stall_seconds
    expected = 1 - report.decode_stall_seconds / report.decode_flight_seconds
    assert report.overlap == pytest.approx(min(1.0, max(0.0, expected)))
    assert "I/O hidden behind compute" in str(report)


def test_tokens_are_those_without_a_trace(tmp_path: Path) -> None:
    model = tiny("llama")
    ids = prompt(model, 1, PROMPT)
    with sparse(model, tmp_path / "trace.json") as cache:
        traced = generate(model, cache, ids, max_new_tokens=NEW)
    with DiskSwapCache(model, **{**SMALL, "num_selected": 32, "reuse_capacity": 32}) as cache:
        assert cache.timeline is NO_TIMELINE
        assert torch.equal(generate(model, cache, ids, max_new_tokens=NEW).tokens, traced.tokens)


# ---------------------------------------------------------------------------------------------- the file's life


def test_a_file_without_its_end_is_the_format_but_for_a_bracket(tmp_path: Path) -> None:
    """What a process that was killed leaves behind."""
    path, model = tmp_path / "trace.json", tiny("llama")
    with sparse(model, path) as cache:
        generate(model, cache, prompt(model), max_new_tokens=4)
        text = path.read_text()
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        steps = [span["name"] for span in spans(json.loads(text + "]"))]
        assert steps.count("prefill") == 1 and steps.count("decode") == 3
    assert len(json.loads(path.read_text())) >= len(json.loads(text + "]"))


def test_a_refused_cache_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    model, there, new = tiny("llama"), tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("an earlier trace")
    for path in (there, new):
        with pytest.raises(ConfigError, match="rank"):
            sparse(model, path, rank=10_000)
    gc.collect()
    assert there.read_text() == "an earlier trace"
    assert list(tmp_path.iterdir()) == [there]
    with sparse(model, there):  # and one that is not refused replaces it, though it does nothing
        pass
    assert json.loads(there.read_text())[0]["name"] == "process_name"


@pytest.mark.parametrize("kind", ["no such folder", "a folder", "a pipe", "a device", "a link", "not ours"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, kind: str) -> None:
    model, path = tiny("llama"), tmp_path / "trace.json"
    if kind == "no such folder":
        path = tmp_path / "missing" / "trace.json"
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path = Path(os.devnull)
    elif kind == "a link":
        (tmp_path / "another's").write_text("precious")
        path.symlink_to(tmp_path / "another's")
    else:
        path.write_text("")
        path.chmod(0o400)
        if os.access(path, os.W_OK):
            pytest.skip("this user may write everything")
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=rf"trace.*{path.name}.*set trace to a file"):
        sparse(model, path)
    assert kind != "a link" or path.read_text() == "precious"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with DiskSwapCache(model, **SMALL) as cache:  # the model is not left with seams that are in the way
        generate(model, cache, prompt(model), max_new_tokens=2)


@pytest.mark.parametrize("mask", [0, 0o777])
@pytest.mark.parametrize("there", [False, True])
def test_a_trace_is_its_owners_whatever_the_umask(tmp_path: Path, mask: int, there: bool) -> None:
    """A file that was there, and that others could read, is closed to them before the first event is in it."""
    model, path = tiny("llama"), tmp_path / "trace.json"
    if there:
        path.write_text("an earlier trace")
        path.chmod(0o666)
    before = os.umask(mask)
    try:
        with sparse(model, path) as cache:
            generate(model, cache, prompt(model), max_new_tokens=2)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert_well_formed(json.loads(path.read_text()))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Whether the cache is closed or forgotten; while it is open, another cache gets another file."""
    model, path = tiny("llama"), tmp_path / "trace.json"
    with DiskSwapCache(model, **SMALL) as cache:  # what a first use keeps for good
        generate(model, cache, prompt(model), max_new_tokens=2)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for how in ("closed", "forgotten"):
        cache = sparse(model, path, path=tmp_path)
        with pytest.raises(ConfigError, match=r"trace.*another cache"):
            sparse(model, path)
        generate(model, cache, prompt(model), max_new_tokens=2)
        account = cache.storage.account
        assert cache.report().memory_by_owner["timeline"] == Trace.HELD_BYTES
        if how == "closed":
            cache.close()
            assert "timeline" not in {owner for owner, held in account.by_owner.items() if held}
        del cache
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
        assert list(tmp_path.iterdir()) == [path]
        assert_well_formed(json.loads(path.read_text()))


def test_a_step_that_raised_is_marked_and_ends_where_it_was_heard_of_last(tmp_path: Path) -> None:
    model, path = fresh("llama"), tmp_path / "trace.json"
    with sparse(model, path) as cache:
        generate(model, cache, prompt(model), max_new_tokens=2)

        def fail(*args: Any) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(input_ids=prompt(model)[:, :1], past_key_values=cache)
        handle.remove()
        time.sleep(0.2)
        cache.reset()
        generate(model, cache, prompt(model), max_new_tokens=2)
    events = json.loads(path.read_text())
    assert_well_formed(events)
    steps = [span for span in spans(events, "compute") if "step" in span.get("args", {})]
    assert [step["args"].get("interrupted", False) for step in steps] == [False, False, True, False, False]
    within = [span["name"] for span in spans(events, "compute") if inside(span, steps[2])]
    assert within[-3:] == ["rest of block", "layer 1", "decode"]
    assert steps[3]["begin"] - steps[2]["end"] >= 0.2e9, "time after the error is not the step's"


def test_a_full_disk_ends_the_trace_and_not_the_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = tiny("llama"), tmp_path / "trace.json"
    write = os.pwrite
    with sparse(model, path, engine="memory") as cache:
        generate(model, cache, prompt(model), max_new_tokens=2)
        size = path.stat().st_size
        descriptor = cache.timeline._fd

        def full(fd: int, data: Any, offset: int) -> int:
            if fd != descriptor or len(data) < 16:
                return write(fd, data, offset)
            if offset > size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data[: len(data) // 2], offset)

        monkeypatch.setattr(os, "pwrite", full)
        cache.reset()
        assert generate(model, cache, prompt(model, 1, 70), max_new_tokens=4).tokens.shape[1] == 74
        assert path.stat().st_size == size, "half of a piece was left"
        assert any("trace" in note and "No space left" in note for note in cache.report().warnings)
    assert cache.timeline.failure is not None
    assert len(spans(json.loads(path.read_text()), "compute")) > 10


# ---------------------------------------------------------------------------------------------- the writer


def test_lines_that_overlap_are_beside_each_other(tmp_path: Path) -> None:
    trace, now = Trace(tmp_path / "trace.json"), time.perf_counter()
    for start, stop in ((0, 3), (1, 4), (3, 5), (2, 6), (6, 7)):
        trace.add("reads", f"{start}-{stop}", now + start, now + stop, bytes=1)
    trace.add("writes", "w", now + 1, now + 2)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert_well_formed(events)
    assert {span["name"]: span["track"] for span in spans(events)} == {
        "0-3": "reads", "1-4": "reads 2", "3-5": "reads", "2-6": "reads 3", "6-7": "reads", "w": "writes",
    }  # fmt: skip


def test_times_and_details(tmp_path: Path) -> None:
    trace, now = Trace(tmp_path / "trace.json"), time.perf_counter()
    trace.add("reads", 'a "name"', now, now + 0.0012345678, bytes=np.int64(7), where=Path("x"), share=np.float32(0.5))
    trace.add("reads", "no number", now + 1, now + 2, share=float("nan"))
    trace.add("reads", "backwards", now + 3, now + 2)
    trace.close()
    first, second, third = spans(json.loads((tmp_path / "trace.json").read_text()))
    assert (first["name"], first["dur"]) == ('a "name"', 1234.568)
    assert first["args"] == {"bytes": 7, "where": "x", "share": 0.5}
    assert second["begin"] - first["begin"] == 10**9
    assert second["args"] == {"share": "nan"}
    assert third["dur"] == 0
    trace = Trace(tmp_path / "raised.json")
    with pytest.raises(OSError), trace.span("outer", 3), trace.span("inner"):
        raise OSError
    trace.close()
    inner, outer = spans(json.loads((tmp_path / "raised.json").read_text()), "compute")
    assert (inner["name"], inner["args"]) == ("inner", {"raised": "OSError"})
    assert (outer["name"], outer["args"]) == ("outer", {"layer": 3, "raised": "OSError"}) and inside(inner, outer)


def test_many_spans_are_written_and_few_are_held(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)

    def tell(count: int) -> None:
        for number in range(count):
            start = time.perf_counter()
            details = {"layer": number, "records": 1000 + number, "bytes": 2**40}
            trace.add("reads", f"records {number}", start, start + 1e-7, **details)

    tell(Trace.MOST_EVENTS)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tell(9 * Trace.MOST_EVENTS)
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert 0 < most <= Trace.HELD_BYTES
    trace.close()
    told = Counter(span["args"]["layer"] for span in spans(json.loads(path.read_text()), "reads"))
    assert told == Counter(range(Trace.MOST_EVENTS)) + Counter(range(9 * Trace.MOST_EVENTS))


def test_a_budget_without_room_for_it(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    fields: dict[str, Any] = {"trace": str(tmp_path / "trace.json"), "engine": "memory"}
    with pytest.raises(BudgetError, match="timeline"):
        Storage(OffloadConfig(memory=Trace.HELD_BYTES - 1, **fields), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    storage = Storage(OffloadConfig(memory=Trace.HELD_BYTES, **fields), tmp_path)
    assert storage.account.by_owner["timeline"] == storage.account.current == Trace.HELD_BYTES
    storage.close()
    assert storage.account.current == 0


def test_any_thread_may_add(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")

    def work(worker: int) -> None:
        for number in range(500):
            start = time.perf_counter()
            trace.add("reads", f"{worker}/{number}", start, time.perf_counter())

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    trace.add("reads", "too late", 0.0, 1.0)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert_well_formed(events)
    names = {span["name"] for span in spans(events, "reads")}
    assert names == {f"{worker}/{number}" for worker in range(4) for number in range(500)}


def test_a_block_with_two_attentions_and_a_step_that_is_not_described(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.begin_step()
    trace.enter_block(0)
    for layer_idx in (0, 1):
        trace.enter_attention(layer_idx)
        trace.leave_attention(layer_idx)
        trace.enter_rest(layer_idx)
    trace.end_step()
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert_well_formed(events)
    names = ["attention", "rest of block", "attention", "rest of block", "layer 0", "step"]
    found = spans(events, "compute")
    assert [span["name"] for span in found] == names
    assert all(before["end"] <= after["begin"] for before, after in pairwise(found[:4]))


def test_a_forked_process_leaves_the_file_alone(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    with trace.span("before"):
        pass
    trace.flush()
    child = os.fork()
    if child == 0:
        for _ in range(100):
            trace.add("reads", "of the child", 0.0, 1.0)
        trace.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with trace.span("after"):
        pass
    trace.close()
    assert [span["name"] for span in spans(json.loads((tmp_path / "trace.json").read_text()))] == ["before", "after"]


def test_without_a_trace_nothing_is_made() -> None:
    assert NO_TIMELINE.span("rank", 3) is NO_TIMELINE.span("gather")
    assert not NO_TIMELINE.on and Trace.on
    told = [name for name, value in vars(Timeline).items() if callable(value) and not name.startswith("_")]
    assert set(told) <= set(vars(Trace)), "a verb that the trace does not hear"


# ---------------------------------------------------------------------------------------------- overlap


def test_overlap_of_numbers_by_hand() -> None:
    counters = CacheCounters()
    assert counters.overlap is None
    counters.stall_seconds = 5.0  # of a prefill, which does not count
    counters.end_step(None, 8.0)
    assert (counters.overlap, counters.decode_stall_seconds, counters.decode_steps) == (None, 0.0, 0)
    counters.stall_seconds += 0.25
    counters.end_step(2.0, 9.0)
    assert counters.overlap == 0.75
    counters.end_step(2.0, 10.0)
    assert counters.overlap == 0.875
    assert (counters.decode_stall_seconds, counters.decode_flight_seconds) == (0.25, 2.0)
    assert (counters.decode_steps, counters.decode_seconds) == (2, 4.0)
    counters.stall_seconds += 7.0  # of waits that were no reads
    counters.end_step(8.0, 10.0)
    assert counters.overlap == 0.0


def test_numbers_of_a_device_are_counted_later() -> None:
    """Of several types and sizes."""
    counters, told = CacheCounters(), list[int]()
    counters.lost_later(torch.tensor([0.5, 0.25, 0.0]), 6)
    counters.tell_later(told.append, torch.tensor([2**40, 3]))
    counters.estimated_later(torch.tensor([[0.5], [0.0], [torch.nan]]).log(), torch.zeros(3, 1))
    counters.later(records_read=torch.tensor(2**40 + 1), units_ready=torch.tensor(7))
    assert (counters.lost_millionths, told, counters.records_read, counters.times_lost) == (0, [], 0, 1)
    for _ in range(2):
        counters.fold()
        assert (counters.lost_millionths, told) == (125_000, [2**40 + 3])
        assert (counters.estimated_millionths, counters.times_estimated) == (166_667, 1)
        assert (counters.records_read, counters.units_ready) == (2**40 + 1, 7)


def test_a_reset_begins_anew(tmp_path: Path) -> None:
    storage = Storage(OffloadConfig(engine="memory"), tmp_path)
    try:
        store = storage.open_store(RECORD, "layer 0")
        ids = store.allocate(4)
        store.write(ids, torch.zeros(4, RECORD, dtype=torch.uint8))
        storage.wait_for(storage.prefetcher.read(store, ids, aligned_empty(4, RECORD)))
        assert storage.prefetcher.seconds_in_flight > 0
        storage.reset_counters()
        storage.counters.end_step(1.0, storage.prefetcher.seconds_in_flight)
        assert (storage.counters.decode_flight_seconds, storage.counters.overlap) == (0.0, None)
    finally:
        storage.close()


@pytest.mark.parametrize(("hidden", "advises"), [(True, False), (False, False), (False, True)])
def test_overlap_of_a_read_that_is_hidden_and_of_one_that_is_not(tmp_path: Path, hidden: bool, advises: bool) -> None:
    """A read of 0.4 s that was over when it was asked for, and one that was asked for at once; a quarter is allowed."""
    storage = Storage(OffloadConfig(engine="memory", trace=str(tmp_path / "trace.json")), tmp_path)
    try:
        inner = storage.open_store(RECORD, "layer 0")
        ids = inner.allocate(4)
        inner.write(ids, torch.zeros(4, RECORD, dtype=torch.uint8))
        store = LatencyStore(inner, 0.4, advises=advises)
        ticket = storage.prefetcher.read(store, ids, aligned_empty(4, RECORD))
        while hidden and not ticket.done():
            time.sleep(0.01)
        storage.wait_for(ticket, 0)
        storage.counters.end_step(1.0, storage.prefetcher.seconds_in_flight)
        assert storage.counters.decode_flight_seconds >= 0.4
        overlap = storage.counters.overlap
        assert overlap is not None
        assert overlap > 0.75 if hidden else overlap < 0.25
    finally:
        storage.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    (wait,) = [span for span in spans(events, "compute") if span["name"] == "wait"]
    assert (wait["dur"] < 0.1e6) if hidden else (wait["dur"] > 0.3e6)
    assert sum(span["args"]["bytes"] for span in spans(events, "reads")) == 4 * RECORD
