"""Opening a saved context as a cache. Computes nothing, and reads no keys and values unless host memory is to store
them all."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OURS, BudgetError, ContextError, ContextMismatchError, UnsupportedModelError, not_whole, shown
from ..history.position_history import check_form
from ..history.records import RecordFormat
from ..history.state import DTYPES, is_tensor
from ..memory.machine import check_descriptors, free_memory
from ..model.conversation import beyond_positions
from ..model.fingerprint import check_fingerprint
from ..model.geometry import LayerShape, seen_layers, stated_shape
from ..model.media import Medium
from ..model.place import attention_devices
from ..stores.base import FreezableStore
from ..stores.encryption import load_key, open_guard
from ..stores.engines import open_named
from ..stores.memory import MemoryStore
from .configuration import opened_config
from .folder import open_folder, reading
from .manifest import LayerEntry, Manifest, check_digest, manifest_in, records_name
from .state import ContextReader, NoRoomError, StoredLayer, check_key, most_of_cache

# ----------------------------------------------------------------- checks of a context's trees against its manifest

_DIGEST = re.compile(r"[0-9a-f]{32}")


def token_ids(tree: Any, batch: int, tokens: int) -> torch.Tensor:
    """The token ids (batch, tokens), int64, in a cache's state. Raises `ContextError`."""
    ids: Any = tree.get("ids") if isinstance(tree, dict) else None
    if not tokens or not is_tensor(ids, (batch, tokens), torch.int64):
        raise not_whole("cache", f"its token ids are {shown(ids)}, the manifest says {(batch, tokens)} torch.int64")
    checked: torch.Tensor = ids
    return checked


def media_in(tree: Any, ids: torch.Tensor) -> tuple[Medium, ...]:
    """The pictures and sounds in a cache's state with these ids (B, T): none in contexts of text, or of earlier
    versions. Raises `ContextError`."""
    given: Any = tree.get("media", [])
    if not isinstance(given, list):
        raise not_whole("cache", f"its media are {shown(given)}")
    for one in given:
        fits = isinstance(one, tuple) and len(one) == 4 and all(type(number) is int for number in one[:3])
        fits = fits and 0 <= one[0] < len(ids) and 0 <= one[1] < one[2] <= ids.shape[1]
        if not fits or not isinstance(one[3], str) or _DIGEST.fullmatch(one[3]) is None:
            raise not_whole("cache", f"one of its media is {shown(one)}")
    return tuple(Medium(*one) for one in given)


class LayersOf:
    """Shapes of a model's layers: of keys and values according to its configuration, and of other state according to
    what one token leaves in a twin without data."""

    def __init__(self, model: Any) -> None:
        self._model, stated = model, stated_shape(model.config.get_text_config(decoder=True))
        self._stated = None if stated is None else _sizes_of(stated)

    @functools.cached_property
    def _seen(self) -> list[Any] | None:
        return seen_layers(self._model)

    def have_sizes(self, sizes: tuple[int, int, int, int]) -> bool:
        """Whether a layer has keys and values of (Hk, Dk, Hv, Dv); also true if that is unknown."""
        if sizes == self._stated or self._seen is None:
            return True
        both = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self._seen]
        return sizes in [
            (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
            for keys, values in both
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4
        ]

    def check_kept(self, tree: Any, layer_idx: int, rows: int, name: str) -> None:
        """Raise `ContextError` unless a transformers layer's keys, values and linear states have the model's shapes for
        `rows` sequences."""
        keys, values = tree.get("keys"), tree.get("values")
        if isinstance(keys, torch.Tensor) or isinstance(values, torch.Tensor):
            fit = isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
            fit = fit and keys.ndim == values.ndim == 4 and keys.dtype == values.dtype in DTYPES
            if not fit or not len(keys) == len(values) == rows or keys.shape[2] != values.shape[2]:
                raise not_whole(name, f"its keys and values are {shortened(keys)} and {shortened(values)}")
            if not self.have_sizes((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])):
                raise not_whole(name, f"its keys and values are {shortened(keys)}, and the model's have other sizes")
        states = {part: values for part, values in tree.items() if isinstance(values, dict) and values}
        if not any(isinstance(value, torch.Tensor) for values in states.values() for value in values.values()):
            return
        twin = None if self._seen is None or layer_idx >= len(self._seen) else self._seen[layer_idx]
        growing = not type(twin).__module__.startswith("transformers.cache_utils")  # a model's own: grows with tokens
        for part, values in states.items():
            usual: Any = getattr(twin, part, None)
            for place, value in values.items() if isinstance(usual, dict) else ():
                other = usual.get(place)
                both = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
                if part == "conv_kernel_size":  # one token's may be shorter
                    width = states.get("conv_states", {}).get(place)
                    fits = isinstance(width, torch.Tensor) and width.ndim > 1 and value == width.shape[-1]
                    fits = fits or (width is None and value == other)
                elif growing:
                    fits = not isinstance(value, torch.Tensor) or (value.ndim > 1 and len(value) == rows)
                    fits = fits and (not both or (value.ndim == other.ndim and value.shape[2:] == other.shape[2:]))
                elif isinstance(other, torch.Tensor) or isinstance(value, torch.Tensor):
                    last = -1 if part == "conv_states" else None
                    fits = both and value.ndim == other.ndim > 1 and value.dtype in DTYPES and len(value) == rows
                    fits = fits and value.shape[1:last] == other.shape[1:last]
                else:
                    fits = type(value) is type(other) and (isinstance(value, bool) or value == other)
                if not fits:
                    message = f"{part} {shown(place)} is {shortened(value)}, and the model's {shortened(other)}"
                    raise not_whole(name, message)


def _sizes_of(shape: LayerShape) -> tuple[int, int, int, int]:
    return shape.num_key_heads, shape.key_dim, shape.num_value_heads, shape.value_dim


def check_history(tree: Any, entry: LayerEntry, batch: int, tokens: int, layers: LayersOf, name: str) -> None:
    """Raise `ContextError` unless a captured layer has keys and values of the model's shapes, and the tokens and record
    size in the manifest. Comes before any file is opened or memory is allocated. An empty layer, or one that captures
    something else as "history", is left to the code that restores it."""
    history = tree.get("history")
    if not isinstance(history, dict) or not isinstance(history.get("form"), dict):
        return
    form, tail, heads = RecordFormat(**history["form"]), history.get("tail"), tree.get("heads", 1)
    check_form(form, name)
    if type(heads) is not int or not 1 <= heads < 2**20:
        raise not_whole(name, f"each sequence has {shown(heads)} rows")
    sizes = (heads * form.num_key_heads, form.key_dim, heads * form.num_value_heads, form.value_dim)
    if not layers.have_sizes(sizes):
        raise not_whole(name, f"its keys and values have (heads, width, heads, width) {sizes}, the model's do not")
    if any(entry.size_of(part) > form.record_bytes for part in entry.parts) or (
        entry.parts and entry.record_bytes != form.record_bytes
    ):
        raise not_whole(name, f"a record of its form has {form.record_bytes:,} bytes, {entry.record_bytes:,} are named")
    if not isinstance(tail, torch.Tensor) or tail.ndim != 3 or len(tail) != batch * heads:
        raise not_whole(name, f"its latest tokens are {shown(tail)}, of {batch} sequences of {heads} rows each")
    if history.get("length") != tokens or isinstance(history["length"], bool):
        raise not_whole(name, f"it has {shown(history.get('length'))} tokens, the manifest says {tokens}")


def check_layer(tree: Any, entry: LayerEntry, name: str) -> None:
    """Raise `ContextError` unless `tree` is the state of a layer, with the tags of its records."""
    if not isinstance(tree, dict) or not isinstance(tree.get("tags"), list) or not isinstance(tree.get("layer"), dict):
        raise not_whole(name, "its state is not a layer's")
    tags = tree["tags"]
    if len(tags) != len(entry.parts):
        raise not_whole(name, f"it has tags of {len(tags)} files of records, the manifest names {len(entry.parts)}")
    for tag, part in zip(tags, entry.parts, strict=True):
        if not isinstance(tag, torch.Tensor) or tag.ndim != 2 or len(tag) != part.records:
            raise not_whole(name, f"the tags of {part.file} are {shown(tag)}, and it has {part.records} records")


def check_kinds(tree: Any, like: dict[str, Any], name: str) -> None:
    """Raise `ContextError` unless `tree` has the entries of `like`, which a new layer captured, each of its kind. The
    contents of dictionaries are left to the code that restores them."""
    if not isinstance(tree, dict) or like.keys() != tree.keys():
        differ = sorted(map(str, like.keys() ^ tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(name, f"entries are missing, or not those of such a layer: {differ}")
    for field, value in tree.items():
        expected = like[field]
        if not (isinstance(expected, dict) and isinstance(value, dict)) and not is_of_kind(value, expected, (dict,)):
            raise not_whole(name, f"{field} is {shortened(value)}, and a new layer has {shortened(expected)}")


def is_of_kind(value: Any, expected: Any, late: tuple[type, ...]) -> bool:
    """Whether a layer may have `value` if a new one has `expected`; for None also a tensor, or a type in `late`."""
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
    """`shown`, with quotes around a text."""
    return shown(repr(value) if isinstance(value, str) else value)


# ------------------------------------------------------- transformers' own layers, such as sliding windows and linear

_LATE = (torch.dtype, torch.device)
"""Types of values, besides tensors, that a layer gets with the first token."""


def capture_kept(layer: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of `layer` (those in `names`; None: all) as a tree, without copies; do not change it."""
    return {name: getattr(layer, name) for name in (vars(layer) if names is None else names)}


def select_kept_rows(layer: Any, rows: torch.Tensor, batch: int, change: str, argument: Any) -> dict[str, Any]:
    """Attributes of `layer`, of `batch` sequences, after sequence i becomes the current sequence `rows[i]`; `layer`
    itself is unchanged.

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
    """A copy of dictionaries and lists, at all depths, with the same items."""
    if isinstance(value, dict | list):
        value = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _containers(item)
    return value


def _tensors(layer: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor in the attributes of `layer`, with the mapping or sequence that has it, and its key or index."""
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
    """Restore `layer`, a new layer of the same kind, from the state in `tree`. Tensors are copied.

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
        # a model's own layer may count its tokens, and have empty parts
        foreign = not type(layer).__module__.startswith(("transformers.cache_utils", __package__.split(".")[0]))
        _check(tree, like, place, dir(type(layer)), rows, foreign=foreign)
        if tree.get("is_initialized") and not like.get("is_initialized"):
            for part in ("keys", "values"):
                tensor = tree.get(part, torch.empty(0, dtype=torch.float32, device="cpu"))
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    raise not_whole(place, f"its {part} are {shortened(tensor)}")
    for name, value in tree.items():
        setattr(layer, name, _copied(value))


def _check(
    tree: Any, like: dict[Any, Any], place: str, taken: Collection[str], rows: int | None, *, foreign: bool
) -> None:
    """`taken`: names that only entries of a new layer may have. `foreign`: numbers and empty tensors are allowed if a
    new layer has None."""
    if not isinstance(tree, dict) or like.keys() - tree.keys():
        missing = sorted(map(str, like.keys() - tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(place, f"entries are missing: {missing}")
    for field, value in tree.items():
        if field not in like and (not isinstance(field, str) or field in taken):
            raise not_whole(place, f"it has the entry {field!r}, which such a layer does not have")
        expected = like.get(field)
        if isinstance(expected, dict) and expected and isinstance(value, dict):
            _check(value, expected, f"{place}, {field}", (), rows, foreign=foreign)
            continue
        # entries numbered by an int, such as sizes of states, may be ints
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


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


# ------------------------------------------------------------------------------------------------------------- open

_DOES_NOT_FIT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)
"""Errors of restoring a value that no layer could have captured, if no check refused it."""
_NO_MEMORY = "can't allocate memory"
"""In the RuntimeError of torch's allocator for the CPU, which says nothing about the context."""
_OPENING = "opening"
"""Owner in the account of the memory of one layer's state, until the layer books it."""


@contextlib.contextmanager
def closed_on_error(cache: Any) -> Iterator[None]:
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
    cls: type[Any],
    directory: str | os.PathLike[str],
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    tokenizer: Any,
    fields: dict[str, Any],
    expect: str | None = None,
) -> Any:
    """See `OffloadCache.open`."""
    place = os.fspath(directory)
    if expect is not None:
        check_digest(expect)

    def read(folder_fd: int) -> Any:
        cache, reader, manifest, notes = _new(cls, folder_fd, place, model, memory, path, tokenizer, fields, expect)
        with closed_on_error(cache):
            _fill(cache, reader, manifest)
            cache.storage.account.observe(_OPENING, 0)
            for note in notes:
                cache.warn(note)
        return cache

    return reading(directory, read)


def _new(
    cls: type[Any], folder_fd: int, place: str, model: Any, memory: int | str | None, path: str | Path | None,
    tokenizer: Any, fields: dict[str, Any], expect: str | None,
) -> tuple[Any, ContextReader, Manifest, list[str]]:  # fmt: skip
    """An empty cache for the context that `folder_fd` is open on, what reads it, its manifest, and notes."""
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
    taking = functools.partial(cache.storage.account.observe, _OPENING)
    return cache, ContextReader(folder_fd, place, key, taking), manifest, notes


class LayersInTurn:
    """A context whose layers are open one at a time, to be read, so that only one takes memory. It stays on this
    context if that is replaced. The arguments and errors are those of `open_context`.

    Attributes:
        cache: has the open layer, and no tokens; to be closed.
        has_model_state: the model's own code keeps a state for the context, besides an offset of positions.
        on_error: called with the error of a layer that cannot be opened, before it is raised.
    """

    def __init__(
        self, cls: type[Any], directory: str | os.PathLike[str], model: Any, path: str | Path | None,
        fields: dict[str, Any], expect: str | None = None,
    ) -> None:  # fmt: skip
        self._folder = open_folder(directory)
        try:
            made = _new(cls, self._folder.fd, os.fspath(directory), model, None, path, None, fields, expect)
            self.cache, self._reader, self._manifest, _ = made
        except BaseException:
            self._folder.close()
            raise
        with closed_on_error(self), _not_whole():
            self.has_model_state = beyond_positions(_state(self._reader, self._manifest)["model"])
            _check_layers(self.cache, self._manifest)
        self._devices, self._sizes = attention_devices(self.cache.model), LayersOf(self.cache.model)
        self.on_error: Callable[[Exception], object] = lambda error: None

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
        return int(self.cache.memory_bytes)

    @contextlib.contextmanager
    def layer(self, layer_idx: int) -> Iterator[Any]:
        """Layer `layer_idx`, open until the end of the `with`."""
        try:
            with _not_whole():
                _open_layer(self.cache, self._reader, self._manifest, layer_idx, self._devices, self._sizes)
        except Exception as error:
            self.on_error(error)
            raise
        self.cache.storage.account.observe(_OPENING, 0)
        try:
            yield self.cache.layers[layer_idx]
        finally:
            self.cache.layers[layer_idx].close()

    def close(self) -> None:
        """Close the cache and the folder. Idempotent."""
        try:
            self.cache.close()
        finally:
            self._folder.close()


def _fill(cache: Any, reader: ContextReader, manifest: Manifest) -> None:
    """Fill a new cache from the context."""
    _check_layers(cache, manifest)
    devices, sizes = attention_devices(cache.model), LayersOf(cache.model)
    with _not_whole():
        cache.restore(_state(reader, manifest))
        for layer_idx in range(len(cache.layers)):
            _open_layer(cache, reader, manifest, layer_idx, devices, sizes)


def _check_layers(cache: Any, manifest: Manifest) -> None:
    if len(manifest.layers) != len(cache.layers):
        raise ContextMismatchError(f"the context has {len(manifest.layers)} layers and the model {len(cache.layers)}")
    stored = sum(layer.num_stores for layer in cache.layers if isinstance(layer, StoredLayer))
    check_descriptors(sum(len(layer.parts) for layer in manifest.layers) + stored)


def _state(reader: ContextReader, manifest: Manifest) -> Any:
    """The state besides the layers."""
    batch, tokens = manifest.batch, manifest.tokens
    state = reader.state(manifest.state, "cache", binding=manifest.binding, most=most_of_cache(batch, tokens))
    media_in(state, token_ids(state, batch, tokens))
    return state


def _open_layer(
    cache: Any, reader: ContextReader, manifest: Manifest, layer_idx: int, devices: dict[int, torch.device],
    sizes: LayersOf,
) -> None:  # fmt: skip
    """Fill one layer of a new cache."""
    entry, layer, name = manifest.layers[layer_idx], cache.layers[layer_idx], f"layer {layer_idx}"
    if (entry.kind == "offloaded") != isinstance(layer, StoredLayer):
        raise ContextMismatchError(f"{name}: it is {entry.kind} in the context, the model's is {layer!r}")
    batch, device = manifest.batch, devices.get(layer_idx, cache.model.device)
    tree = reader.state(entry.state, name, device)
    check_layer(tree, entry, name)
    if isinstance(layer, StoredLayer):
        check_kinds(tree["layer"], layer.capture(), name)
        sizes.check_kept(tree["layer"].get("linear") or {}, layer_idx, batch, name)
        check_history(tree["layer"], entry, batch, manifest.tokens, sizes, name)
        _fill_layer(layer, tree, _open_stores(cache, reader, entry, tree["tags"], name), device)
    else:
        sizes.check_kept(tree["layer"], layer_idx, batch, name)
        restore_kept(layer, tree["layer"], name, rows=batch)
    _check_held(layer, manifest, name)


@contextlib.contextmanager
def _not_whole() -> Iterator[None]:
    """Raise errors of values that no layer could have captured as `ContextError`."""
    try:
        yield
    except _DOES_NOT_FIT as error:
        if isinstance(error, (*OURS, torch.OutOfMemoryError, torch.AcceleratorError)):
            raise
        if isinstance(error, RuntimeError) and _NO_MEMORY in str(error):
            raise NoRoomError(f"the context does not fit into memory: {shown(str(error), 200)}") from error
        raise ContextError(
            f"the context does not hold together: {type(error).__name__}: {shown(str(error), 200)}; save it anew"
        ) from error


def _open_stores(
    cache: Any, reader: ContextReader, entry: LayerEntry, tags: list[torch.Tensor], name: str
) -> list[FreezableStore]:
    """The stores of a layer's records; the caller owns them. Raises `ContextError`, `StoreError`."""
    storage = cache.storage
    with contextlib.ExitStack() as undo:
        stores: list[FreezableStore] = []
        for part, tag in zip(entry.parts, tags, strict=True):
            guard = open_guard(part.guard, tag.cpu().numpy(), reader.key, cache.config.verify)
            if part.file != records_name(guard, entry.size_of(part)):
                raise ContextError(f"{name}: its tags are not those of {part.file} in {reader.place!r}")
            place = reader.folder_fd, part.file, part.records, entry.size_of(part)
            store = open_named(storage.engine, *place, name, storage.ring, guard)
            if cache.config.records_apart or (storage.pinned and storage.engine == "memory"):
                with contextlib.closing(store):
                    _check_room(int(store.written.sum()) * store.record_bytes, name)
                    store = MemoryStore.copy_of(store, guard.fresh(), pinned=storage.pinned)
            stores.append(store)
            undo.callback(store.close)
        undo.pop_all()
    return stores


def _check_room(nbytes: int, name: str) -> None:
    """Raise `BudgetError` unless records of `nbytes` fit into host memory."""
    free = free_memory()
    if free is not None and nbytes > free:
        raise BudgetError(
            f"{name}: engine='memory' keeps its records in host memory, which takes {nbytes:,} bytes, and {free:,} are "
            "free: open the context with engine='auto'"
        )


def _fill_layer(layer: StoredLayer, tree: dict[str, Any], stores: list[FreezableStore], device: torch.device) -> None:
    """Restore a new layer over `stores`, which are closed if that fails."""
    with contextlib.ExitStack() as undo:
        for store in stores:
            undo.callback(store.close)
        layer.restore(tree["layer"], stores, device)
        undo.pop_all()


def _check_held(layer: Any, manifest: Manifest, name: str) -> None:
    """Raise `ContextError` unless a restored layer has the manifest's sequences and tokens."""
    stored = isinstance(layer, StoredLayer)
    if stored and not layer.batch:
        return  # it never had a token
    if stored and layer.batch != manifest.batch:
        raise not_whole(name, f"it has {layer.batch} sequences, the manifest says {manifest.batch}")
    # linear states have no length
    length = layer.length if stored else getattr(layer, "get_seq_length", lambda: manifest.tokens)()
    if length != manifest.tokens or isinstance(length, bool):
        raise not_whole(name, f"it has {shown(length)} tokens, the manifest says {manifest.tokens}")
    keys = None if stored else getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor):
        visible, keeps_more = layer.get_mask_sizes(1)[0] - 1, getattr(layer, "record_past", False)
        if keys.shape[2] < visible or (keys.shape[2] > visible and not keeps_more):
            raise not_whole(name, f"it has keys of {keys.shape[2]} tokens, and its window has {visible}")
