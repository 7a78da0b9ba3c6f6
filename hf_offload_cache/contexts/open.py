"""A saved context as a cache: nothing is computed, and no keys and values are read before a step asks for them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash

from ..attach import attention_devices
from ..config import OffloadConfig, parse_memory
from ..errors import ConfigError, ContextError, ContextMismatchError, CorruptRecordError, EncryptionKeyError
from ..geometry import Geometry
from ..kept import restore_kept
from ..layer import OffloadLayer
from ..machine import check_descriptors, free_memory
from ..stores.base import Store
from ..stores.encryption import decrypt, key_check, load_key, open_guard
from ..stores.engines import open_named
from .captured import check_cache, check_layer, check_whole
from .data_files import MANIFEST_NAME, read_small
from .folder import reading
from .identity import check_identity
from .manifest import MOST_MANIFEST_BYTES, LayerEntry, Manifest, StateFile, records_name
from .state import unpack

if TYPE_CHECKING:
    from ..cache import OffloadCache

Opened = TypeVar("Opened", bound="OffloadCache")

FIXED = ("group_size", "rank", "summary_dtype", "adapter")
"""Fields of the configuration that lie in the stored format."""
_SPARE_TOKENS = 4096
"""Tokens a sequence beyond those saved that a budget is planned for, when no `max_context` is given."""


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of the context in `directory`. Raises `ContextError`."""
    return reading(directory, functools.partial(_manifest, os.fspath(directory)))


def _manifest(place: str, folder_fd: int) -> Manifest:
    return Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), place)


def open_context(
    cls: type[Opened],
    directory: str | os.PathLike[str],
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    tokenizer: Any,
    fields: dict[str, Any],
) -> Opened:
    """See `OffloadCache.open`."""
    place = os.fspath(directory)

    def read(folder_fd: int) -> Opened:
        manifest = _manifest(place, folder_fd)
        if manifest.cache != cls.__name__:
            raise ContextMismatchError(f"{place}: cache is {manifest.cache}, not {cls.__name__}: open it with that")
        check_identity(manifest.identity, model, tokenizer)
        config = _config(cls, manifest, model, memory, fields)
        key = None if config.encryption_key is None else load_key(config.encryption_key)
        _check_key(manifest, key, place)
        cache = cls(model, path=path, config=config)
        try:
            _fill(cache, _Reader(folder_fd, place, key, config.verify), manifest)
        except BaseException:
            cache.close()
            raise
        return cache

    return reading(directory, read)


def _config(
    cls: type[OffloadCache], manifest: Manifest, model: Any, memory: int | str | None, fields: dict[str, Any]
) -> OffloadConfig:
    """The configuration saved, with the user's fields on top. Raises `ConfigError`, `BudgetError`."""
    saved = {**manifest.config, "adapter": None} if "rank" in manifest.config else dict(manifest.config)
    for name in FIXED:
        if name in fields and name in saved and fields[name] != saved[name]:
            raise ConfigError(
                f"{name} is fixed in a saved context, to {saved[name]!r}, and cannot be {fields[name]!r}: leave it out"
            )
    exact = fields.get("exact", saved.get("exact", False))
    if saved.get("exact", False) and not exact:
        raise ConfigError(
            f"exact is {saved['exact']!r} in this context, which has no compact keys to select by: open it with "
            "exact=True"
        )
    if exact and "selection" in saved:  # it has no effect then, and is refused beside it
        saved["selection"] = "default"
    if memory is None:
        return cls.config_class.load(None, {**saved, **fields}, model)
    geometry = Geometry.of(model)
    context = fields.get("max_context") or manifest.tokens + _SPARE_TOKENS
    batch = fields.get("max_batch") or manifest.batch
    limit = parse_memory(memory, geometry.full_kv_bytes(context, batch))
    stay = {name: saved[name] for name in (*FIXED, "exact", "selection") if saved.get(name) is not None}
    return cls.config_class.fit(geometry, limit, context, batch, {**stay, **fields})


def _check_key(manifest: Manifest, key: bytes | None, place: str) -> None:
    if manifest.key_check is None:
        if key is not None:  # what such a cache saved would hold these records as they are
            raise EncryptionKeyError(f"{place}: the context is not encrypted: leave encryption_key out")
        return
    if key is None:
        raise EncryptionKeyError(f"{place}: the context is encrypted: give encryption_key, the one it was saved with")
    if key_check(key) != manifest.key_check:
        raise EncryptionKeyError(f"{place}: encryption_key is not the one that the context was saved with")


class _Reader:
    """Reads the data files of one context, each checked."""

    def __init__(self, folder_fd: int, place: str, key: bytes | None, verify: bool) -> None:
        self._folder_fd = folder_fd
        self._place = place
        self._key = key
        self._verify = verify

    def state(self, entry: StateFile, name: str, device: torch.device, encrypted: bool) -> Any:
        """The tree of one state. Raises `CorruptRecordError` where it is not what was written."""
        free = free_memory()
        if free is not None and entry.bytes > free:
            message = f"{name}: its state in {self._place!r} takes {entry.bytes:,} bytes of memory, {free:,} are free"
            raise ContextError(f"{message}: the manifest is damaged, or made elsewhere")
        try:
            data: Any = read_small(self._folder_fd, entry.file, entry.bytes)
        except FileNotFoundError as error:
            message = f"{name}: its state {entry.file} in {self._place!r} is missing; save the context anew"
            raise CorruptRecordError(errno.ENOENT, message) from error
        if len(data) != entry.bytes or f"{xxhash.xxh3_128_hexdigest(data)}.state" != entry.file:
            raise CorruptRecordError(
                errno.EIO, f"{name}: its state {entry.file} in {self._place!r} is not what was written; save it anew"
            )
        if encrypted:
            assert self._key is not None
            data = decrypt(self._key, data, name.encode())
        return unpack(data, device, f"{name} in {self._place}")

    def records(self, entry: LayerEntry, tags: list[torch.Tensor], name: str, cache: OffloadCache) -> list[Store]:
        """The stores of a layer's records, opened."""
        stores: list[Store] = []
        try:
            for part, tag in zip(entry.parts, tags, strict=True):
                guard = open_guard(part.guard, tag.cpu().numpy(), self._key, self._verify)
                if part.file != records_name(guard, entry.record_bytes):
                    raise ContextError(f"{name}: its tags are not those of {part.file} in {self._place!r}")
                stores.append(
                    open_named(
                        cache.shared.engine, self._folder_fd, part.file, part.records, entry.record_bytes, name,
                        cache.shared.ring, guard,
                    )
                )  # fmt: skip
        except BaseException:
            for store in stores:
                store.close()
            raise
        return stores


def _fill(cache: OffloadCache, reader: _Reader, manifest: Manifest) -> None:
    """Let `cache`, a new one, hold what the context holds."""
    if len(manifest.layers) != len(cache.layers):
        raise ContextMismatchError(f"the context has {len(manifest.layers)} layers and the model {len(cache.layers)}")
    check_descriptors(sum(len(layer.parts) for layer in manifest.layers) + len(cache.offloaded))
    devices, encrypted = attention_devices(cache.model), manifest.key_check is not None
    host = torch.device("cpu")
    try:
        whole = reader.state(manifest.state, "cache", host, encrypted)
        check_cache(whole, manifest)
        cache.restore(whole)
        for layer_idx, (entry, layer) in enumerate(zip(manifest.layers, cache.layers, strict=True)):
            name = f"layer {layer_idx}"
            if (entry.kind == "offloaded") != isinstance(layer, OffloadLayer):
                raise ContextMismatchError(f"{name}: the context has it {entry.kind}, the model's is {layer!r}")
            device = devices.get(layer_idx, cache.model.device)
            tree = reader.state(entry.state, name, device, encrypted)
            check_layer(tree, layer, entry, manifest, name)
            if isinstance(layer, OffloadLayer):
                stores = reader.records(entry, tree["tags"], name, cache)
                with contextlib.ExitStack() as undo:
                    for store in stores:
                        undo.callback(store.close)
                    layer.restore(tree["layer"], stores, device)
                    undo.pop_all()
            else:
                restore_kept(layer, tree["layer"])
        check_whole(cache, manifest)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ContextError(f"the context does not hold together: {type(error).__name__}: {error}") from error
