"""Saving and forking caches. Records are linked into the context, not copied, if the file system can do that.

Caches are `Any` in this room, which is below `core.cache.OffloadCache` and cannot import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ..errors import ContextError, ContextMismatchError
from ..memory.account import MemoryAccount
from ..model.fingerprint import full_fingerprint
from ..stores.base import FreezableStore
from ..stores.encryption import encrypt, key_check
from ..stores.engines import share_store
from .configuration import fields_in_states, planned_config, saved_fields
from .folder import MANIFEST_NAME, write_file
from .manifest import LayerEntry, Manifest, RecordsFile, StateFile, records_name
from .open import capture_kept, closed_on_error, restore_kept
from .publish import publish
from .state import StoredLayer, pack, tensor_bytes


def empty_twin(cache: Any, memory: int | str | None = None, **limits: Any) -> Any:
    """A cache as `fork` makes it, without the content."""
    storage, key = cache.storage, cache.storage.key
    same_key = None if key is None else (lambda: key)  # the user's function might return another one by now
    changes: dict[str, Any] = {"engine": storage.engine, "trace": None, "encryption_key": same_key}
    config = dataclasses.replace(cache.config, **changes, **fields_in_states(cache.config_class))
    if limits:
        size, changes = (cache.tokens, cache.sequences), {**changes, **limits}
        saved = saved_fields(cache.config)
        config, _ = planned_config(type(cache), saved, size, cache.model, memory, storage.directory, changes)
    return type(cache)(cache.given_model, path=storage.directory, config=config)


def fork(cache: Any, memory: int | str | None = None, **limits: Any) -> Any:
    """See `OffloadCache.fork`. `limits`: `max_context` and `max_batch` of the twin, with `memory` a budget for them, as
    in `open`; without either it has the cache's own."""
    cache.freeze()
    twin = empty_twin(cache, memory, **limits)
    with closed_on_error(twin):
        for layer_idx, (layer, other) in enumerate(zip(cache.layers, twin.layers, strict=True)):
            if isinstance(layer, StoredLayer) and isinstance(other, StoredLayer):
                _fork_layer(layer, other, twin)
            else:
                restore_kept(other, capture_kept(layer), f"layer {layer_idx}", known=True)
        if cache.sequences:
            twin.restore(cache.capture())
            twin.adapters = cache.adapters
    return twin


def _fork_layer(layer: StoredLayer, other: StoredLayer, twin: Any) -> None:
    with contextlib.ExitStack() as undo:
        parts = []
        for part in layer.freeze():
            parts.append(share_store(part, twin.storage.ring))
            undo.callback(parts[-1].close)
        other.restore(layer.capture(), parts, layer.history_device)
        undo.pop_all()


_LATER = StateFile(file=f"{0:032x}.state", bytes=0)
_SAVING = "saving"
"""Owner in the account of the memory of one layer's state. It may exceed the budget, so that a full cache can be saved.
"""


def save(
    cache: Any, directory: str | os.PathLike[str], *, overwrite: bool, tokenizer: Any, full_digest: bool
) -> str:
    """See `OffloadCache.save`."""
    cache.check_open()
    if (Path(directory).parent / MANIFEST_NAME).exists():
        raise ContextError(f"directory {os.fspath(directory)!r} lies in another context: save it next to that one")
    cache.freeze()  # removes first what an interrupted forward has added
    if not cache.tokens:
        raise ValueError("the cache has nothing to save: run a prompt through it first")
    made_for = cache.identity
    if made_for is None or tokenizer is not None or full_digest:
        made_for = full_fingerprint(cache.given_model, tokenizer, every_byte=full_digest)
    check_adapters(cache.adapters or {}, made_for)
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
    """Raise `ContextMismatchError` unless the adapters are those that the cache's content was made with."""
    for name, value in before.items():
        if now.get(name) != value:
            raise ContextMismatchError(
                f"{name} is {now.get(name, 'absent')} now and was {value} when the cache was filled: save it with the "
                "adapters as they were, or reset() it"
            )


class _Writer:
    """Writes the data files of one context into a directory that nobody else uses."""

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
        """Write a frozen store's `live` records to a file named by their digest. Returns its entry and the tags.
        `size`: the layer's record size."""
        provisional = f"{secrets.token_hex(16)}.records"
        guard = store.export(self._folder_fd, provisional, live)
        name = records_name(guard, store.record_bytes)
        os.rename(provisional, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        own_size = 0 if store.record_bytes == size else store.record_bytes
        entry = RecordsFile(file=name, records=len(guard.tags), guard=guard.describe(), record_bytes=own_size)
        return entry, torch.from_numpy(guard.tags.copy())

    def state(self, name: str, tree: Any, binding: bytes = b"") -> StateFile:
        """Write `tree` to a file named by its digest; encryption binds it to `name` and `binding`."""
        self._account.observe(_SAVING, (2 if self._key is None else 3) * tensor_bytes(tree))
        data = pack(tree)
        if self._key is not None:
            data = encrypt(self._key, data, name.encode() + b"\0" + binding)
        entry = StateFile(file=f"{xxhash.xxh3_128_hexdigest(data)}.state", bytes=len(data))
        if entry.file not in self._written:  # empty layers have equal states
            write_file(self._folder_fd, entry.file, [data])
            self._written.add(entry.file)
        return entry
