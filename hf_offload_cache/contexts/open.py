"""A saved context as a cache: nothing is computed, and no keys and values are read before a step asks for them, but
where host memory is to have them all."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import OURS, BudgetError, ContextError, ContextMismatchError, not_whole, shown
from ..memory.machine import check_descriptors, free_memory
from ..model.decoder_blocks import attention_devices
from ..model.fingerprint import check_fingerprint
from ..stores.encryption import load_key, open_guard
from ..stores.engines import open_named
from ..stores.freezable import FreezableStore
from ..stores.memory import MemoryStore
from .captured_trees import LayersOf, check_history, check_kinds, check_layer, token_ids
from .configuration import opened_config
from .folder import reading
from .kept_layers import restore_kept
from .manifest import VERSION, LayerEntry, Manifest, records_name
from .protocol import ContextCache, StoredLayer
from .reader import ContextReader, NoRoomError, check_digest, check_key, manifest_in, most_of_cache

Opened = TypeVar("Opened", bound=ContextCache)

_DOES_NOT_FIT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)
"""What a value that nobody could have captured makes of the code that takes it, where no check was made for it."""
_NO_MEMORY = "can't allocate memory"
"""In the RuntimeError of torch's allocator for the CPU. It says nothing about the context."""
_OPENING = "opening"
"""The owner in the account of what one layer's state takes until it is taken over."""


@contextlib.contextmanager
def closed_on_error(cache: ContextCache) -> Iterator[None]:
    """Close `cache` on any exception inside, including Ctrl-C. The exception is unchanged, with a note if closing fails
    too."""
    try:
        yield
    except BaseException as error:
        try:
            cache.close()
        except Exception as failed:
            error.add_note(f"closing the cache failed too: {type(failed).__name__}: {failed}")
        raise


def open_context(
    cls: type[Opened],
    directory: str | os.PathLike[str],
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    tokenizer: Any,
    fields: dict[str, Any],
    expect: str | None = None,
) -> Opened:
    """See `OffloadCache.open`."""
    place = os.fspath(directory)
    if expect is not None:
        check_digest(expect)

    def read(folder_fd: int) -> Opened:
        manifest = manifest_in(folder_fd, place)
        if expect is not None and manifest.digest != expect:
            raise ContextMismatchError(
                f"{place}: its digest is {manifest.digest} and expect is {expect}: an older or another context has "
                "taken its place, or it was saved again since; give the digest that the last save returned"
            )
        if manifest.cache != cls.__name__:
            raise ContextMismatchError(f"{place}: cache is {manifest.cache}, not {cls.__name__}: open it with that")
        check_fingerprint(manifest.identity, model, tokenizer)
        config, notes = opened_config(cls, manifest, model, memory, path, fields)
        key = None if config.encryption_key is None else load_key(config.encryption_key)
        check_key(manifest, key, place)
        cache = cls(model, path=path, config=config)
        with closed_on_error(cache):
            taking = functools.partial(cache.storage.account.observe, _OPENING)
            _fill(cache, ContextReader(folder_fd, place, key, taking), manifest)
            taking(0)
            if notes:
                cache.warn_of(notes)
        return cache

    return reading(directory, read)


def _fill(cache: ContextCache, reader: ContextReader, manifest: Manifest) -> None:
    """Let `cache`, a new one, hold what the context holds."""
    if len(manifest.layers) != len(cache.layers):
        raise ContextMismatchError(f"the context has {len(manifest.layers)} layers and the model {len(cache.layers)}")
    stored = sum(layer.num_stores for layer in cache.layers if isinstance(layer, StoredLayer))
    check_descriptors(sum(len(layer.parts) for layer in manifest.layers) + stored)
    devices, layers = attention_devices(cache.model), LayersOf(cache.model)
    batch, tokens = manifest.batch, manifest.tokens
    try:
        whole = reader.state(manifest.state, "cache", binding=manifest.binding, most=most_of_cache(batch, tokens))
        token_ids(whole, batch, tokens)
        cache.restore(whole)
        for layer_idx, (entry, layer) in enumerate(zip(manifest.layers, cache.layers, strict=True)):
            name = f"layer {layer_idx}"
            if (entry.kind == "offloaded") != isinstance(layer, StoredLayer):
                raise ContextMismatchError(f"{name}: the context has it {entry.kind}, the model's is {layer!r}")
            device = devices.get(layer_idx, cache.model.device)
            tree = reader.state(entry.state, name, device)
            check_layer(tree, entry, name)
            if isinstance(layer, StoredLayer):
                if manifest.version < VERSION:
                    tree["layer"] = layer.upgraded(tree["layer"])
                check_kinds(tree["layer"], layer.capture(), name)
                layers.check_kept(tree["layer"].get("linear") or {}, layer_idx, batch, name)
                check_history(tree["layer"], entry, batch, tokens, layers, name)
                _fill_layer(layer, tree, _open_stores(cache, reader, entry, tree["tags"], name), device)
            else:
                layers.check_kept(tree["layer"], layer_idx, batch, name)
                restore_kept(layer, tree["layer"], name, rows=batch)
            _check_held(layer, manifest, name)
    except _DOES_NOT_FIT as error:
        if isinstance(error, (*OURS, torch.OutOfMemoryError, torch.AcceleratorError)):
            raise
        if isinstance(error, RuntimeError) and _NO_MEMORY in str(error):
            raise NoRoomError(f"the context does not fit into memory: {shown(str(error), 200)}") from error
        raise ContextError(
            f"the context does not hold together: {type(error).__name__}: {shown(str(error), 200)}; save it anew"
        ) from error


def _open_stores(
    cache: ContextCache, reader: ContextReader, entry: LayerEntry, tags: list[torch.Tensor], name: str
) -> list[FreezableStore]:
    """The stores of a layer's records, the caller's. Raises `ContextError`, `StoreError`."""
    storage = cache.storage
    with contextlib.ExitStack() as undo:
        stores: list[FreezableStore] = []
        for part, tag in zip(entry.parts, tags, strict=True):
            guard = open_guard(part.guard, tag.cpu().numpy(), reader.key, cache.config.verify)
            if part.file != records_name(guard, entry.size_of(part)):
                raise ContextError(f"{name}: its tags are not those of {part.file} in {reader.place!r}")
            place = reader.folder_fd, part.file, part.records, entry.size_of(part)
            store = open_named(storage.engine, *place, name, storage.ring, guard)
            if cache.config.records_apart:
                with contextlib.closing(store):
                    _check_room(int(store.written.sum()) * store.record_bytes, name)
                    store = MemoryStore.copy_of(store, guard.fresh(), pinned=storage.pinned)
            stores.append(store)
            undo.callback(store.close)
        undo.pop_all()
    return stores


def _check_room(nbytes: int, name: str) -> None:
    """Raises `BudgetError` where records of so many bytes do not fit into host memory."""
    free = free_memory()
    if free is not None and nbytes > free:
        raise BudgetError(
            f"{name}: engine='memory' keeps its records in host memory, which takes {nbytes:,} bytes, and {free:,} are "
            "free: open the context with engine='auto'"
        )


def _fill_layer(layer: StoredLayer, tree: dict[str, Any], stores: list[FreezableStore], device: torch.device) -> None:
    """Let a new layer hold its state over `stores`, which are closed if that fails."""
    with contextlib.ExitStack() as undo:
        for store in stores:
            undo.callback(store.close)
        layer.restore(tree["layer"], stores, device)
        undo.pop_all()


def _check_held(layer: Any, manifest: Manifest, name: str) -> None:
    """Raises `ContextError` unless what a layer holds now is as much as the manifest says."""
    if isinstance(layer, StoredLayer) and not layer.batch:
        return  # no token ever came to it
    if isinstance(layer, StoredLayer) and layer.batch != manifest.batch:
        raise not_whole(name, f"it holds {layer.batch} sequences, the manifest says {manifest.batch}")
    if isinstance(layer, StoredLayer):
        length = layer.length
    else:
        length = getattr(layer, "get_seq_length", lambda: manifest.tokens)()  # linear states tell none
    if length != manifest.tokens or isinstance(length, bool):
        raise not_whole(name, f"it holds {shown(length)} tokens, the manifest says {manifest.tokens}")
    keys = None if isinstance(layer, StoredLayer) else getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor):
        visible, keeps_more = layer.get_mask_sizes(1)[0] - 1, getattr(layer, "record_past", False)
        if keys.shape[2] < visible or (keys.shape[2] > visible and not keeps_more):
            raise not_whole(name, f"it has keys of {keys.shape[2]} tokens, and its window shows {visible}")
