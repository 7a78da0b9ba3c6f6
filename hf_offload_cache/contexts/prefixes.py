"""Which tokens the contexts of a folder begin with: read once, and kept as long as the context stays."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ContextError, ContextMismatchError, CorruptRecordError, EncryptionKeyError, StoreError
from ..model.fingerprint import EVERY_BYTE
from ..stores.encryption import key_check
from .captured_trees import token_ids
from .data_files import MANIFEST_NAME
from .folder import entries, reading
from .listing import look
from .manifest import Manifest, StateFile
from .reader import ContextReader, NoRoomError, most_of_cache, read_manifest

NAME = re.compile(r"[0-9a-f]{32}")
"""What contexts in a library are called."""
_KEPT_BYTES = 64 * 2**20
"""Ids that an index keeps; those of further contexts are read again each time."""


@dataclass(frozen=True)
class Known:
    """What a look-up needs of a context. `model` is `model_digest` of it, `config` has the fields that were saved."""

    path: Path
    cache: str
    model: str
    config: dict[str, Any]
    batch: int
    tokens: int
    key_check: str | None
    state: StateFile
    binding: bytes
    digest: str
    mark_name: str
    last_used_ns: int


class PrefixIndex:
    """Index of the contexts in `folder` whose names follow from their content. For one thread at a time.

    A context that vanishes is skipped; so is a damaged one, with a warning that names it. If the damage is more than
    `look` shows, `found_damaged` is called with path, digest and reason.
    """

    def __init__(
        self, folder: Path, key: bytes | None, found_damaged: Callable[[Path, str, str], object] = lambda *what: None
    ) -> None:
        self._folder = folder
        self._key = key
        self._found_damaged = found_damaged
        self._known: dict[tuple[str, int, int], Known] = {}
        self._ids: dict[str, np.ndarray] = {}
        self._ids_bytes = 0

    def __call__(self) -> list[Known]:
        """Those there are now. Reads the manifests that were not read before. Raises `ContextError`, `StoreError`."""
        known: dict[tuple[str, int, int], Known] = {}
        for path in entries(self._folder):
            if not NAME.fullmatch(path.name):
                continue
            try:
                there = os.stat(path / MANIFEST_NAME, follow_symlinks=False)
                place = (path.name, there.st_ino, there.st_size)
                found = self._known.get(place) or _read(path)
                if os.path.lexists(path / found.mark_name):
                    raise ContextError(f"it is damaged{_told(path)}; it is replaced when its text is saved again")
            except (ContextError, OSError) as error:
                pass_over(path, error)
                continue
            known[place] = Known(**{**vars(found), "last_used_ns": there.st_mtime_ns})
        self._known = known
        names = {place[0] for place in known}
        self._ids = {name: ids for name, ids in self._ids.items() if name in names}
        self._ids_bytes = sum(ids.nbytes for ids in self._ids.values())
        return list(known.values())

    def ids(self, known: Known, form: Mapping[str, Any]) -> np.ndarray | None:
        """What `encode` gives for the tokens of a context that this index has the key for; None: it is passed over.

        `form`: its `form_fields`, from which its name follows.
        """
        if known.path.name in self._ids:
            return self._ids[known.path.name]
        try:
            ids = read_ids(known.path, known, self._key)
        except (ContextError, OSError) as error:
            if is_damage(error):
                self._found_damaged(known.path, known.digest, str(error))
            pass_over(known.path, error)
            return None
        key = None if known.key_check is None else self._key
        if prefix_name(known.cache, known.model, form, ids, key) != known.path.name:
            why = "its name does not follow from what it holds: it was not saved here; move it away"
            pass_over(known.path, ContextError(why))
            return None
        ids = ids.astype(np.int32) if ids.size and abs(ids).max() < 2**31 else ids
        if self._ids_bytes + ids.nbytes <= _KEPT_BYTES:
            self._ids[known.path.name] = ids
            self._ids_bytes += ids.nbytes
        return ids


def read_ids(path: Path, manifest: Manifest | Known, key: bytes | None) -> np.ndarray:
    """The tokens of the context at `path`, as `encode` gives them. Raises `ContextError`, `StoreError`,
    `EncryptionKeyError`."""
    if manifest.key_check is not None and (key is None or key_check(key) != manifest.key_check):
        what = "give the key, it is encrypted" if key is None else "it was encrypted with another key"
        raise EncryptionKeyError(f"the tokens of {str(path)!r} cannot be read: {what}")

    def read(folder_fd: int) -> np.ndarray:
        own = None if manifest.key_check is None else key
        reader, most = ContextReader(folder_fd, str(path), own), most_of_cache(manifest.batch, manifest.tokens)
        tree = reader.state(manifest.state, "cache", binding=manifest.binding, most=most)
        return token_ids(tree, manifest.batch, manifest.tokens).numpy()

    return reading(path, read)


def known_of(path: Path, manifest: Manifest) -> Known:
    """Everything that a look-up needs about the context at `path`, except when it was last used."""
    made_for, config = model_digest(manifest.identity), manifest.config
    return Known(
        path, manifest.cache, made_for, config, manifest.batch, manifest.tokens, manifest.key_check, manifest.state,
        manifest.binding, manifest.digest, manifest.mark_name, 0,
    )


def _read(path: Path) -> Known:
    return known_of(path, read_manifest(path))


def _told(path: Path) -> str:
    entry = look(path)
    return "" if entry is None or entry.damage is None else f" ({entry.damage})"


def is_damage(error: Exception) -> bool:
    """Whether an exception from reading a context means that it is not as it was written, whoever reads it."""
    if isinstance(error, ContextError):
        return not isinstance(error, (ContextMismatchError, NoRoomError))
    return isinstance(error, CorruptRecordError) or (isinstance(error, StoreError) and error.errno == errno.EIO)


def pass_over(path: Path, error: Exception) -> None:
    """Nothing for a context that is gone; else a warning that names it."""
    if look(path) is not None:
        what = " ".join(str(error).split())
        warnings.warn(f"the context {str(path)!r} is passed over: {what}", UserWarning, stacklevel=2)


def model_digest(fingerprint: Mapping[str, str]) -> str:
    """Equal for models whose keys and values are interchangeable, whatever their tokenizer."""
    fields = {name: value for name, value in fingerprint.items() if name not in ("tokenizer", EVERY_BYTE)}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def prefix_name(cache: str, model: str, form: Mapping[str, Any], ids: np.ndarray, key: bytes | None) -> str:
    """What a context is called in a library; with a key, nobody without it can tell the name from the tokens."""
    digest = hashlib.blake2b(digest_size=16, key=key or b"", person=b"context name")
    digest.update(json.dumps([cache, model, dict(form), list(ids.shape)], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(ids).tobytes())
    return digest.hexdigest()
