"""A cache as a directory, in one atomic step. What is stored is linked in where the file system can, not copied."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import xxhash

from ..errors import ContextError, ContextMismatchError
from ..memory.account import MemoryAccount
from ..model.fingerprint import full_fingerprint
from ..stores.base import FreezableStore
from ..stores.encryption import encrypt, key_check
from ..stores.engines import share_store
from .configuration import fields_in_states, saved_fields
from .data_files import MANIFEST_NAME, write_file
from .manifest import LayerEntry, Manifest, RecordsFile, StateFile, records_name
from .open import capture_kept, closed_on_error, open_context, restore_kept
from .protocol import ContextCache, StoredLayer
from .publish import publish
from .state import pack, tensor_bytes

# A second cache over the same records: what either adds is its own

Fork = TypeVar("Fork", bound=ContextCache)


def fork(cache: Fork) -> Fork:
    """See `OffloadCache.fork`."""
    cache.freeze()
    storage, key = cache.storage, cache.storage.key
    own_key = None if key is None else (lambda: key)  # the user's function might give another one by now
    own: dict[str, Any] = {"engine": storage.engine, "trace": None, "encryption_key": own_key}
    config = dataclasses.replace(cache.config, **own, **fields_in_states(cache.config_class))
    twin = type(cache)(cache.given_model, path=storage.directory, config=config)
    with closed_on_error(twin):
        for layer_idx, (layer, other) in enumerate(zip(cache.layers, twin.layers, strict=True)):
            if isinstance(layer, StoredLayer) and isinstance(other, StoredLayer):
                _fork_layer(layer, other, twin)
            else:
                restore_kept(other, capture_kept(layer), f"layer {layer_idx}", known=True)
        if cache.sequences:
            twin.restore(cache.capture())
    return twin


def _fork_layer(layer: StoredLayer, other: StoredLayer, twin: ContextCache) -> None:
    with contextlib.ExitStack() as undo:
        parts = []
        for part in layer.freeze():
            parts.append(share_store(part, twin.storage.ring))
            undo.callback(parts[-1].close)
        other.restore(layer.capture(), parts, layer.history_device)
        undo.pop_all()


_LATER = StateFile(file=f"{0:032x}.state", bytes=0)
_SAVING = "saving"
"""The owner in the account of what one layer's state takes meanwhile. It is not refused: a budget that is used up is no
reason to lose a context."""


def save(
    cache: ContextCache, directory: str | os.PathLike[str], *, overwrite: bool, tokenizer: Any, full_digest: bool
) -> str:
    """See `OffloadCache.save`."""
    cache.check_open()
    if (Path(directory).parent / MANIFEST_NAME).exists():
        raise ContextError(f"directory {os.fspath(directory)!r} lies in another context: save it beside that one")
    if not cache.tokens:
        raise ValueError("the cache holds nothing to save: run a prompt through it first")
    made_for = full_fingerprint(cache.given_model, tokenizer, every_byte=full_digest)
    check_adapters(cache.adapters or {}, made_for)
    cache.freeze()
    storage = cache.storage
    digest = ""

    def fill(folder_fd: int) -> None:
        nonlocal digest
        writer = _Writer(folder_fd, storage.key, storage.account)
        manifest = Manifest(
            library=version("hf-offload-cache"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            cache=type(cache).__name__,
            tokens=cache.tokens,
            batch=cache.sequences,
            config=saved_fields(cache.config),
            identity=made_for,
            key_check=None if storage.key is None else key_check(storage.key),
            state=_LATER,
            layers=tuple(writer.layer(layer_idx, layer) for layer_idx, layer in enumerate(cache.layers)),
        )
        state = writer.state("cache", cache.capture(), manifest.binding)
        manifest = manifest.model_copy(update={"state": state})
        write_file(folder_fd, MANIFEST_NAME, [manifest.to_bytes()])
        digest = manifest.digest

    try:
        publish(directory, fill, overwrite=overwrite, warn=lambda message: cache.warn(message))
    finally:
        storage.account.observe(_SAVING, 0)
    return digest


def check_adapters(before: dict[str, str], now: dict[str, str]) -> None:
    """Raises `ContextMismatchError` where the adapters of now are not those that made what is held."""
    for name, value in before.items():
        if now.get(name) != value:
            raise ContextMismatchError(
                f"{name} is {now.get(name, 'absent')} now and was {value} when what the cache holds was made: save it "
                "with the adapters as they were, or reset() it"
            )


class _Writer:
    """Puts the data files of one context into a directory that nobody else sees."""

    def __init__(self, folder_fd: int, key: bytes | None, account: MemoryAccount) -> None:
        self._folder_fd = folder_fd
        self._key = key
        self._account = account
        self._written: set[str] = set()

    def layer(self, layer_idx: int, layer: Any) -> LayerEntry:
        name = f"layer {layer_idx}"
        if not isinstance(layer, StoredLayer):
            return LayerEntry(kind="kept", state=self.state(name, {"layer": capture_kept(layer), "tags": []}))
        stores = layer.freeze()
        size = stores[0].record_bytes if stores else 0
        records = [self._records(*each, size) for each in zip(stores, layer.live(stores), strict=True)]
        parts, tags = zip(*records, strict=True) if records else ((), ())
        state = self.state(name, {"layer": layer.capture(), "tags": list(tags)})
        return LayerEntry(kind="offloaded", state=state, record_bytes=size, parts=parts)

    def _records(self, store: FreezableStore, live: np.ndarray, size: int) -> tuple[RecordsFile, torch.Tensor]:
        """The records of a frozen store that are `live`, under their digest; and their tags. `size`: the layer's."""
        provisional = f"{secrets.token_hex(16)}.records"
        guard = store.export(self._folder_fd, provisional, live)
        name = records_name(guard, store.record_bytes)
        os.rename(provisional, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        other = 0 if store.record_bytes == size else store.record_bytes
        entry = RecordsFile(file=name, records=len(guard.tags), guard=guard.describe(), record_bytes=other)
        return entry, torch.from_numpy(guard.tags.copy())

    def state(self, name: str, tree: Any, binding: bytes = b"") -> StateFile:
        """`tree` as a file under its digest; an encrypted one is bound to `name` and `binding`."""
        self._account.observe(_SAVING, (2 if self._key is None else 3) * tensor_bytes(tree))
        data = pack(tree)
        if self._key is not None:
            data = encrypt(self._key, data, name.encode() + b"\0" + binding)
        entry = StateFile(file=f"{xxhash.xxh3_128_hexdigest(data)}.state", bytes=len(data))
        if entry.file not in self._written:  # layers that hold nothing are alike
            write_file(self._folder_fd, entry.file, [data])
            self._written.add(entry.file)
        return entry


# What a cache offers to outlive its process: `save`, `open`, `fork`

class Persistent:
    """The verbs, on top of what the cache captures, restores and freezes."""

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        tokenizer: Any = None,
        full_digest: bool = False,
    ) -> str:
        """Publish the cache's content as the directory `directory`, which `open` opens in another process without
        prefill.

        Returns the context's digest, 64 hex digits. If somebody could restore an older context, keep the digest where
        they cannot write: `open(..., expect=digest)` accepts no other context.

        On the file system of `path`, stored records are linked, not copied, unless some records of a file were given
        up: these are never saved. Each record is checked as it is copied. A linked file is read and checked if
        something has written to it since this cache opened or froze it. Stored records are immutable from then on, and
        this cache adds its own records next to them. The directory is published in one atomic step: a process that is
        killed leaves the old context, the new one, or none if there was none. Only the owner can access the directory
        (0700), and it is encrypted if the cache has an `encryption_key`.

        Args:
            overwrite: replace an existing context.
            tokenizer: makes its identity part of the context's.
            full_digest: digest every byte of the weights, not a sample, here and in `open`.

        Raises `FileExistsError`; `CorruptRecordError` for a record that is no longer as it was written, for example
        because the context was wiped while open; `StoreFullError` and other `StoreError`s. In these cases nothing is
        published, and the cache is unchanged. Raises `ValueError` for an empty cache, and the errors of any use of a
        cache.
        """
        cache: Any = self  # a `ContextCache`
        return save(cache, directory, overwrite=overwrite, tokenizer=tokenizer, full_digest=full_digest)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        model: Any,
        memory: int | str | None = None,
        path: str | Path | None = None,
        *,
        tokenizer: Any = None,
        expect: str | None = None,
        **fields: Any,
    ) -> Self:
        """Open a cache with the content that `save` saved: no prefill, and no keys and values are read before a step
        needs them.

        Any number of caches and processes may open one context. Their additions go to unnamed files in `path`; the
        context is unchanged. It may be replaced or removed meanwhile: caches that have it open keep it.

        Args:
            memory: as in `for_budget`, for `max_context` (by default 4,096 tokens more than are stored) and
                `max_batch`.
            path: folder for additions; None: the temporary folder.
            tokenizer: compared with the tokenizer of `save`, if both are given.
            expect: the digest that `save` returned; any other context raises `ContextMismatchError`, such as an older
                one with the same key.
            **fields: fields of the configuration. Fields that the stored format fixes (`group_size`, `rank`,
                `summary_dtype`) raise `ConfigError` unless equal; `adapter`, which is in the context, always does.
                Fields of a machine or a run (`engine`, `verify`, `io_timeout`, `trace`, `encryption_key`, the limits)
                are not saved. Others are as they were, or as `memory` allows.

        Raises `ContextMismatchError` if the model is not the one it was saved with, naming the field and both values,
        or if the context is not the expected one; `ContextError` for a directory without a context, or a damaged
        manifest; `CorruptRecordError` for bytes that differ from those written, here or in the step that reads them;
        `EncryptionKeyError`; and the constructor's errors. In these cases nothing is left behind.
        """
        kind: Any = cls  # of `ContextCache`s
        return open_context(kind, directory, model, memory, path, tokenizer, fields, expect)

    def fork(self) -> Self:
        """A cache of its own that holds the same: N questions over one document share what is stored.

        Nothing on disk is copied, now or later: what is stored is immutable from now on, and what either adds is its
        own. Compact keys in memory are shared until one of the two adds a group; each one's account counts them. Tables
        and latest tokens are copied. Blocks until all writes are done. `copy.deepcopy` does the same.
        """
        cache: Any = self  # a `ContextCache`
        return fork(cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.fork()
        return twin
