"""A cache as a directory, in one atomic step. What is stored is linked in where the file system can, not copied."""

from __future__ import annotations

import dataclasses
import os
import secrets
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..kept import capture_kept
from ..layer import OffloadLayer
from ..report import MemoryAccount
from ..stores.base import Store
from ..stores.encryption import encrypt, key_check
from .data_files import MANIFEST_NAME, write_file
from .identity import identity
from .manifest import LayerEntry, Manifest, RecordsFile, StateFile, records_name
from .publish import publish
from .state import pack

if TYPE_CHECKING:
    from ..cache import OffloadCache

_LIMITS, _RUN = ("memory", "max_context", "max_batch"), ("trace", "engine", "verify", "io_timeout")
NOT_SAVED = (*_LIMITS, *_RUN, "encryption_key", "adapter")
"""Fields of the configuration that are of a machine or a run, not of a context; an adapter is in the layers' states."""
_SAVING = "saving"
"""The owner in the account of what one layer's state takes meanwhile. It is not refused: a budget that is used up is no
reason to lose a context."""


def save(
    cache: OffloadCache, directory: str | os.PathLike[str], *, overwrite: bool, tokenizer: Any, full_digest: bool
) -> None:
    """See `OffloadCache.save`."""
    if not cache.tokens:
        raise ValueError("the cache holds nothing to save: run a prompt through it first")
    made_for = identity(cache.model, tokenizer, full_digest=full_digest)
    cache.freeze()
    fields = {field.name: getattr(cache.config, field.name) for field in dataclasses.fields(cache.config)}

    def fill(folder_fd: int) -> None:
        writer = _Writer(folder_fd, cache.shared.key, cache.shared.account)
        manifest = Manifest(
            library=version("hf-offload-cache"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            cache=type(cache).__name__,
            tokens=cache.tokens,
            batch=cache.sequences,
            config={name: value for name, value in fields.items() if name not in NOT_SAVED},
            identity=made_for,
            key_check=None if cache.shared.key is None else key_check(cache.shared.key),
            state=writer.state("cache", cache.capture()),
            layers=tuple(writer.layer(layer_idx, layer) for layer_idx, layer in enumerate(cache.layers)),
        )
        write_file(folder_fd, MANIFEST_NAME, [manifest.to_bytes()])

    try:
        publish(directory, fill, overwrite=overwrite)
    finally:
        cache.shared.account.observe(_SAVING, 0)


class _Writer:
    """Puts the data files of one context into a directory that nobody else sees."""

    def __init__(self, folder_fd: int, key: bytes | None, account: MemoryAccount) -> None:
        self._folder_fd = folder_fd
        self._key = key
        self._account = account
        self._written: set[str] = set()

    def layer(self, layer_idx: int, layer: Any) -> LayerEntry:
        name = f"layer {layer_idx}"
        if not isinstance(layer, OffloadLayer):
            return LayerEntry(kind="kept", state=self.state(name, {"layer": capture_kept(layer), "tags": []}))
        stores = layer.freeze()
        parts, tags = zip(*[self._records(store) for store in stores], strict=True) if stores else ((), ())
        state = self.state(name, {"layer": layer.capture(), "tags": list(tags)})
        record_bytes = stores[0].record_bytes if stores else 0
        return LayerEntry(kind="offloaded", state=state, record_bytes=record_bytes, parts=parts)

    def _records(self, store: Store) -> tuple[RecordsFile, torch.Tensor]:
        """The records of a frozen store under their digest; and their tags."""
        provisional = f"{secrets.token_hex(16)}.records"
        guard = store.export(self._folder_fd, provisional)
        name = records_name(guard, store.record_bytes)
        os.rename(provisional, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        entry = RecordsFile(file=name, records=len(guard.tags), guard=guard.describe())
        return entry, torch.from_numpy(guard.tags.copy())

    def state(self, name: str, tree: Any) -> StateFile:
        """`tree` as a file under its digest; `name` is what an encrypted one is bound to."""
        data = pack(tree)
        self._account.observe(_SAVING, len(data) if self._key is None else 2 * len(data))
        if self._key is not None:
            data = encrypt(self._key, data, name.encode())
        entry = StateFile(file=f"{xxhash.xxh3_128_hexdigest(data)}.state", bytes=len(data))
        if entry.file not in self._written:  # layers that hold nothing are alike
            write_file(self._folder_fd, entry.file, [data])
            self._written.add(entry.file)
        return entry
