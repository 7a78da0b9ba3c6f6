"""A saved context as a cache: nothing is computed, and no keys and values are read before a step asks for them, but
where host memory is to have them all."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import OURS, BudgetError, ContextError, ContextMismatchError, UnsupportedModelError, not_whole, shown
from ..history.position_history import check_form
from ..history.records import RecordFormat
from ..history.state import DTYPES, is_tensor
from ..memory.machine import check_descriptors, free_memory
from ..model.fingerprint import check_fingerprint
from ..model.geometry import LayerShape, seen_layers, stated_shape
from ..model.place import attention_devices
from ..stores.base import FreezableStore
from ..stores.encryption import load_key, open_guard
from ..stores.engines import open_named
from ..stores.memory import MemoryStore
from .configuration import opened_config
from .folder import reading
from .manifest import LayerEntry, Manifest, records_name
from .protocol import ContextCache, StoredLayer
from .reader import ContextReader, NoRoomError, check_digest, check_key, manifest_in, most_of_cache

# Whether the trees of a context are what was captured of a cache: their kinds and the manifest's numbers

def token_ids(tree: Any, batch: int, tokens: int) -> torch.Tensor:
    """The token ids (batch, tokens), int64, in the state of a cache as a whole. Raises `ContextError`."""
    ids: Any = tree.get("ids") if isinstance(tree, dict) else None
    if not tokens or not is_tensor(ids, (batch, tokens), torch.int64):
        raise not_whole("cache", f"its token ids are {shown(ids)}, the manifest says {(batch, tokens)} torch.int64")
    found: torch.Tensor = ids
    return found


class LayersOf:
    """The contents of a model's layers: keys and values as its configuration says, and otherwise the state that one
    token leaves in a twin without data."""

    def __init__(self, model: Any) -> None:
        self._model, stated = model, stated_shape(model.config.get_text_config(decoder=True))
        self._stated = None if stated is None else _sizes_of(stated)

    @functools.cached_property
    def _seen(self) -> list[Any] | None:
        return seen_layers(self._model)

    def have_sizes(self, sizes: tuple[int, int, int, int]) -> bool:
        """Whether some layer has keys and values of (Hk, Dk, Hv, Dv); also true if that is unknown."""
        if sizes == self._stated or self._seen is None:
            return True
        both = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self._seen]
        return sizes in [
            (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
            for keys, values in both
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4
        ]

    def check_kept(self, tree: Any, layer_idx: int, rows: int, name: str) -> None:
        """Raise `ContextError` unless a transformers layer's keys, values and linear states are as the model makes them
        for `rows` sequences."""
        keys, values = tree.get("keys"), tree.get("values")
        if isinstance(keys, torch.Tensor) or isinstance(values, torch.Tensor):
            fit = isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
            fit = fit and keys.ndim == values.ndim == 4 and keys.dtype == values.dtype in DTYPES
            if not fit or not len(keys) == len(values) == rows or keys.shape[2] != values.shape[2]:
                raise not_whole(name, f"its keys and values are {shortened(keys)} and {shortened(values)}")
            if not self.have_sizes((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])):
                raise not_whole(name, f"its keys and values are {shortened(keys)}, and the model's have other sizes")
        states = {part: held for part, held in tree.items() if isinstance(held, dict) and held}
        if not any(isinstance(one, torch.Tensor) for held in states.values() for one in held.values()):
            return
        twin = None if self._seen is None or layer_idx >= len(self._seen) else self._seen[layer_idx]
        growing = not type(twin).__module__.startswith("transformers.cache_utils")  # a model's own: entries a token
        for part, held in states.items():
            usual: Any = getattr(twin, part, None)
            for place, one in held.items() if isinstance(usual, dict) else ():
                other = usual.get(place)
                if part == "conv_kernel_size":  # that of one token may be shorter
                    width = states.get("conv_states", {}).get(place)
                    fits = isinstance(width, torch.Tensor) and width.ndim > 1 and one == width.shape[-1]
                    fits = fits or (width is None and one == other)
                elif growing:
                    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
                    fits = not isinstance(one, torch.Tensor) or (one.ndim > 1 and len(one) == rows)
                    fits = fits and (not both or (one.ndim == other.ndim and one.shape[2:] == other.shape[2:]))
                elif isinstance(other, torch.Tensor) or isinstance(one, torch.Tensor):
                    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
                    last = -1 if part == "conv_states" else None
                    fits = both and one.ndim == other.ndim > 1 and one.dtype in DTYPES and len(one) == rows
                    fits = fits and one.shape[1:last] == other.shape[1:last]
                else:
                    fits = type(one) is type(other) and (isinstance(one, bool) or one == other)
                if not fits:
                    what = f"{part} {shown(place)} is {shortened(one)}, and the model's {shortened(other)}"
                    raise not_whole(name, what)


def _sizes_of(shape: LayerShape) -> tuple[int, int, int, int]:
    return shape.num_key_heads, shape.key_dim, shape.num_value_heads, shape.value_dim


def check_history(tree: Any, entry: LayerEntry, batch: int, tokens: int, layers: LayersOf, name: str) -> None:
    """Raise `ContextError` unless a captured layer holds keys and values as the model makes them, in the number and
    record size that the manifest states. The check comes before any of them is opened and before memory is allocated.

    A layer that holds nothing, or that captures something else as "history", is left to the code that restores it.
    """
    history = tree.get("history")
    if not isinstance(history, dict) or not isinstance(history.get("form"), dict):
        return
    form, tail, heads = RecordFormat(**history["form"]), history.get("tail"), tree.get("heads", 1)
    check_form(form, name)
    if type(heads) is not int or not 1 <= heads < 2**20:
        raise not_whole(name, f"each sequence has {shown(heads)} rows")
    own = (heads * form.num_key_heads, form.key_dim, heads * form.num_value_heads, form.value_dim)
    if not layers.have_sizes(own):
        raise not_whole(name, f"its keys and values have (heads, width, heads, width) {own}, and the model's have not")
    if any(entry.size_of(part) > form.record_bytes for part in entry.parts) or (
        entry.parts and entry.record_bytes != form.record_bytes
    ):
        raise not_whole(name, f"a record of its form has {form.record_bytes:,} bytes, {entry.record_bytes:,} are named")
    if not isinstance(tail, torch.Tensor) or tail.ndim != 3 or len(tail) != batch * heads:
        raise not_whole(name, f"its latest tokens are {shown(tail)}, of {batch} sequences of {heads} rows each")
    if history.get("length") != tokens or isinstance(history["length"], bool):
        raise not_whole(name, f"it holds {shown(history.get('length'))} tokens, the manifest says {tokens}")


def check_layer(tree: Any, entry: LayerEntry, name: str) -> None:
    """Raises `ContextError` unless `tree` is the state of a layer, with the tags of the records that it has."""
    if not isinstance(tree, dict) or not isinstance(tree.get("tags"), list) or not isinstance(tree.get("layer"), dict):
        raise not_whole(name, "its state is none of a layer")
    tags = tree["tags"]
    if len(tags) != len(entry.parts):
        raise not_whole(name, f"there are tags of {len(tags)} files of records, the manifest names {len(entry.parts)}")
    for tag, part in zip(tags, entry.parts, strict=True):
        if not isinstance(tag, torch.Tensor) or tag.ndim != 2 or len(tag) != part.records:
            raise not_whole(name, f"the tags of {part.file} are {shown(tag)}, and it has {part.records} records")


def check_kinds(tree: Any, like: dict[str, Any], name: str) -> None:
    """Raises `ContextError` unless `tree` has the entries of `like`, what a new layer captures, each of its kind.

    What is in a dictionary is left to whoever restores that part.
    """
    if not isinstance(tree, dict) or like.keys() != tree.keys():
        differ = sorted(map(str, like.keys() ^ tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(name, f"entries are missing, or are none of such a layer: {differ}")
    for field, value in tree.items():
        expected = like[field]
        if not (isinstance(expected, dict) and isinstance(value, dict)) and not is_of_kind(value, expected, (dict,)):
            raise not_whole(name, f"{field} is {shortened(value)}, and a new layer has {shortened(expected)}")


def is_of_kind(value: Any, expected: Any, late: tuple[type, ...]) -> bool:
    """Whether `value` may stand where a new layer has `expected`; for None also a tensor, or something of `late`."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if isinstance(value, torch.Tensor):
        return expected is None and value.ndim > 0
    if expected is None:
        return value is None or isinstance(value, late)
    if type(expected) is int:
        return type(value) is int and 0 <= value < np.iinfo(np.int64).max
    return type(value) is type(expected) or (isinstance(expected, float) and type(value) is int)


def shortened(value: Any) -> str:
    """What an error shows of a value."""
    return shown(repr(value) if isinstance(value, str) else value)


# Capture, check, restore and row selection for the state of transformers' own cache layers: sliding windows, linear

_LATE = (torch.dtype, torch.device)
"""Kinds of what a new layer has not yet and one that holds something has; beside tensors."""


def capture_kept(layer: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of `layer` (those in `names`; None: all) as a tree: no copies, not to be changed."""
    return {name: getattr(layer, name) for name in (vars(layer) if names is None else names)}


def select_kept_rows(layer: Any, rows: torch.Tensor, batch: int, change: str, argument: Any) -> dict[str, Any]:
    """Attributes of `layer`, which holds `batch` sequences, after sequence i becomes the current sequence `rows[i]`;
    `layer` itself is unchanged.

    Calls its own method `change` with `argument`, if it has one. Attributes that the method leaves unchanged are
    selected here, because some layers' methods skip state other than keys and values. Raises `UnsupportedModelError`
    for a tensor whose sequence dimension is unknown.
    """
    twin = copy.copy(layer)
    vars(twin).update((name, _containers(value)) for name, value in vars(layer).items())
    before = {(id(place), key): id(tensor) for place, key, tensor in _tensors(twin)}
    if (own := getattr(twin, change, None)) is not None:
        own(argument)
    for place, key, tensor in _tensors(twin):
        if before.get((id(place), key)) != id(tensor) or not tensor.ndim or not tensor.numel():
            continue
        if tensor.shape[0] != batch or isinstance(place, tuple):
            raise UnsupportedModelError(
                f"a {type(layer).__name__} keeps {key!r} of shape {tuple(tensor.shape)} for {batch} sequences, and it "
                "is not known which part is whose: leave the sequences as they are, or use transformers' DynamicCache"
            )
        place[key] = tensor.index_select(0, rows.to(tensor.device))
    return vars(twin)


def _containers(value: Any) -> Any:
    """A copy of dictionaries and lists, at all depths, with what they have in them."""
    if isinstance(value, dict | list):
        value = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _containers(item)
    return value


def _tensors(layer: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor in the attributes of `layer`, with the mapping or sequence that has it,
    and its key or index there."""
    places: list[Any] = [vars(layer)]
    while places:
        place = places.pop()
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if isinstance(value, torch.Tensor):
                yield place, key, value
            elif isinstance(value, dict | list | tuple):
                places.append(value)


def restore_kept(
    layer: Any,
    tree: Any,
    place: str,
    names: Iterable[str] | None = None,
    rows: int | None = None,
    *,
    known: bool = False,
) -> None:
    """Make `layer`, a new layer of the same kind, hold the state captured in `tree`. Tensors are copied.

    Args:
        place: name for errors.
        names: as for `capture_kept`.
        rows: number of sequences that every tensor has; None: unknown.
        known: `tree` was captured in this process, and is not checked.

    Raises `ContextError` with nothing changed unless `tree` has the entries of a new layer, each of its kind. Further
    entries are allowed, such as tensors and types that are added with the first token. Their names must not be names of
    the layer's class, so a context cannot replace a method.
    """
    if not known:
        like = capture_kept(layer, names)
        # a layer of a model's own may count what it holds, and have nothing in a part of it
        foreign = not type(layer).__module__.startswith(("transformers.cache_utils", __package__.split(".")[0]))
        _check(tree, like, place, dir(type(layer)), rows, foreign=foreign)
        if tree.get("is_initialized") and not like.get("is_initialized"):
            for part in ("keys", "values"):
                held = tree.get(part, torch.empty(0, dtype=torch.float32, device="cpu"))
                if not isinstance(held, torch.Tensor) or not held.is_floating_point():
                    raise not_whole(place, f"its {part} are {shortened(held)}")
    for name, value in tree.items():
        setattr(layer, name, _own(value))


def _check(
    tree: Any, like: dict[Any, Any], place: str, taken: Collection[str], rows: int | None, *, foreign: bool
) -> None:
    """`taken`: names that an entry may have only where a new layer has it. `foreign`: numbers and empty tensors may be
    where a new layer has None."""
    if not isinstance(tree, dict) or like.keys() - tree.keys():
        missing = sorted(map(str, like.keys() - tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(place, f"entries are missing: {missing}")
    for field, value in tree.items():
        if field not in like and (not isinstance(field, str) or field in taken):
            raise not_whole(place, f"it has the entry {field!r}, which a layer has not")
        expected = like.get(field)
        if isinstance(expected, dict) and expected and isinstance(value, dict):
            _check(value, expected, f"{place}, {field}", (), rows, foreign=foreign)
            continue
        # an int is one of several of its kind, such as sizes of states
        late = (*_LATE, int) if isinstance(field, int) or foreign else _LATE
        of_kind = is_of_kind(value, expected, late)
        if foreign and isinstance(value, int) and expected is None:
            of_kind = of_kind and is_of_kind(value, 0, ())
        if isinstance(expected, bool | int | str) and expected:  # such as the size of a window
            of_kind = of_kind and value == expected
        if isinstance(value, torch.Tensor) and rows is not None and expected is None:
            of_kind = of_kind and (rows in value.shape or (foreign and not value.numel()))
        if not of_kind:
            raise not_whole(place, f"{field} is {shortened(value)}, and a new layer has {shortened(expected)}")


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in value)
    return value


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
            for note in notes:
                cache.warn(note)
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
