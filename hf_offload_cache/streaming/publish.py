"""`publish_context`: a context as objects that any static server can serve."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ..contexts.configuration import form_fields, placeholders, saved_fields
from ..contexts.folder import reading
from ..contexts.manifest import manifest_in
from ..contexts.save import check_adapters
from ..contexts.state import pack
from ..core.cache import OffloadCache
from ..core.filling import Filling
from ..core.indexed_layer import IndexedLayer
from ..core.selective_layer import SelectiveLayer
from ..errors import (
    ConfigError,
    ContextError,
    ContextMismatchError,
    CorruptRecordError,
    EncryptionKeyError,
    ObjectError,
    UnsupportedModelError,
    shown,
)
from ..history.records import autocast_dtype
from ..model.fingerprint import full_fingerprint
from ..model.geometry import Geometry, LayerShape, stated_shape
from ..registry import class_named
from ..stores.encryption import KeySource, decrypt, encrypt, load_key
from .answers import Answer, place_error, without_secrets
from .codec import check_level, encode
from .objects import Objects
from .sparse_prefill import BLOCK, measure_active_blocks
from .stream_manifest import (
    ACTIVE,
    FITTED,
    MOST_BYTES,
    MOST_MANIFEST_BYTES,
    NAME,
    VERSION,
    WITH_INDEXERS,
    StreamManifest,
    StreamObject,
    binding,
    ids_digests,
)

_DAY = 86400.0


def check_arguments(
    into: Any, migrations: int | None, stage: float, silence: float, private: list[tuple[int, int]], path: Any,
    fields: dict[str, Any],
) -> None:  # fmt: skip
    """Check the arguments of `stream_context`. Raises `ConfigError`."""
    if not (isinstance(into, OffloadCache) or (isinstance(into, type) and issubclass(into, OffloadCache))):
        raise ConfigError(f"into must be a class of this library, or an empty cache of one, got {into!r}")
    if isinstance(into, OffloadCache) and (path is not None or fields):
        given = ", ".join([*(["path"] if path is not None else []), *fields])
        raise ConfigError(f"into is a cache already, which {given} cannot change: leave them out, or give its class")
    if migrations is not None and migrations < 0:
        raise ConfigError(f"migrations must be 0 or more, or None for any number, got {migrations}")
    for name, value in (("stage", stage), ("silence", silence)):
        if not isinstance(value, int | float) or not 0 < value <= _DAY:
            raise ConfigError(f"{name} must be more than 0 seconds, and at most a day of them, got {value!r}")
    check_ranges(private)


def as_ids(input_ids: Any) -> torch.Tensor:
    """Ids (T,) of one sequence, given as (T,) or (1, T). Raises `ConfigError`."""
    ids = torch.as_tensor(input_ids, device="cpu")
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise ConfigError(f"input_ids must be the ids of one sequence, (1, T), got {tuple(ids.shape)} {ids.dtype}")
    return ids


def check_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Token ranges (start, stop). Raises `ConfigError`, so that no text is published that was meant to be hidden."""
    try:
        pairs = [(int(start), int(stop)) for start, stop in ranges]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"private must be pairs (start, stop) of tokens, got {ranges!r}") from error
    for start, stop in pairs:
        if not 0 <= start < stop:
            raise ConfigError(f"private must be pairs 0 <= start < stop, got ({start}, {stop})")
    return pairs


def check_text(cache: OffloadCache, ids: torch.Tensor) -> None:
    """Raises `ConfigError` for ids (T,) with placeholders, which do not describe the model's complete input."""
    others = torch.tensor(placeholders(cache.model), device="cpu", dtype=torch.int64)
    if bool((ids < 0).any()) or bool(torch.isin(ids.cpu(), others).any()):
        raise ConfigError(
            "input_ids has placeholders of embeddings, images or sound, which are equal for different contents: such a "
            "context cannot be published or streamed; save and open it instead"
        )


def check_shapes(manifest: StreamManifest, cache: OffloadCache) -> None:
    """Raises `ContextMismatchError` for chunks with other keys and values than the model of `cache` has."""
    if manifest.layers != len(cache.layers):
        raise ContextMismatchError(f"the context has {manifest.layers} layers, the model {len(cache.layers)}")
    model, published = cache.model, (manifest.heads, manifest.key_dim, manifest.value_dim)
    stated = stated_shape(model.config.get_text_config(decoder=True))
    if stated is None or _sizes(stated) != published:  # some configurations do not state it
        shapes = {_sizes(shape) for shape in Geometry.of(model).layers}
        if shapes != {published}:
            raise ContextMismatchError(
                f"the context has keys and values of (heads, width of keys, of values) {published}, the model of "
                f"{sorted(shapes)}: it was published from another model"
            )
    if any(manifest.indexers) or any(layer.keeps_more for layer in cache.offloaded):
        widths = [shape.indexer_bytes // model.dtype.itemsize for shape in Geometry.of(model).layers]
        if widths != list(manifest.indexers):
            of_layers = shown(list(manifest.indexers), 200)
            raise ContextMismatchError(
                f"the context has indexer keys of the widths {of_layers}, the model of {shown(widths, 200)}: publish "
                "it anew, from this model"
            )
    dtype = autocast_dtype(model.device) or model.dtype
    if manifest.dtype != (name := str(dtype).removeprefix("torch.")):
        raise ContextMismatchError(
            f"the context has keys and values in {manifest.dtype}, the model computes in {name}: load it in that type"
        )


def _sizes(shape: LayerShape) -> tuple[int, int, int]:
    return shape.num_key_heads, shape.key_dim, shape.value_dim


def publish_context(
    context: OffloadCache | str | Path,
    url: str | Path,
    tokenizer: Any = None,
    key: KeySource | None = None,
    *,
    model: Any = None,
    level: str = "default",
    chunk_tokens: int = 1024,
    private: Iterable[tuple[int, int]] = (),
    active_mass: float | None = None,
    context_key: KeySource | Literal[False] | None = None,
    overwrite: bool = False,
    check: bool = True,
    options: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> StreamManifest:
    """Publish a context for `stream_context`: to a folder, or any fsspec URL.

    Objects are named by their content and written first, the manifest last: concurrent readers get the earlier
    publication. Stored entries are read back one layer at a time. Publishing the same context again reads the existing
    objects and writes only the damaged or missing ones; if it is encrypted, all of them are written again.

    In a local folder each file is replaced in one step and forced to the disk. A created folder has mode 0700, files
    have 0600, whatever the umask, and links at their names are not followed. Names are added to a URL's path, before
    its query. A store that refuses a request, or fails, is never treated as empty.

    Args:
        context: a cache with one sequence, or the directory of a saved one, with its `model`.
        tokenizer: compared when the context is loaded, if it is given there too.
        key: 32 bytes in a file, or a function that returns them: encrypts objects and manifest.
        level: how much is kept of keys and values: "lossless", "fine", "default", "small" or "smallest".
        chunk_tokens: tokens per object, 64 to 8192.
        private: token ranges (start, stop). Chunks that contain such tokens are not published, but computed when the
            context is loaded; state fitted to their queries, and the blocks they attend to, are not published either.
            Later chunks attended to them, and anyone who has the manifest can test texts against its digests of the ids
            up to each chunk's end: also give a `key` if that matters.
        active_mass: measure, by one more prefill, which blocks of keys have this share of the attention mass of each
            block of queries (the paper: .98), for `stream_context(..., sparse=True)`; None: do not.
        context_key: the directory's key; None: `key`. With either one the directory must be encrypted, because somebody
            may have replaced it; False: it is not encrypted, and `key` applies only to what is published.
        overwrite: replace the manifest of an existing publication; its objects stay, except those with wrong bytes.
        check: read back what was written, objects before the manifest is written, and compare sizes and digests. False:
            write access to the store is enough.
        options: options of the file system; for http(s) as in `stream_context`.
        on_progress: called with the number of published layers and their total.

    Raises `ConfigError`, `FileExistsError`, `UnsupportedModelError` for a model that keeps more than keys and values (a
    window, a state) or whose keys depend on the length of a forward, `ObjectError` with the store's answer,
    `StoreFullError`, and the errors of opening a directory.
    """
    check_level(level)
    if not 64 <= chunk_tokens <= 8192:
        raise ConfigError(f"chunk_tokens must be 64 to 8192, got {chunk_tokens}: use 1024")
    if active_mass is not None and not 0 < active_mass <= 1:
        raise ConfigError(f"active_mass must be above 0 and at most 1, got {active_mass}: use .98")
    if active_mass is not None and chunk_tokens % BLOCK:
        raise ConfigError(f"chunk_tokens must be a multiple of {BLOCK} with active_mass, got {chunk_tokens}: use 1024")
    hidden = check_ranges(private)
    if not isinstance(context, OffloadCache):
        with _opened(context, model, tokenizer, key if context_key is None else context_key or None) as cache:
            return publish_context(
                cache, url, tokenizer, key, level=level, chunk_tokens=chunk_tokens, private=hidden,
                active_mass=active_mass, overwrite=overwrite, check=check, options=options, on_progress=on_progress,
            )  # fmt: skip
    if context.storage.key is not None and key is None:
        raise EncryptionKeyError("the cache is encrypted, and would be published in the clear: give key=")
    secret = None if key is None else load_key(key)
    with Objects(str(url), options, check=check) as objects:
        before = _before(objects, overwrite)
        if reason := Filling.reason_against(context, with_indexers=True) or _reason_against(context):
            raise UnsupportedModelError(f"{type(context.model).__name__} cannot be streamed: {reason}")
        if context.sequences != 1 or not context.tokens:
            raise ConfigError(
                f"context must have one sequence, got {context.sequences} of {context.tokens} tokens"
            )
        if not bool(torch.as_tensor(context.attention_mask, device="cpu").all()):
            raise ConfigError("context has padding: publish a context that was prefilled without padding")
        if any(stop > context.tokens for _, stop in hidden):
            raise ConfigError(f"private must lie within the {context.tokens} tokens of the context, got {hidden}")
        if active_mass is not None and any(layer.keeps_more for layer in context.offloaded):
            raise ConfigError("active_mass must be None for a model that chooses by itself what it attends to")
        check_text(context, torch.as_tensor(context.input_ids, device="cpu")[0])
        publishing = _Publishing(context, objects, secret, level, chunk_tokens)
        manifest, data = publishing.run(tokenizer, hidden, active_mass, on_progress)
        objects.check()
        objects.write(NAME, data)
        if check:
            _check_manifest(objects, data, before, secret)
        return manifest


def _reason_against(cache: OffloadCache) -> str | None:
    """Why what the layers store cannot be published; None: it can."""
    forms = [layer.history.form for layer in cache.offloaded if layer.is_filled]
    if len({(form.num_key_heads, form.key_dim, form.num_value_heads, form.value_dim) for form in forms}) > 1:
        return "its layers have keys or values of different widths"
    indexed = [layer for layer in cache.offloaded if isinstance(layer, IndexedLayer)]
    if any(layer.indexer.positions is not None for layer in indexed):
        return "its layers keep positions besides keys and values, which are not streamed"
    dtypes = {layer.indexer.form[1] for layer in indexed if layer.indexer.form is not None}
    if not dtypes <= {form.dtype for form in forms}:
        return "its indexers' keys are of another type than its keys and values"
    return None


def _before(objects: Objects, overwrite: bool) -> bytes | None:
    """The earlier manifest; None: there is none, or with `overwrite`, it cannot be read. Raises `ObjectError`."""
    try:
        earlier = objects.read(NAME, MOST_MANIFEST_BYTES)
    except ObjectError as error:
        if overwrite:
            return None
        text = f"{error.strerror}; nothing was written, give overwrite=True to publish whatever is there"
        raise place_error(Answer(error.answer), text, number=error.errno) from error
    if earlier is not None and not overwrite:
        raise FileExistsError(
            f"{without_secrets(objects.url)} has a published context: name another folder, or give overwrite=True"
        )
    return earlier


def _check_manifest(objects: Objects, data: bytes, before: bytes | None, key: bytes | None) -> None:
    """Raises `DamagedObjectError` if the manifest is not `data`, unless another process has published there since."""
    stored = objects.read(NAME, MOST_MANIFEST_BYTES)
    if stored == data:
        return
    if stored is None or stored == before:
        raise objects.not_written(NAME, "it is missing" if stored is None else "the earlier one is still there")
    try:
        StreamManifest.parse(stored if key is None else decrypt(key, stored, binding("", "manifest")), objects.url)
    except (ContextError, CorruptRecordError) as error:
        raise objects.not_written(NAME, "its bytes differ") from error


def _opened(place: str | Path, model: Any, tokenizer: Any, key: KeySource | None) -> OffloadCache:
    if model is None:
        raise ConfigError(f"model is missing: give the model of the context in {str(place)!r}, or the opened cache")
    manifest = reading(place, lambda folder_fd: manifest_in(folder_fd, str(place)))
    cls = class_named(manifest.cache)
    if cls is None:
        raise ConfigError(
            f"{place}: its cache {manifest.cache} is not one of this library: open it, and publish the cache"
        )
    if key is not None and manifest.key_check is None:
        raise EncryptionKeyError(
            f"{place}: a key was given, but the context is not encrypted: somebody may have put it where an encrypted "
            "one was; to publish it, give context_key=False (--plain-context)"
        )
    fields = {} if key is None else {"encryption_key": key}
    cache: OffloadCache = cls.open(place, model, tokenizer=tokenizer, **fields)
    return cache


class _Publishing:
    def __init__(
        self, cache: OffloadCache, objects: Objects, key: bytes | None, level: str, chunk_tokens: int
    ) -> None:
        self._cache, self._objects, self._key = cache, objects, key
        self._level, self._chunk_tokens = level, chunk_tokens
        self._context = secrets.token_hex(16)

    def run(
        self, tokenizer: Any, private: list[tuple[int, int]], active_mass: float | None,
        on_progress: Callable[[int, int], object] | None,
    ) -> tuple[StreamManifest, bytes]:  # fmt: skip
        """Write the objects. Returns the manifest, and its bytes to write."""
        cache, size = self._cache, self._chunk_tokens
        identity = full_fingerprint(cache.given_model, tokenizer)
        check_adapters(cache.adapters or {}, identity)
        cache.contents.take_back()
        tokens, ids = cache.tokens, cache.capture()["ids"][0]
        chunks = range(-(-tokens // size))
        hidden = {chunk for chunk in chunks if overlaps(chunk, size, private)}
        fitted = None if private else self._put_optional(pack(self._fitted()), FITTED)
        active = None if private or active_mass is None else self._active(ids, active_mass)
        cells: list[list[StreamObject | None]] = [[None] for _ in chunks]
        form, indexers = cache.offloaded[0].history.form, []
        for done, layer in enumerate(cache.offloaded):
            width = layer.indexer.form[0] if isinstance(layer, IndexedLayer) and layer.indexer.form is not None else 0
            indexers.append(width)
            if done:  # the first layer is a projection of the tokens
                with cache.storage.audited():
                    keys, values = layer.whole()
                    indexer = cast(IndexedLayer, layer).indexer.whole()[0] if width else None
                for chunk in chunks:
                    part, cell = slice(chunk * size, (chunk + 1) * size), None
                    if chunk not in hidden:
                        own = None if indexer is None else indexer[part]
                        data = encode(keys[0, :, part], values[0, :, part], self._level, own)
                        cell = self._put(data, f"chunk {chunk} layer {done}")
                    cells[chunk].append(cell)
            if on_progress is not None:
                on_progress(done + 1, len(cache.offloaded))
        manifest = StreamManifest(
            cache=type(cache).__name__,
            config=form_of(cache),
            identity=identity,
            level=self._level,
            tokens=tokens,
            chunk_tokens=size,
            layers=len(cache.offloaded),
            heads=form.num_key_heads * cache.offloaded[0].rows.heads,
            key_dim=form.key_dim,
            value_dim=form.value_dim,
            dtype=str(form.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            version=WITH_INDEXERS if any(indexers) else VERSION,
            indexers=tuple(indexers) if any(indexers) else (),
            prefixes=tuple(ids_digests(ids, size)),
            cells=tuple(map(tuple, cells)),
            fitted=fitted,
            active=active,
            context=self._context,
        )
        if len(data := manifest.dumped()) > MOST_MANIFEST_BYTES:
            raise ConfigError(
                f"chunk_tokens={size} makes a manifest of {len(data):,} bytes, but readers accept "
                f"{MOST_MANIFEST_BYTES:,}: give a larger chunk_tokens"
            )
        return manifest, data if self._key is None else encrypt(self._key, data, binding("", "manifest"))

    def _fitted(self) -> dict[str, Any]:
        cache = self._cache
        fitted = {}
        for layer in cache.offloaded:
            if isinstance(layer, SelectiveLayer) and layer.predictor is not None:
                layer.end_prompt()
                if (state := layer.predictor.fitted_state()) is not None:
                    fitted[layer.layer_idx] = state
        states = [layer.state for layer in cache.offloaded]
        return {"fitted": fitted, "states": states}

    def _active(self, ids: torch.Tensor, mass: float) -> StreamObject | None:
        cache = self._cache
        blocks = measure_active_blocks(cache.given_model, ids, mass, path=cache.storage.directory)
        return self._put_optional(pack(blocks.captured()), ACTIVE)

    def _put_optional(self, data: bytes, name: str) -> StreamObject | None:
        """Publish an optional object; None: it is too large for readers."""
        if len(data) > MOST_BYTES // 2:
            text = f"{name} has {len(data):,} bytes, more than {MOST_BYTES // 2:,}: it is not published"
            self._cache.warn(text, stacklevel=4)
            return None
        return self._put(data, name)

    def _put(self, data: bytes, place: str) -> StreamObject:
        if self._key is not None:
            data = encrypt(self._key, data, binding(self._context, place))
        return StreamObject(name=self._objects.put(data), bytes=len(data))


def form_of(cache: OffloadCache) -> dict[str, Any]:
    """The configuration fields that fitted state depends on, as JSON values."""
    form: dict[str, Any] = json.loads(json.dumps(form_fields(cache.config_class, saved_fields(cache.config))))
    return form


def overlaps(chunk: int, size: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether a chunk of `size` tokens contains tokens of `ranges`."""
    return any(start < (chunk + 1) * size and stop > chunk * size for start, stop in ranges)
