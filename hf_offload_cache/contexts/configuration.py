"""A context's prompt and configuration: token ids in comparable form, saved fields, and their merge with the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import OffloadConfig, parse_memory, parse_size
from ..errors import ConfigError, ContextError, shown
from ..model.geometry import Geometry
from ..model.media import Medium, placeholder_ids, whole
from .manifest import Manifest

_KINDS = ("image", "video", "audio", "vision", "boi", "boa")


class Text(NamedTuple):
    """Sequences of tokens, with the pictures and sounds that some of them stand for."""

    ids: np.ndarray
    """(B, T), as `encode` returns them."""
    media: tuple[Medium, ...] = ()


def encode(ids: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    """Ids (B, T) int64, with -3 - id at padding, as `TokenLog` stores them."""
    ids = ids.detach().to("cpu", torch.int64)
    return ids.numpy() if mask is None else torch.where(mask.to("cpu") != 0, ids, -3 - ids).numpy()


def common_prefix(first: Text, second: Text) -> int:
    """Number of leading columns in which all rows of two texts are equal, without a part of a picture or sound."""
    length = min(first.ids.shape[1], second.ids.shape[1])
    differ = (first.ids[:, :length] != second.ids[:, :length]).any(0)
    length = int(differ.argmax()) if differ.any() else length
    length = min(length, *(medium.start for medium in {*first.media} ^ {*second.media}), length)
    return whole((*first.media, *second.media), length)


def unidentified(text: Text, model: Any) -> np.ndarray:
    """Which tokens (B, T) stand for images, video or sound of unknown content."""
    unknown = np.isin(text.ids, placeholders(model))
    for medium in text.media:
        unknown[medium.row, medium.start : medium.stop] = False
    return unknown


def placeholders(model: Any) -> list[int]:
    """Ids of tokens that stand for images, video or sound. If it is not known which ids do, also those around them."""
    if (known := placeholder_ids(model)) is not None:
        return known
    fields = vars(model.config).items()
    ends = ("_token_id", "_token_index")
    return [value for name, value in fields if name.startswith(_KINDS) and name.endswith(ends) and type(value) is int]


def prompt_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, least: int, model: Any, media: Sequence[Medium] = ()
) -> tuple[Text, int]:
    """A prompt (T,) or (B, T), encoded, and how many of its tokens may match. Raises `ConfigError`."""
    ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    mask = attention_mask[None] if attention_mask is not None and attention_mask.ndim == 1 else attention_mask
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise ConfigError(f"input_ids must be token ids (T,) or (B, T), got {tuple(input_ids.shape)} {input_ids.dtype}")
    if mask is not None and mask.shape != ids.shape:
        raise ConfigError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise ConfigError(f"least must be a whole number of at least 1, got {least!r}")
    wanted = Text(encode(ids, mask), tuple(media))
    unknown, most = unidentified(wanted, model).any(0), ids.shape[1] - 1
    return wanted, whole(wanted.media, min(most, int(unknown.argmax())) if unknown.any() else most)


MOST_RECENT = 2**16
"""Tokens that an untrusted saved configuration may keep in memory, unless the context has more."""
_SPARE_TOKENS = 4096
"""Tokens per sequence beyond the saved ones that a budget is planned for without `max_context`."""


def saved_fields(config: OffloadConfig) -> dict[str, Any]:
    """The fields that a context stores: all but those of a machine or a run."""
    config = config.as_saved()
    names = [field.name for field in dataclasses.fields(config) if field.name not in config.of_a_run]
    return {name: getattr(config, name) for name in names}


def form_fields(config_class: type[OffloadConfig], config: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields that limit with which others a context can be opened: `exact` and its stored format."""
    names = sorted({"exact", *config_class.stored_format} - set(config_class.of_a_run))
    return {name: config[name] for name in names if name in config}


def fields_in_states(config_class: type[OffloadConfig]) -> dict[str, Any]:
    """The fields that a context stores in the states of its layers, with their defaults."""
    in_states = set(config_class.stored_format) & set(config_class.of_a_run)
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name in in_states}


def opened_config(
    cls: type[Any],
    manifest: Manifest,
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    fields: dict[str, Any],
) -> tuple[OffloadConfig, list[str]]:
    """The saved configuration, overridden by the user's fields, and notes about it if it was planned for `memory`.
    Raises `ConfigError`, `BudgetError`, and `ContextError` for a saved field that only the user may set."""
    config_class: type[OffloadConfig] = cls.config_class
    saved = _checked(config_class, manifest)
    _check_fixed(config_class, saved, fields)
    exact = fields.get("exact", saved.get("exact", False))
    if saved.get("exact", False) and not exact:
        raise ConfigError(
            f"exact is {saved['exact']!r} in this context, which keeps nothing to select by: open it with exact=True"
        )
    if exact:
        saved = {name: value for name, value in saved.items() if name not in config_class.not_with_exact}
    return planned_config(cls, saved, (manifest.tokens, manifest.batch), model, memory, path, fields)


def planned_config(
    cls: type[Any], saved: dict[str, Any], size: tuple[int, int], model: Any, memory: int | str | None,
    path: str | Path | None, fields: dict[str, Any],
) -> tuple[OffloadConfig, list[str]]:  # fmt: skip
    """As `opened_config`, for the `saved` fields of a context of `size`, tokens a sequence and sequences."""
    config_class: type[OffloadConfig] = cls.config_class
    if memory is None:
        return config_class.load(None, {**saved, **fields}), []
    geometry = Geometry.of(model)
    context = fields.get("max_context") or size[0] + _SPARE_TOKENS
    batch = fields.get("max_batch") or size[1]
    engine = cls.choose_store(geometry, (None, context, batch), {**saved, **fields}, path)["engine"]
    fields = {**fields, "engine": engine}
    limit = parse_memory(memory, geometry.full_kv_bytes(context, batch))
    limits = {"memory": limit, "max_context": context, "max_batch": batch}
    for usual in ({}, {"candidates": False}):  # that a small budget has none is not stored
        config = config_class.load(None, {**saved, **usual, **fields, **limits})
        plan, given = cls.plan(geometry, config, context, batch), {**saved, **fields}
        host = config.host_memory
        if plan.peak_bytes <= limit and (host is None or plan.host_bytes <= parse_size(host)):
            break
    else:
        given = {**cls.stored_fields(config_class.load(None, saved), geometry), **fields}
        config = cls.fit(geometry, limit, context, batch, dict(given))
        plan = cls.plan(geometry, config, context, batch)
    return config, cls.notes(plan, config, geometry, given)


def _checked(config_class: type[OffloadConfig], manifest: Manifest) -> dict[str, Any]:
    """The saved fields, with the defaults of those that were added later. Raises `ContextError` unless `saved_fields`
    could have returned them."""
    names = {field.name for field in dataclasses.fields(config_class)} - set(config_class.of_a_run)
    saved = {config_class.renamed.get(name, name): value for name, value in manifest.config.items()}
    saved = {**{name: getattr(config_class, name) for name in config_class.added_later}, **saved}
    try:
        if unknown := sorted(saved.keys() - names):
            raise ConfigError(f"it has the field {shown(repr(unknown[0]))}")
        if missing := sorted(names - saved.keys()):
            raise ConfigError(f"it has no field {missing[0]!r}")
        config = config_class.load(None, saved)
        most = max(MOST_RECENT, manifest.tokens)
        for name in ("num_recent", "num_sinks", "num_selected"):
            if (getattr(config, name, None) or 0) > most:
                raise ConfigError(f"{name} is {getattr(config, name):,}, above {most:,}")
    except ConfigError as error:
        raise ContextError(f"the configuration in the manifest was not saved by this library: {error}") from error
    return saved


def _as_saved(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_fixed(config_class: type[OffloadConfig], saved: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise `ConfigError` for a field of the user that the stored format fixes to another value."""
    for name in config_class.stored_format:
        if name in fields and name in saved and _as_saved(fields[name]) != _as_saved(saved[name]):
            raise ConfigError(
                f"{name} is fixed in a saved context, to {saved[name]!r}, and cannot be {fields[name]!r}: leave it out"
            )
    for name, default in fields_in_states(config_class).items():
        if fields.get(name, default) != default:
            raise ConfigError(
                f"{name} is fixed in a saved context, which stores what was made with it, and cannot be "
                f"{fields[name]!r}: leave it out"
            )
