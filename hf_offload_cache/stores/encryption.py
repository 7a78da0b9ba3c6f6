"""Encryption at rest, AES-256-GCM; and the guards of new and of saved stores. Needs the extra `[crypto]`."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ContextError, CorruptRecordError, EncryptionKeyError
from .base import aligned_empty, byte_view
from .guard import NONE_WRONG, Checksums, RecordGuard

KEY_BYTES = 32
SALT_BYTES = 32
_COUNTER_BYTES, _TAG_BYTES, _NONCE_BYTES = 8, 16, 12
_RECORDS, _BLOB, _CHECK = (f"hf_offload_cache {use} 1".encode() for use in ("records", "blob", "key check"))

KeySource = str | Path | Callable[[], bytes]


class Encryption(RecordGuard):
    """Encrypts records with a key for their store only: HKDF-SHA256 of the user's `key` and 32 random bytes, `salt`.

    The nonce is a counter of writes, so a record that is freed and written again never sees it twice; it restarts only
    with a new salt. A tag is that counter (8 bytes, little-endian, from 1) and GCM's own 16 bytes. The record's id is
    authenticated too, so records cannot be exchanged. With `salt` and `tags` ((count, 24), uint8, taken over) of a
    saved store it only checks. Raises `EncryptionKeyError` if the package is missing.
    """

    tag_bytes = _COUNTER_BYTES + _TAG_BYTES
    copies = True
    reason = "it fails authentication: the bytes or the key are wrong"

    def __init__(self, key: bytes, salt: bytes | None = None, tags: np.ndarray | None = None) -> None:
        super().__init__()
        self._key = key
        self._read_only = salt is not None
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        self._cipher = _cipher(_derive(key, self._salt, _RECORDS))
        self._writes = 0
        if tags is not None:
            self._set(tags)

    def seal(self, ids: np.ndarray, records: torch.Tensor) -> torch.Tensor:
        if self._read_only:
            raise ValueError("records of a saved context are read only: a second writer would use a nonce twice")
        count, size = records.shape
        with self._lock:
            first = self._writes + 1
            self._writes += count
        sealed = aligned_empty(count + 1, size)  # the last row takes the last record's GCM tag
        source, target = byte_view(records), byte_view(sealed)
        tags = bytearray()
        for index, identity in enumerate(ids.tolist()):
            start, stop = index * size, (index + 1) * size
            counter = (first + index).to_bytes(_COUNTER_BYTES, "little")
            # GCM's tag lands in the next row, and is overwritten by the next record.
            spill = target[start : stop + _TAG_BYTES]
            self._cipher.encrypt_into(_nonce(counter), source[start:stop], _place(identity, size), spill)
            tags += counter + bytes(target[stop : stop + _TAG_BYTES])
        with self._lock:
            self._tags[ids] = np.frombuffer(tags, dtype=np.uint8).reshape(count, self.tag_bytes)
        return sealed[:count]

    def check(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        from cryptography.exceptions import InvalidTag

        size, data = records.shape[1], byte_view(records)
        tags = self._tags[ids].tobytes()
        sealed = memoryview(bytearray(size + _TAG_BYTES))
        wrong: list[int] = []
        for index, identity in enumerate(ids.tolist()):
            row = data[index * size : (index + 1) * size]
            tag = tags[index * self.tag_bytes : (index + 1) * self.tag_bytes]
            sealed[:size], sealed[size:] = row, tag[_COUNTER_BYTES:]
            try:
                self._cipher.decrypt_into(_nonce(tag[:_COUNTER_BYTES]), sealed, _place(identity, size), row)
            except InvalidTag:
                wrong.append(index)
        return np.array(wrong, dtype=np.int64) if wrong else NONE_WRONG

    def audit(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        return self.check(ids, records.clone())

    def describe(self) -> dict[str, Any]:
        return {"kind": "aes-256-gcm", "salt": self._salt.hex()}

    def fresh(self) -> Encryption:
        return Encryption(self._key)

    def only(self, live: np.ndarray) -> Encryption:
        return Encryption(self._key, self._salt, self._tags_of(live))


def make_guard(key: bytes | None, verify: bool) -> RecordGuard:
    """The guard of a new store. With a key it encrypts, and always checks."""
    return Checksums(verify) if key is None else Encryption(key)


def open_guard(described: dict[str, Any], tags: np.ndarray, key: bytes | None, verify: bool) -> RecordGuard:
    """The guard of a saved store, from `RecordGuard.describe` and its tags (count, tag_bytes), uint8.

    Raises `ContextError` for a description that is not ours or tags of another shape, and `EncryptionKeyError` if the
    records are encrypted and there is no key.
    """
    kind, salt = described.get("kind"), described.get("salt", "")
    if kind not in ("xxh3_64", "aes-256-gcm") or not isinstance(salt, str):
        raise ContextError(f"records are guarded by xxh3_64 or aes-256-gcm, not {kind!r}: damaged, or a later version")
    expected = Checksums.tag_bytes if kind == "xxh3_64" else Encryption.tag_bytes
    if tags.dtype != np.uint8 or tags.ndim != 2 or tags.shape[1] != expected:
        raise ContextError(f"tags of {kind} are (records, {expected}) uint8, these are {tags.shape} {tags.dtype}")
    tags = np.array(tags, order="C")  # a copy: a view would end with its mapped file
    if kind == "xxh3_64":
        return Checksums(verify, tags)
    if len(salt) != 2 * SALT_BYTES or set(salt) - set("0123456789abcdef"):
        raise ContextError(f"the salt of encrypted records is {2 * SALT_BYTES} hex digits, got {salt[:80]!r}")
    if key is None:
        raise EncryptionKeyError("the records are encrypted: give `encryption_key`, the key that they were saved with")
    return Encryption(key, bytes.fromhex(salt), tags)


def load_key(source: KeySource) -> bytes:
    """32 bytes from a file (raw, or 64 hex digits, optionally with a newline) or from a callback that returns them.

    Raises `EncryptionKeyError`, also if the package is missing; no message shows anything of a key.
    """
    _require_package()
    if callable(source):
        try:
            key = source()
        except Exception as error:
            raise EncryptionKeyError(f"encryption_key: the callback raised {type(error).__name__}: {error}") from error
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise EncryptionKeyError(f"encryption_key: the callback must return {KEY_BYTES} bytes, it returned {got}")
        return key
    try:
        with open(source, "rb") as file:
            content = file.read(2 * KEY_BYTES + 3)
    except (OSError, ValueError, TypeError) as error:
        raise EncryptionKeyError(
            f"encryption_key: {os.fspath(source)!r} cannot be read ({error}); give a file with {KEY_BYTES} bytes or "
            f"{2 * KEY_BYTES} hex digits"
        ) from error
    if len(content) == KEY_BYTES:
        return content
    digits = content.removesuffix(b"\n").removesuffix(b"\r")
    if len(digits) == 2 * KEY_BYTES and not set(digits) - set(b"0123456789abcdefABCDEF"):
        return bytes.fromhex(digits.decode())
    raise EncryptionKeyError(
        f"encryption_key: {os.fspath(source)!r} must hold {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits, it has "
        f"{len(content) if len(content) < 2 * KEY_BYTES + 3 else 'more than that'}"
        f"{' bytes that are neither' if len(content) < 2 * KEY_BYTES + 3 else ''}; make one with: "
        f"head -c {KEY_BYTES} /dev/urandom > FILE"
    )


def key_check(key: bytes) -> str:
    """32 hex digits that tell whether two keys are equal, and nothing else about them."""
    return _derive(key, b"", _CHECK).hex()[:32]


def encrypt(key: bytes, data: bytes | bytearray | memoryview, context: bytes) -> bytes:
    """`data` (below 2 GiB) encrypted: 32 random bytes, the ciphertext, 16 bytes of GCM.

    `context` is authenticated and not stored: `decrypt` needs the same, so blobs cannot be exchanged. Errors show it up
    to the first zero byte. Every blob has its own key, from the random bytes, so its nonce may be fixed.
    """
    if len(data) >= 2**31 - _TAG_BYTES:
        raise ValueError(f"data must be below 2 GiB, got {len(data):,} bytes; encrypt it in parts")
    salt = secrets.token_bytes(SALT_BYTES)
    return salt + _cipher(_derive(key, salt, _BLOB)).encrypt(bytes(_NONCE_BYTES), data, context)


def decrypt(key: bytes, blob: bytes | bytearray | memoryview, context: bytes) -> bytes:
    """The data that was given to `encrypt`. Raises `CorruptRecordError` if blob, context or key differ."""
    salt, sealed = bytes(blob[:SALT_BYTES]), blob[SALT_BYTES:]
    cipher = _cipher(_derive(key, salt, _BLOB))
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(bytes(_NONCE_BYTES), sealed, context)
    except InvalidTag as error:
        name = context.split(b"\0")[0].decode(errors="replace")
        raise CorruptRecordError(
            errno.EIO, f"{name} fails authentication: either its bytes or the key are wrong, or it was exchanged"
        ) from error


def _require_package() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise EncryptionKeyError(
            "encryption_key needs the package cryptography: pip install 'hf-offload-cache[crypto]'"
        ) from error


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    _require_package()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(key)


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _nonce(counter: bytes) -> bytes:
    return counter.ljust(_NONCE_BYTES, b"\0")


def _place(identity: int, size: int) -> bytes:
    """Authenticated with a record: its id and size."""
    return identity.to_bytes(8, "little") + size.to_bytes(8, "little")
