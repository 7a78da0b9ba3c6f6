"""A saved context as a cache: nothing is computed, and no keys and values are read before a step asks for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..config import OffloadConfig, parse_memory
from ..core.kept_layers import restore_kept
from ..core.offload_layer import OffloadLayer
from ..errors import ConfigError, ContextError, ContextMismatchError
from ..memory.machine import check_descriptors
from ..memory.plan import default_rank, plan_memory
from ..model.attach import attention_devices
from ..model.geometry import Geometry
from ..stores.encryption import load_key, open_guard
from ..stores.engines import open_named, resolve_engine
from ..stores.freezable import FreezableStore
from .captured import check_cache, check_layer, check_whole
from .folder import reading
from .identity import check_identity
from .manifest import LayerEntry, Manifest, records_name
from .reader import ContextReader, check_key, manifest_in
from .save import NOT_SAVED

if TYPE_CHECKING:
    from ..core.offload_cache import OffloadCache

Opened = TypeVar("Opened", bound="OffloadCache")

_STAYS = ("group_size", "rank", "summary_dtype", "exact", "selection", "num_sinks", "target_mass")
"""Fields that a budget does not change."""
MOST_RECENT = 2**16
"""Latest tokens that a saved configuration may ask to keep in memory: it is not the user's word."""
FIXED = ("group_size", "rank", "summary_dtype", "adapter")
"""Fields of the configuration that lie in the stored format."""
_OPENING = "opening"
"""The owner in the account of what one layer's state takes until it is taken over."""
_SPARE_TOKENS = 4096
"""Tokens a sequence beyond those saved that a budget is planned for, when no `max_context` is given."""


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
        manifest = manifest_in(folder_fd, place)
        if manifest.cache != cls.__name__:
            raise ContextMismatchError(f"{place}: cache is {manifest.cache}, not {cls.__name__}: open it with that")
        check_identity(manifest.identity, model, tokenizer)
        config = _config(cls, manifest, model, memory, path, fields)
        key = None if config.encryption_key is None else load_key(config.encryption_key)
        check_key(manifest, key, place)
        cache = cls(model, path=path, config=config)
        try:
            taking = functools.partial(cache.shared.account.observe, _OPENING)
            _fill(cache, ContextReader(folder_fd, place, key, taking), manifest)
            taking(0)
        except BaseException:
            cache.close()
            raise
        return cache

    return reading(directory, read)


def _config(
    cls: type[OffloadCache],
    manifest: Manifest,
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    fields: dict[str, Any],
) -> OffloadConfig:
    """The configuration saved, with the user's fields on top. Raises `ConfigError`, `BudgetError`, and `ContextError`
    for a saved one that names what is the user's alone."""
    own = {field.name for field in dataclasses.fields(cls.config_class)} - set(NOT_SAVED)
    saved = dict(manifest.config)
    try:
        if strange := sorted(saved.keys() - own):
            raise ConfigError(f"it has the field {strange[0]!r}")
        config = cls.config_class.load(None, saved)
        if config.num_recent > MOST_RECENT:
            raise ConfigError(f"num_recent is {config.num_recent:,}, above {MOST_RECENT:,}")
    except ConfigError as error:
        raise ContextError(f"the configuration in the manifest is none that was saved: {error}") from error
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
    fields, geometry = resolve_engine(fields, path), Geometry.of(model)
    context = fields.get("max_context") or manifest.tokens + _SPARE_TOKENS
    batch = fields.get("max_batch") or manifest.batch
    limit = parse_memory(memory, geometry.full_kv_bytes(context, batch))
    limits = {"memory": limit, "max_context": context, "max_batch": batch}
    whole = cls.config_class.load(None, {**saved, **fields, **limits}, model)
    if plan_memory(geometry, whole, context, batch).peak_bytes <= limit:
        return whole
    if "rank" in saved and saved["rank"] is None and not exact:  # what its layers have, which is not to be chosen anew
        saved["rank"] = max(default_rank(form) for form in geometry.forms(saved["group_size"]))
    stay = {name: saved[name] for name in _STAYS if saved.get(name) is not None}
    return cls.config_class.fit(geometry, limit, context, batch, {**stay, **fields})


def _open_stores(
    cache: OffloadCache, reader: ContextReader, entry: LayerEntry, tags: list[torch.Tensor], name: str
) -> list[FreezableStore]:
    """The stores of a layer's records, the caller's. Raises `ContextError`, `StoreError`."""
    shared = cache.shared
    with contextlib.ExitStack() as undo:
        stores: list[FreezableStore] = []
        for part, tag in zip(entry.parts, tags, strict=True):
            guard = open_guard(part.guard, tag.cpu().numpy(), reader.key, cache.config.verify)
            if part.file != records_name(guard, entry.record_bytes):
                raise ContextError(f"{name}: its tags are not those of {part.file} in {reader.place!r}")
            place = reader.folder_fd, part.file, part.records, entry.record_bytes
            stores.append(open_named(shared.engine, *place, name, shared.ring, guard))
            undo.callback(stores[-1].close)
        undo.pop_all()
    return stores


def _fill(cache: OffloadCache, reader: ContextReader, manifest: Manifest) -> None:
    """Let `cache`, a new one, hold what the context holds."""
    if len(manifest.layers) != len(cache.layers):
        raise ContextMismatchError(f"the context has {len(manifest.layers)} layers and the model {len(cache.layers)}")
    check_descriptors(sum(len(layer.parts) for layer in manifest.layers) + len(cache.offloaded))
    devices = attention_devices(cache.model)
    try:
        whole = reader.state(manifest.state, "cache", binding=manifest.binding)
        check_cache(whole, manifest)
        cache.restore(whole)
        for layer_idx, (entry, layer) in enumerate(zip(manifest.layers, cache.layers, strict=True)):
            name = f"layer {layer_idx}"
            if (entry.kind == "offloaded") != isinstance(layer, OffloadLayer):
                raise ContextMismatchError(f"{name}: the context has it {entry.kind}, the model's is {layer!r}")
            device = devices.get(layer_idx, cache.model.device)
            tree = reader.state(entry.state, name, device)
            check_layer(tree, layer, entry, manifest, name)
            if isinstance(layer, OffloadLayer):
                stores = _open_stores(cache, reader, entry, tree["tags"], name)
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
