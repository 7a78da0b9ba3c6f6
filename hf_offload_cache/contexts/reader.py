"""What a saved context says, read and checked: the manifest, and the trees of its states."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from ..errors import ConfigError, ContextError, CorruptRecordError, EncryptionKeyError
from ..memory.machine import free_memory
from ..stores.encryption import decrypt, key_check
from .data_files import MANIFEST_NAME, read_small
from .folder import reading
from .manifest import MOST_MANIFEST_BYTES, Manifest, StateFile
from .state import unpack

_DIGEST = re.compile(r"[0-9a-f]{64}")


class NoRoomError(ContextError):
    """A state does not fit into memory now: it is unknown whether it is damaged."""


def most_of_cache(batch: int, tokens: int) -> int:
    """Maximum bytes of a complete cache's state: ids of 8 bytes a token, plus small parts."""
    return 64 * batch * tokens + 16 * 2**20


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of the context in `directory`. Raises `ContextError`, and `StoreError` where it cannot be read."""
    return reading(directory, lambda folder_fd: manifest_in(folder_fd, os.fspath(directory)))


def manifest_in(folder_fd: int, place: str) -> Manifest:
    """As `read_manifest`, of the context that `folder_fd` is open on; errors call it `place`."""
    return Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), place)


def check_digest(digest: object) -> None:
    """Raise `ConfigError` unless `digest` has the form that `save` and `publish_context` give."""
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ConfigError(f"expect must be a digest of 64 hexadecimal digits, got {digest!r:.80}")


def check_key(manifest: Manifest, key: bytes | None, place: str) -> None:
    """Raises `EncryptionKeyError` unless `key` is what the context was saved with; None: not encrypted."""
    if manifest.key_check is None:
        if key is not None:  # what such a cache saved would hold these records as they are
            raise EncryptionKeyError(f"{place}: the context is not encrypted: leave encryption_key out")
        return
    if key is None:
        raise EncryptionKeyError(f"{place}: the context is encrypted: give encryption_key, the one it was saved with")
    if key_check(key) != manifest.key_check:
        raise EncryptionKeyError(f"{place}: encryption_key is not the one that the context was saved with")


class ContextReader:
    """Reads the states of the context that `folder_fd`, the caller's, is open on; errors call it `place`.

    `key` is the right one, or None where nothing is encrypted. `taking` is told the bytes that a state takes in host
    memory while it is read, before they are taken.
    """

    def __init__(
        self, folder_fd: int, place: str, key: bytes | None, taking: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self.folder_fd = folder_fd
        self.place = place
        self.key = key
        self._taking = taking

    def state(
        self, entry: StateFile, name: str, device: torch.device | str = "cpu", binding: bytes = b"",
        most: int | None = None,
    ) -> Any:  # fmt: skip
        """The tree of one state, with its tensors on `device`. `name`, and the manifest's `binding` for the cache's
        state, are those it was saved with. `most`: maximum bytes; None: unknown.

        Raises `CorruptRecordError` if it is not as it was written, and `ContextError` if it has more bytes than allowed
        or than fit into memory.
        """
        if most is not None and entry.bytes > most:
            raise ContextError(
                f"{name}: its state in {self.place!r} has {entry.bytes:,} bytes, and {most:,} are enough for what the "
                "context holds: the manifest is damaged, or made elsewhere; save the context anew"
            )
        free = free_memory()
        if free is not None and 2 * entry.bytes > free:
            what = f"its state in {self.place!r} takes {2 * entry.bytes:,} bytes of memory, and {free:,} are free"
            raise NoRoomError(f"{name}: {what}: the manifest is damaged, or made elsewhere, or memory is short")
        self._taking(2 * entry.bytes)  # the bytes, and the tensors made of them
        try:
            data: Any = read_small(self.folder_fd, entry.file, entry.bytes)
        except FileNotFoundError as error:
            message = f"{name}: its state {entry.file} in {self.place!r} is missing; save the context anew"
            raise CorruptRecordError(errno.ENOENT, message) from error
        if len(data) != entry.bytes or f"{xxhash.xxh3_128_hexdigest(data)}.state" != entry.file:
            raise CorruptRecordError(
                errno.EIO, f"{name}: its state {entry.file} in {self.place!r} is not what was written; save it anew"
            )
        if self.key is not None:
            data = decrypt(self.key, data, name.encode() + b"\0" + binding)
        return unpack(data, torch.device(device), f"{name} in {self.place}")
