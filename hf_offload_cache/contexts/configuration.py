"""The configuration of a context: which fields are saved, and what opening makes of them and of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import OffloadConfig, parse_memory
from ..errors import ConfigError, ContextError, shown
from ..model.geometry import Geometry
from ..stores.engines import resolve_engine
from .manifest import Manifest
from .protocol import ContextCache

# Prompts as contexts keep them, and what a model lets a context do with one

_KINDS = ("image", "video", "audio", "vision", "boi", "boa")


def encode(ids: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    """Ids (B, T) with those of padding apart from all tokens, as `TokenLog` keeps them: int64 (B, T)."""
    ids = ids.detach().to("cpu", torch.int64)
    return ids.numpy() if mask is None else torch.where(mask.to("cpu") != 0, ids, -3 - ids).numpy()


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Leading columns in which two (B, ·) are equal in all rows."""
    length = min(one.shape[1], other.shape[1])
    differ = (one[:, :length] != other[:, :length]).any(0)
    return int(differ.argmax()) if differ.any() else length


def placeholders(model: Any) -> list[int]:
    """Ids of tokens that stand for something else than text."""
    fields = vars(model.config).items()
    ends = ("_token_id", "_token_index")
    return [value for name, value in fields if name.startswith(_KINDS) and name.endswith(ends) and type(value) is int]


def prompt_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, least: int, model: Any
) -> tuple[np.ndarray, int]:
    """A prompt (T,) or (B, T) as contexts keep it, and how many of its tokens may match. Raises `ConfigError`."""
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
    wanted = encode(ids, mask)
    stands_for = np.isin(wanted, placeholders(model)).any(0)
    return wanted, min(wanted.shape[1] - 1, int(stands_for.argmax()) if stands_for.any() else wanted.shape[1])


MOST_RECENT = 2**16
"""Tokens that a saved configuration may ask to keep in memory, or that the context has: it is not the user's word."""
_SPARE_TOKENS = 4096
"""Tokens a sequence beyond those saved that a budget is planned for, when no `max_context` is given."""


def saved_fields(config: OffloadConfig) -> dict[str, Any]:
    """The fields that go with a context: all but those of a machine or a run."""
    config = config.as_saved()
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in config.of_a_run}


def form_fields(config_class: type[OffloadConfig], config: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields that decide with which others a context can be opened: `exact`, and its stored format."""
    names = sorted({"exact", *config_class.stored_format} - set(config_class.of_a_run))
    return {name: config[name] for name in names if name in config}


def fields_in_states(config_class: type[OffloadConfig]) -> dict[str, Any]:
    """The fields that a context has in the states of its layers, with their defaults."""
    in_states = set(config_class.stored_format) & set(config_class.of_a_run)
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name in in_states}


def opened_config(
    cls: type[ContextCache],
    manifest: Manifest,
    model: Any,
    memory: int | str | None,
    path: str | Path | None,
    fields: dict[str, Any],
) -> tuple[OffloadConfig, list[str]]:
    """The saved configuration with the user's fields on top, and the messages about it if it was made for `memory`.
    Raises `ConfigError`, `BudgetError`, and `ContextError` for a saved configuration that sets a field which only the
    user may set."""
    config_class = cls.config_class
    saved = _checked(config_class, manifest)
    _check_fixed(config_class, saved, fields)
    exact = fields.get("exact", saved.get("exact", False))
    if saved.get("exact", False) and not exact:
        raise ConfigError(
            f"exact is {saved['exact']!r} in this context, which keeps nothing to select by: open it with exact=True"
        )
    if exact:
        saved = {name: value for name, value in saved.items() if name not in config_class.not_beside_exact}
    if memory is None:
        return config_class.load(None, {**saved, **fields}), []
    fields, geometry = resolve_engine(fields, path), Geometry.of(model)
    context = fields.get("max_context") or manifest.tokens + _SPARE_TOKENS
    batch = fields.get("max_batch") or manifest.batch
    limit = parse_memory(memory, geometry.full_kv_bytes(context, batch))
    limits = {"memory": limit, "max_context": context, "max_batch": batch}
    whole = config_class.load(None, {**saved, **fields, **limits})
    plan, given = cls.plan(geometry, whole, context, batch), {**saved, **fields}
    if plan.peak_bytes > limit:
        given = {**cls.stored_fields(config_class.load(None, saved), geometry), **fields}
        whole = cls.fit(geometry, limit, context, batch, dict(given))
        plan = cls.plan(geometry, whole, context, batch)
    return whole, cls.notes(plan, whole, geometry, given)


def _checked(config_class: type[OffloadConfig], manifest: Manifest) -> dict[str, Any]:
    """The fields saved. Raises `ContextError` for what no configuration has that was saved."""
    own = {field.name for field in dataclasses.fields(config_class)} - set(config_class.of_a_run)
    saved = dict(manifest.config)
    try:
        if strange := sorted(saved.keys() - own):
            raise ConfigError(f"it has the field {shown(repr(strange[0]))}")
        if missing := sorted(own - saved.keys()):
            raise ConfigError(f"it has no field {missing[0]!r}")
        config = config_class.load(None, saved)
        most = max(MOST_RECENT, manifest.tokens)
        for name in ("num_recent", "num_sinks", "num_selected"):
            if (getattr(config, name, None) or 0) > most:
                raise ConfigError(f"{name} is {getattr(config, name):,}, above {most:,}")
    except ConfigError as error:
        raise ContextError(f"the configuration in the manifest is none that was saved: {error}") from error
    return saved


def _as_saved(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_fixed(config_class: type[OffloadConfig], saved: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises `ConfigError` for a field of the user's that what is stored has another value of."""
    for name in config_class.stored_format:
        if name in fields and name in saved and _as_saved(fields[name]) != _as_saved(saved[name]):
            raise ConfigError(
                f"{name} is fixed in a saved context, to {saved[name]!r}, and cannot be {fields[name]!r}: leave it out"
            )
    for name, default in fields_in_states(config_class).items():
        if fields.get(name, default) != default:
            raise ConfigError(
                f"{name} is fixed in a saved context, which holds what was made with it, and cannot be "
                f"{fields[name]!r}: leave it out"
            )
