"""What of a read travels as replicas, and how."""

from __future__ import annotations

import contextlib
import errno
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import StoreError
from hf_offload_cache.fetch import Areas, Choice, Fetcher, Link, LinkRates, Rates, SlotTier, Storage
from hf_offload_cache.fetch import replica_link as link_rates
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels.low_bit import pack_replicas, unpacked
from hf_offload_cache.methods.abstract_tree import ChunkHistory
from hf_offload_cache.stores import MemoryStore

FORM = RecordFormat(1, 16, 1, 16, torch.float32, 64)
CPU = torch.device("cpu")
CONFIG: Any = types.SimpleNamespace(
    leave_together=1, num_recent=8, block_tokens=256, group_size=64, keeps_pages=False, keeps_replicas=True
)
UNITS = 20


@pytest.fixture
def storage(tmp_path: Any) -> Iterator[Storage]:
    storage = Storage(OffloadConfig(engine="direct"), tmp_path)
    yield storage
    storage.close()


class Setting:
    """Two rows of 20 units, and a fetcher with a link; what it gathers is held against the units and their images."""

    def __init__(self, storage: Storage, share: float | None, slots: int = 0, most: int = 8) -> None:
        self.storage, self.rates = storage, Rates()
        self.history = ChunkHistory(storage, FORM, 2, CPU, CONFIG, "layer 0")
        generator = torch.Generator().manual_seed(0)
        keys, values = (torch.randn(2, 1, 64 * UNITS + 8, 16, generator=generator) for _ in range(2))
        self.history.append(keys, values)
        self.whole = torch.cat([keys, values], 3)[:, 0, : 64 * UNITS].reshape(2, UNITS, -1)
        replicas = self.history.replicas
        assert replicas is not None
        self.replicas = replicas
        packed = torch.empty(2 * UNITS, replicas.record_bytes, dtype=torch.uint8)
        pack_replicas(replicas.form.layout, self.whole.flatten(0, 1), packed)
        self.image = unpacked(replicas.form.layout.rows(packed), 4).view(self.whole.shape)
        self.areas, self.link = Areas(storage.account), Link(storage, replicas, share, self.rates)
        tiers = [SlotTier(slots, FORM.payload_width, FORM.dtype, CPU, storage.account)] if slots else []
        self.fetcher = Fetcher(storage, self.areas, tiers, most, link=self.link)
        storage.prefetcher.flush()

    def gather(self, units: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
        """Which of the units (rows, M) came as replicas, (rows, M) bool; all are one or the other."""
        choice = Choice(units, importance=importance)
        entries = self.fetcher.gather(self.history, choice).entries[:, : units.shape[1] * 64]
        got = entries.unflatten(1, (-1, 64)).flatten(2)
        index = torch.from_numpy(units)
        whole, image = (
            torch.take_along_dim(part, index[:, :, None], 1) for part in (self.whole, self.image)
        )
        is_whole, is_image = ((got == part).all(2).numpy() for part in (whole, image))
        assert (is_whole ^ is_image).all()
        assert (self.areas._borrowed, self.areas._lent) == ([], 0)
        return is_image


def some_units(seed: int, count: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.sort(np.stack([generator.permutation(UNITS)[:count] for _ in range(2)]), 1)


@pytest.mark.parametrize("most", [8, 2])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_share_that_matters_least_comes_as_replicas(storage: Storage, share: float, most: int) -> None:
    setting, owed = Setting(storage, share, most=most), 0.0
    for seed in range(4):
        units = some_units(seed, 7)
        importance = np.random.default_rng(seed).random((2, 7)).astype(np.float32)
        came = setting.gather(units, importance)
        order = np.argsort(setting.history.extents(units).records.reshape(-1))
        for part in np.split(order, range(2 * most, 14, 2 * most)):
            wanted = owed + share * part.size
            least = np.argsort(importance.reshape(-1)[part], kind="stable")[: round(wanted)]
            owed = wanted - round(wanted)
            expected = np.zeros(part.size, dtype=bool)
            expected[least] = True
            assert np.array_equal(came.reshape(-1)[part], expected)
    counters = storage.counters
    assert counters.records_read == 4 * 14
    assert counters.records_compressed == pytest.approx(share * 56, abs=1)


def test_bytes_are_those_of_replicas(storage: Storage) -> None:
    setting = Setting(storage, 0.5)
    storage.reset_counters()
    setting.gather(some_units(0, 6))
    assert setting.history.store.bytes_read == 6 * 8192 and setting.replicas.store.bytes_read == 6 * 4096


@pytest.mark.parametrize("slots", [0, 6])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_what_is_read_ahead_travels_so_too(storage: Storage, share: float, slots: int) -> None:
    """Any mix of a guess, of what it lacks, and of what stays; others fill up the area."""
    setting = Setting(storage, share, slots)
    before: np.ndarray | None = None
    for seed in range(12):
        guess, units = some_units(seed, 6), some_units(seed, 7) if seed % 3 else some_units(seed + 50, 5)
        importance = np.random.default_rng(seed).random((2, 6)).astype(np.float32)
        others = None if before is None else Choice(before)
        setting.fetcher.ahead(setting.history, Choice(guess, importance=importance), others)
        setting.gather(units, np.zeros(units.shape, dtype=np.float32))
        before = units
    assert storage.counters.records_compressed / storage.counters.records_read == pytest.approx(share, abs=0.1)


def test_what_is_kept_stays_as_it_came(storage: Storage) -> None:
    setting = Setting(storage, 0.5, slots=40)
    units = some_units(3, 6)
    assert np.array_equal(setting.gather(units), setting.gather(units.copy()))
    assert storage.counters.records_read == 12


class LostRecords(MemoryStore):
    """Cannot be read; `at_once`: which is told when a read is begun."""

    at_once = False

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        raise StoreError(errno.EIO, "lost")

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Any:
        if self.at_once:
            raise StoreError(errno.EIO, "lost")
        return super().start(ids, out)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("guess", [True, False])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_replicas_that_cannot_be_read_are_read_whole(
    storage: Storage, share: float, guess: bool, at_once: bool
) -> None:
    setting = Setting(storage, share)
    lost = LostRecords(setting.replicas.record_bytes, "lost")
    lost.allocate(2 * UNITS)
    lost.at_once = at_once
    setting.replicas.store = lost
    for seed in range(3):
        units = some_units(seed, 6)
        if guess:
            setting.fetcher.ahead(setting.history, Choice(units))
        assert not setting.gather(units).any()
    gone = np.setdiff1d(setting.history.table.ids, setting.replicas.records)
    assert gone.size and gone.size < 2 * UNITS


def test_records_that_cannot_be_read_are_told(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(storage, 0.5)
    lost = LostRecords(8192, "lost")
    lost.allocate(2 * UNITS)
    own = setting.history.store
    for at_once, guess in itertools.product((True, False), (True, False)):
        lost.at_once = at_once
        setting.history.store = lost
        units = some_units(0, 6)
        if guess and not at_once:
            setting.fetcher.ahead(setting.history, Choice(units))
        with pytest.raises(StoreError, match="lost"):
            setting.gather(units)
        assert (setting.areas._borrowed, setting.areas._lent) == ([], 0)
        setting.history.store = own
        setting.gather(units)


# ---------------------------------------------------------------------------------------------- theta


@pytest.mark.parametrize("unpack", [3e-6, 30e-6, 100e-6])
@pytest.mark.parametrize("replica", [25e-6, 45e-6, 70e-6])
@pytest.mark.parametrize("hidden", [0.0, 4e-4, 2e-3])
def test_theta_is_there_soonest(replica: float, unpack: float, hidden: float) -> None:
    for records, latency in itertools.product((4, 16, 64), (0.0, 2e-4)):
        rates = LinkRates(latency, 65e-6, replica, unpack)
        late = [rates.late(records, hidden, share / 100) for share in range(101)]
        assert rates.late(records, hidden, rates.share(records, hidden)) <= min(late) + 1e-12


def test_how_late_a_share_is() -> None:
    rates = LinkRates(latency=1.0, record=10.0, replica=4.0, unpack=2.0)
    assert [rates.late(10, hidden, 0.0) for hidden in (0.0, 60.0, 200.0)] == [101.0, 41.0, 0.0]
    assert [rates.late(10, hidden, 1.0) for hidden in (0.0, 60.0)] == [41.0 + 20.0, 20.0]
    assert rates.late(10, 0.0, 0.5) == 2.0 + 20.0 + 50.0
    assert rates.late(10, 70.0, 0.5) == 10.0  # both: 72 and 70 + 10


def test_theta_of_the_paper_where_the_model_hides_the_replicas() -> None:
    """T0 + D(1 - theta) / B + D theta delta / B = Tc + t(D theta)."""
    rates, records, hidden = LinkRates(1e-4, 65e-6, 20e-6, 10e-6), 100, 4.5e-3
    theta = rates.share(records, hidden)
    transfer = 2 * rates.latency + records * ((1 - theta) * rates.record + theta * rates.replica)
    assert 0 < theta < 1 and transfer == pytest.approx(hidden + theta * records * rates.unpack)


def test_no_replicas_where_nothing_is_gained() -> None:
    hides, bound = LinkRates(1e-4, 65e-6, 33e-6, 5e-6), LinkRates(1e-4, 20e-6, 20e-6, 5e-6)
    assert hides.share(20, 2e-3) == 0.0 and hides.share(0, 0.0) == 0.0
    assert bound.share(100, 0.0) == 0.0


def test_a_link_is_measured_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(storage, None, most=12)
    times = iter([1e-3, 1e-3 + 23 * 1e-4, 1e-3 - 1e-4 + 24 * 4e-5, 24 * 1e-5])

    def seconds(device: torch.device, work: Any) -> float:
        work()
        return next(times)

    monkeypatch.setattr(link_rates, "_seconds", seconds)
    setting.gather(some_units(0, 6))
    setting.gather(some_units(1, 6))
    (rates,) = setting.rates.values()
    measured = [rates.latency, rates.record, rates.replica, rates.unpack]
    count = (12 * 2 * 8192) // (8192 + 4096)
    assert count < 24  # of which there is no room for more
    assert measured[1] == pytest.approx(23e-4 / (count - 1)) and measured[0] == pytest.approx(1e-3 - measured[1])
    assert measured[3] == pytest.approx(24e-5 / count)


def test_too_few_records_are_not_measured(storage: Storage) -> None:
    """Whole until there are more, and then by what is measured."""
    setting = Setting(storage, None)
    few = np.setdiff1d(setting.replicas.records, setting.replicas.records[:1])
    setting.replicas.forget(few)
    assert not setting.gather(some_units(0, 6)).any() and not setting.rates
    records = np.sort(few)
    setting.replicas.write(records, setting.whole.new_zeros(records.size, FORM.payload_width))
    setting.fetcher.gather(setting.history, Choice(some_units(1, 6)))
    assert len(setting.rates) == 1


def test_what_waits_to_be_written_is_no_measure(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(storage, None)
    with monkeypatch.context() as queued:
        for store in (setting.history.store, setting.replicas.store):
            queued.setitem(storage.prefetcher._writes.unsettled, store, None)
        queued.setattr(type(storage.prefetcher._writes), "copy_queued", lambda *given, **more: [])
        choice = Choice(some_units(0, 6))
        setting.fetcher.gather(setting.history, choice)
    assert not setting.rates
    setting.gather(some_units(1, 6))
    assert len(setting.rates) == 1


def test_a_read_ahead_of_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(storage, 0.5, slots=80)
    told = {"on": True, "count": lambda *given, **more: None, "span": lambda *given: contextlib.nullcontext()}
    monkeypatch.setattr(storage, "timeline", types.SimpleNamespace(**told))
    units = some_units(0, 6)
    setting.gather(units)
    setting.fetcher.ahead(setting.history, Choice(units), Choice(units))
    setting.gather(units.copy())
    assert storage.counters.records_read == 12
