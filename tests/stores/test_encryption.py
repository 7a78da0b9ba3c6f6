"""Encrypted stores against the conformance suite, what lies on the disk, nonces, keys, and whole blobs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import KEY, OTHER_KEY, OfAnEngine, content_of

from hf_offload_cache.errors import ContextError, CorruptRecordError, EncryptionKeyError
from hf_offload_cache.stores import (
    BOUNCE_BYTES,
    Checksums,
    Encryption,
    MappedStore,
    aligned_empty,
    decrypt,
    encrypt,
    key_check,
    load_key,
    make_guard,
    open_guard,
)
from hf_offload_cache.testing import RECORD_BYTES, fill, pattern, read


class TestEncryptedMapped(OfAnEngine):
    key = KEY

    def make_guard(self) -> Encryption:
        return Encryption(KEY)


class TestEncryptedDirect(TestEncryptedMapped):
    engine = "direct"


class TestEncryptedUring(TestEncryptedMapped):
    engine = "uring"


class TestMemoryThatIsSavedEncrypted(TestEncryptedMapped):
    engine = "memory"


def windows(data: bytes) -> set[bytes]:
    return {data[start : start + 16] for start in range(len(data) - 15)}


def test_nothing_of_the_plain_text_is_on_the_disk(tmp_path: Path) -> None:
    """No 16 bytes of it, wherever they begin; and equal records do not look equal."""
    store = MappedStore(tmp_path, 4096, "layer 3", Encryption(KEY))
    ids, records = store.allocate(6), aligned_empty(6, 4096).zero_()
    records[1:4] = torch.arange(4096).remainder(251).to(torch.uint8)
    records[4:] = pattern(2, record_bytes=4096)
    kept = records.clone()
    store.write(ids, records)
    assert torch.equal(records, kept), "the caller's memory is as it was"
    stored = content_of(store).read_bytes()[: 6 * 4096]
    assert not windows(records.numpy().tobytes()) & windows(stored)
    rows = [stored[start : start + 4096] for start in range(0, len(stored), 4096)]
    assert len(set(rows)) == 6
    assert torch.equal(read(store, ids), records)
    store.close()


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**16)), min_size=3, max_size=12))
def test_no_nonce_comes_twice(steps: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Records are freed and written again under their ids, and written over."""
    guard = Encryption(KEY)
    store = MappedStore(tmp_path_factory.mktemp("nonces"), 4096, "layer 3", guard)
    seen: set[bytes] = set()
    held = np.empty(0, dtype=np.int64)
    written = 0
    for count, choice in steps:
        ids, _ = fill(store, count, seed=choice)
        store.write(ids[:1], pattern(1, record_bytes=4096))
        for identity in ids.tolist():
            seen.add(guard.tags[identity, :8].tobytes())
        written += count
        held = np.r_[held, ids]
        gone = held[choice % len(held) :]
        store.free(gone)
        held = held[: choice % len(held)]
    assert len(seen) == written and bytes(8) not in seen
    store.close()


def test_what_was_read_is_bound_to_its_record_and_store() -> None:
    """An exchange is noticed also where the tags were exchanged with the records."""
    guard, other = Encryption(KEY), Encryption(KEY)
    records = pattern(3)
    sealed = []
    for one in (guard, other):
        one.resize(3)
        sealed.append(one.seal(np.arange(3), records).clone())
    assert guard.check(np.arange(3), sealed[0].clone()).tolist() == []
    with pytest.raises(ValueError, match="nonce twice"):
        open_guard(guard.describe(), guard.tags, KEY, True).seal(np.arange(1), pattern(1))
    tags = guard.tags.copy()
    tags[[0, 2]] = tags[[2, 0]]
    exchanged = open_guard(guard.describe(), tags, KEY, True)
    assert exchanged.check(np.arange(3), sealed[0][[2, 1, 0]]).tolist() == [0, 2]
    mixed = open_guard(guard.describe(), other.tags, KEY, True)
    assert mixed.check(np.arange(3), sealed[1].clone()).tolist() == [0, 1, 2]
    for position in range(guard.tag_bytes):
        tags = guard.tags.copy()
        tags[1, position] ^= 1
        assert open_guard(guard.describe(), tags, KEY, True).check(np.arange(3), sealed[0].clone()).tolist() == [1]
    assert open_guard(guard.describe(), guard.tags, OTHER_KEY, True).check(
        np.arange(3), sealed[0].clone()
    ).tolist() == [0, 1, 2]


def test_memory_borrowed_for_writing_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = Encryption.seal
    monkeypatch.setattr(
        Encryption, "seal", lambda self, ids, rows: (sizes.append(rows.numel()), real(self, ids, rows))[1]
    )
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3", Encryption(KEY))
    ids, records = fill(store, 300)
    assert sum(sizes) == 300 * RECORD_BYTES and max(sizes) <= BOUNCE_BYTES
    assert store.bytes_written == 300 * RECORD_BYTES
    assert torch.equal(read(store, ids), records)
    store.close()


def test_the_guards_of_new_and_saved_stores() -> None:
    assert isinstance(make_guard(KEY, verify=False), Encryption)
    for verify in (True, False):
        guard = make_guard(None, verify)
        guard.resize(1)
        guard.seal(np.arange(1), pattern(1))
        opened = open_guard(guard.describe(), guard.tags, None, verify)
        assert isinstance(opened, Checksums)
        assert opened.check(np.arange(1), pattern(1, seed=5)).tolist() == ([0] if verify else [])
        assert not np.shares_memory(opened.tags, guard.tags)


TAGS = np.zeros((2, 24), dtype=np.uint8)
SALTED = {"kind": "aes-256-gcm", "salt": "ab" * 32}


@pytest.mark.parametrize(
    ("described", "tags", "key", "error", "words"),
    [
        ({"kind": "crc32"}, TAGS, None, ContextError, "'crc32'"),
        ({}, TAGS, None, ContextError, "None"),
        ({"kind": ["xxh3_64"]}, TAGS, None, ContextError, "xxh3_64"),
        ({"kind": "aes-256-gcm", "salt": 3}, TAGS, KEY, ContextError, "aes-256-gcm"),
        ({"kind": "aes-256-gcm", "salt": "ab" * 31}, TAGS, KEY, ContextError, "64 hex digits"),
        ({"kind": "aes-256-gcm", "salt": "AB" * 32}, TAGS, KEY, ContextError, "64 hex digits"),
        ({"kind": "xxh3_64"}, TAGS, None, ContextError, r"\(records, 8\)"),
        (SALTED, TAGS[:, :8], KEY, ContextError, r"\(records, 24\)"),
        (SALTED, TAGS.astype(np.int8), KEY, ContextError, "uint8"),
        (SALTED, TAGS, None, EncryptionKeyError, "encryption_key"),
    ],
)
def test_descriptions_that_are_none(described: dict, tags: np.ndarray, key: bytes, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        open_guard(described, tags, key, True)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_keys_from_files(tmp_path: Path, end: str) -> None:
    (tmp_path / "raw").write_bytes(KEY)
    (tmp_path / "hex").write_text(KEY.hex() + end)
    (tmp_path / "upper").write_text(KEY.hex().upper() + end)
    for name in ("raw", "hex", "upper"):
        assert load_key(tmp_path / name) == load_key(str(tmp_path / name)) == KEY
    assert load_key(lambda: KEY) == KEY


@pytest.mark.parametrize(
    "content",
    [b"", KEY[:31], KEY + b"\n", KEY.hex()[:-1].encode(), KEY.hex().encode() + b"\n\n\n", b"g" * 64, b"x" * 10**6],
    ids=["empty", "short", "raw and a newline", "short hex", "newlines", "no hex", "long"],
)
def test_files_that_hold_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(EncryptionKeyError, match=r"key' must hold 32 bytes or 64 hex digits.*/dev/urandom") as caught:
        load_key(tmp_path / "key")
    assert KEY.hex()[:20] not in str(caught.value)


def test_keys_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(EncryptionKeyError, match=r"missing' cannot be read.*No such file"):
        load_key(tmp_path / "missing")
    with pytest.raises(EncryptionKeyError, match="cannot be read"):
        load_key(tmp_path)
    for returned, words in ((KEY[:5], "5 bytes"), (KEY.hex(), "str"), (None, "NoneType")):
        with pytest.raises(EncryptionKeyError, match=rf"must return 32 bytes, it returned {words}"):
            load_key(lambda returned=returned: returned)  # type: ignore[misc]

    def fails() -> bytes:
        raise KeyError("vault")

    with pytest.raises(EncryptionKeyError, match="KeyError: 'vault'") as caught:
        load_key(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (
        lambda: Encryption(KEY),
        lambda: make_guard(KEY, True),
        lambda: encrypt(KEY, b"", b""),
        lambda: decrypt(KEY, bytes(60), b""),
        lambda: key_check(KEY),
        lambda: load_key(lambda: KEY),
    ):
        with pytest.raises(EncryptionKeyError, match=r"pip install 'hf-offload-cache\[crypto\]'"):
            call()
    assert isinstance(make_guard(None, True), Checksums), "who does not encrypt does not need it"


@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000)])
def test_blobs(data: bytes) -> None:
    blob = encrypt(KEY, data, b"layer 3 state")
    assert decrypt(KEY, blob, b"layer 3 state") == decrypt(KEY, memoryview(blob), b"layer 3 state") == data
    assert len(blob) == len(data) + 48
    assert blob != encrypt(KEY, data, b"layer 3 state")
    if len(data) > 16:
        assert data[:16] not in blob
    wrong = [(OTHER_KEY, blob, b"layer 3 state"), (KEY, blob, b"layer 4 state"), (KEY, blob[:-1], b"layer 3 state"),
             (KEY, blob[:20], b"layer 3 state"), (KEY, b"", b"layer 3 state")]  # fmt: skip
    for key, stored, context in wrong:
        with pytest.raises(CorruptRecordError, match=r"layer \d state .*the key"):
            decrypt(key, stored, context)
    for position in range(min(len(blob), 60)):
        flipped = bytearray(blob)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(CorruptRecordError):
            decrypt(KEY, flipped, b"layer 3 state")


def test_blobs_that_are_too_large() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 2**31

    with pytest.raises(ValueError, match="2 GiB"):
        encrypt(KEY, Huge(), b"state")


def test_the_check_of_a_key() -> None:
    found = key_check(KEY)
    assert found == key_check(bytes(KEY)) != key_check(OTHER_KEY)
    assert len(found) == 32 and not set(found) - set("0123456789abcdef") and found not in KEY.hex()
