"""What publishing and streaming ask of their arguments, and of a context and a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..contexts.configuration import placeholders
from ..core.cache import OffloadCache
from ..errors import ConfigError, ContextMismatchError
from ..history.autocast import autocast_dtype
from ..model.geometry import Geometry, LayerShape, stated_shape
from .stream_manifest import StreamManifest

_DAY = 86400.0


def check_arguments(
    into: Any, migrations: int | None, stage: float, silence: float, private: list[tuple[int, int]], path: Any,
    fields: dict[str, Any],
) -> None:  # fmt: skip
    """Of `stream_context`. Raises `ConfigError`."""
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
    """Token ranges (start, stop). Raises `ConfigError`: what is meant to be hidden is not to be published."""
    try:
        found = [(int(start), int(stop)) for start, stop in ranges]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"private must be pairs (start, stop) of tokens, got {ranges!r}") from error
    for start, stop in found:
        if not 0 <= start < stop:
            raise ConfigError(f"private must be pairs 0 <= start < stop, got ({start}, {stop})")
    return found


def check_text(cache: OffloadCache, ids: torch.Tensor) -> None:
    """Raises `ConfigError` for ids (T,) that do not say all of what a model is given."""
    others = torch.tensor(placeholders(cache.model), device="cpu", dtype=torch.int64)
    if bool((ids < 0).any()) or bool(torch.isin(ids.cpu(), others).any()):
        raise ConfigError(
            "input_ids stand for embeddings, images or sound, which they do not tell apart: such a context is not "
            "streamed"
        )


def check_shapes(manifest: StreamManifest, cache: OffloadCache) -> None:
    """Raises `ContextMismatchError` for chunks whose keys and values are not what the model of `cache` makes."""
    if manifest.layers != len(cache.layers):
        raise ContextMismatchError(f"the context has {manifest.layers} layers, the model {len(cache.layers)}")
    model, told = cache.model, (manifest.heads, manifest.key_dim, manifest.value_dim)
    stated = stated_shape(model.config.get_text_config(decoder=True))
    if stated is None or _sizes(stated) != told:  # some configurations do not say it
        found = {_sizes(shape) for shape in Geometry.of(model).layers}
        if found != {told}:
            raise ContextMismatchError(
                f"the context has keys and values of (heads, width of keys, of values) {told}, the model of "
                f"{sorted(found)}: it was published from another one"
            )
    dtype = autocast_dtype(model.device) or model.dtype
    if manifest.dtype != (name := str(dtype).removeprefix("torch.")):
        raise ContextMismatchError(
            f"the context has keys and values in {manifest.dtype}, the model computes in {name}: load it in that type"
        )


def _sizes(shape: LayerShape) -> tuple[int, int, int]:
    return shape.num_key_heads, shape.key_dim, shape.value_dim
