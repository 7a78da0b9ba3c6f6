"""The throttle's arithmetic with a clock of the test's own, and the throttled store against the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairwise import combinations

from eval.profiles import PROFILES
from hf_offload_cache.stores import FreezableStore, MemoryStore, aligned_empty, choose_engine, open_store, probe_direct
from hf_offload_cache.testing import DeviceClock, FreezableStoreTests, ThrottledStore, fill, read


class Time:
    """Seconds that pass only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def clock_of(time: Time, rate: float, latency: float, depth: int) -> DeviceClock:
    return DeviceClock(rate, latency, depth, now=time, sleep=time.sleep)


class TestThrottledFile(FreezableStoreTests):
    """The engine that "auto" takes here."""

    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        engine = choose_engine("auto", directory)[0]
        return ThrottledStore(open_store(engine, directory, record_bytes, "layer 3"), DeviceClock(1e12, 0.0, 8))


@pytest.mark.parametrize(
    ("rate", "depth", "sizes", "seconds"),
    [
        (1000.0, 4, [2000], 0.5 + 2.0),
        (1e15, 4, [1] * 12, 3 * 0.5),  # latencies pass beside each other up to the depth
        (1e15, 1, [1] * 12, 12 * 0.5),
        (1000.0, 4, [1000] * 12, 0.5 + 12.0),  # bytes do not: the first latency is the only one seen
    ],
)
def test_requests_take_their_latencies_and_bytes(rate: float, depth: int, sizes: list[int], seconds: float) -> None:
    assert clock_of(Time(), rate, 0.5, depth).book(sizes) == pytest.approx(100 + seconds)


def test_later_requests_wait_for_earlier_ones() -> None:
    time = Time()
    clock = clock_of(time, 1000.0, 0.0, 1)
    assert clock.book([1000]) == pytest.approx(101.0)
    assert clock.book([500]) == pytest.approx(101.5)
    time.now = 200.0
    assert clock.book([500]) == pytest.approx(200.5)
    assert clock.book([]) == 200.0, "nothing to read takes no time"


def test_a_read_sleeps_for_what_is_left_of_its_time() -> None:
    """Five records in three runs are three requests; two stores on one clock are one device."""
    time = Time()
    clock = clock_of(time, 4096.0, 10.0, 1)
    one, other = (ThrottledStore(MemoryStore(4096, name), clock) for name in ("layer 0", "layer 1"))
    ids, records = fill(one, 8)
    assert time.slept == [], "writes are not slowed"
    assert torch.equal(read(one, ids[[0, 1, 3, 4, 7]]), records[[0, 1, 3, 4, 7]])
    assert time.slept == pytest.approx([3 * 10 + 5])
    clock.book([4096])
    others, _ = fill(other, 1)
    read(other, others)
    assert time.slept[1:] == pytest.approx([2 * 11])
    assert (one.reads, one.bytes_read) == (3, 5 * 4096) == (one.inner.reads, one.inner.bytes_read)
    one.reads = one.bytes_read = 0
    assert (one.reads, one.inner.bytes_read) == (0, 0)


def test_a_started_transfer_is_done_when_its_time_has_come(tmp_path: Path) -> None:
    """The bytes may be there long before. A store that can only block is left to other threads."""
    time = Time()
    time.now = 1e9  # later than any machine's clock
    store = ThrottledStore(open_store("mapped", tmp_path, 4096, "layer 3"), clock_of(time, 4096.0, 0.0, 1))
    ids, records = fill(store, 3)
    out = aligned_empty(3, 4096)
    transfer = store.start(ids, out)
    assert transfer is not None and not transfer.done()
    transfer.finish()
    assert time.slept == [3.0] and transfer.done()
    assert transfer.finished_at == 1e9 + 3
    assert torch.equal(out, records)
    transfer.finish()
    assert len(time.slept) == 1
    store.close()
    if probe_direct(tmp_path)[0]:
        direct = ThrottledStore(open_store("direct", tmp_path, 4096, "layer 3"), store.clock)
        assert direct.start(fill(direct, 1)[0], out[:1]) is None
        direct.close()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 0.1, 1), "bytes_per_second"), ((1e6, -1, 1), "seconds_per_request"), ((1e6, 0.1, 0), "queue_depth")],
)
def test_clocks_that_cannot_be(arguments: tuple, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DeviceClock(*arguments)


@pytest.mark.parametrize(("name", "size"), combinations(["emmc", "ufs", "sd"], [512, 4096, 16384, 1 << 20]))
def test_profiles_rates_are_the_clocks(name: str, size: int) -> None:
    """2,000 requests at once take what bandwidth, latency and queue depth say, to 5%."""
    profile = PROFILES[name]
    assert profile is not None

    def rate(request_bytes: int) -> float:
        wire = request_bytes / profile.bytes_per_second
        return request_bytes / max(wire, (profile.seconds_per_request + wire) / profile.queue_depth)

    time = Time()
    clock = clock_of(time, profile.bytes_per_second, profile.seconds_per_request, profile.queue_depth)
    seconds = clock.book([size] * 2000) - 100.0
    assert 2000 * size / seconds == pytest.approx(rate(size), rel=0.05)
    assert rate(512) < 0.06 * profile.bytes_per_second, "as in the paper"
    assert rate(4 << 20) > 0.95 * profile.bytes_per_second
