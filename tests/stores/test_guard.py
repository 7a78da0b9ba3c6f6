"""Records that are not what was written, in every engine that reads a file; and the tags by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from store_cases import KEY, content_of, needs, put

from hf_offload_cache.errors import CorruptRecordError
from hf_offload_cache.stores import Checksums, Encryption, RecordGuard, Store, aligned_empty, open_store
from hf_offload_cache.stores import guard as guard_module
from hf_offload_cache.testing import RECORD_BYTES, fill, pattern, read


@pytest.fixture(params=["direct", "mapped", "uring"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[RecordGuard | None], Store]]:
    with contextlib.ExitStack() as stores:
        engine = needs(request.param, tmp_path)
        yield lambda guard: stores.enter_context(
            contextlib.closing(open_store(engine, tmp_path, RECORD_BYTES, "layer 3", guard=guard))
        )


def flip(store: Store, record: int, position: int = 5) -> None:
    place = record * RECORD_BYTES + position
    put(store, place, bytes([content_of(store).read_bytes()[place] ^ 1]))


@pytest.mark.parametrize("kind", ["checksums", "encryption"])
def test_a_flipped_bit_is_named(make: Callable[[RecordGuard | None], Store], kind: str) -> None:
    store = make(Encryption(KEY) if kind == "encryption" else None)
    ids, records = fill(store, 30)
    flip(store, 17)
    with pytest.raises(CorruptRecordError, match=r"layer 3: record 17\b.*" + ("key|checksum")) as caught:
        read(store, ids)
    assert caught.value.errno == 5
    out = aligned_empty(3, RECORD_BYTES).zero_()
    transfer = store.start(ids[16:19], out)
    if transfer is not None:
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"record 17\b"):
                transfer.finish()
        assert out[1].unique().tolist() == [0xFF]
    others = np.delete(ids, 17)
    assert torch.equal(read(store, others), records[torch.from_numpy(others)]), "the rest is readable"
    store.free(ids[17:18])
    again, new = fill(store, 1, seed=4)
    assert again.tolist() == [17] and torch.equal(read(store, again), new), "and so is what is written there anew"


def test_the_disk_may_be_trusted(make: Callable[[RecordGuard | None], Store]) -> None:
    """`verify=False` checks nothing; encrypted records are checked always."""
    store = make(Checksums(verify=False))
    ids, records = fill(store, 3)
    flip(store, 1)
    found = read(store, ids)
    assert torch.equal(found[::2], records[::2]) and int((found != records).sum()) == 1


def test_tags_are_the_digests_of_what_was_written() -> None:
    guard, records = Checksums(), pattern(5)
    guard.resize(9)
    ids = np.array([8, 0, 3, 4, 2])
    assert guard.seal(ids, records) is records, "nothing is copied"
    for identity, record in zip(ids.tolist(), records, strict=True):
        digest = xxhash.xxh3_64_intdigest(record.numpy().tobytes())
        assert int.from_bytes(guard.tags[identity].tobytes(), "little") == digest
    assert guard.written.tolist() == [True, False, True, True, True, False, False, False, True]
    assert guard.nbytes == 9 * 8
    assert guard.check(ids, records).tolist() == []
    assert guard.check(ids[[0, 0, 1, 2]], records[[0, 1, 1, 4]]).tolist() == [1, 3]
    guard.forget(ids[:2])
    assert guard.check(ids, records).tolist() == [0, 1]


@pytest.mark.parametrize("make_guard", [Checksums, lambda: Encryption(KEY)], ids=["checksums", "encryption"])
def test_growing_keeps_the_tags(make_guard: Callable[[], RecordGuard]) -> None:
    guard, records = make_guard(), pattern(4)
    guard.resize(4)
    sealed = guard.seal(np.arange(4), records).clone()
    before = guard.tags.copy()
    guard.resize(900)
    assert np.array_equal(guard.tags[:4], before) and not guard.tags[4:].any()
    guard.resize(3)
    assert len(guard.tags) == 3
    assert guard.check(np.arange(3), sealed[:3]).tolist() == [] and torch.equal(sealed[:3], records[:3])


@pytest.mark.parametrize("kind", ["checksums", "encryption"])
def test_the_store_grows_while_a_record_is_written(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The tag lands where the tags are afterwards, not where they were."""
    guard: RecordGuard = Checksums() if kind == "checksums" else Encryption(KEY)
    guard.resize(2)
    if kind == "checksums":
        real = guard_module._digests
        monkeypatch.setattr(guard_module, "_digests", lambda records: (guard.resize(50), real(records))[1])
    else:
        cipher = guard._cipher  # type: ignore[attr-defined]

        class Growing:
            def encrypt_into(self, *args: object) -> None:
                guard.resize(50)
                cipher.encrypt_into(*args)

        guard._cipher = Growing()  # type: ignore[attr-defined]
    guard.seal(np.array([1]), pattern(1))
    assert guard.written.tolist() == [False, True, *[False] * 48]


def test_a_digest_of_zero_is_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module.xxhash, "xxh3_64_intdigest", lambda record: 0)
    guard = Checksums()
    guard.resize(2)
    guard.seal(np.array([0]), pattern(1))
    assert guard.written.tolist() == [True, False]
    assert guard.check(np.array([0, 1, 0]), pattern(3)).tolist() == [1]


def test_a_fresh_guard_has_no_records() -> None:
    for guard in (Checksums(verify=False), Encryption(KEY)):
        guard.resize(3)
        fresh = guard.fresh()
        assert type(fresh) is type(guard) and len(fresh.tags) == 0
        assert (fresh.describe() == guard.describe()) == isinstance(guard, Checksums), "an encrypted file has its salt"
