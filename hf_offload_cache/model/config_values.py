"""Fields of configurations as values, and as text that is the same in every process for equal values."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

_ONLY_IN_TRAINING = ("dropout", "pdrop", "layerdrop")
"""Endings of fields that only training uses."""


def config_value(config: Any, name: str) -> Any:
    """A field of a configuration; None if it is absent, or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it for a field with several values
        return None


def flat(name: str, value: Any, ignored: Collection[str] = ()) -> dict[str, str]:
    """A value as text under its name; for a mapping, one entry per field, recursively.

    Drops None, because a later version may add a field that nobody has set yet, fields in `ignored` at any depth, and
    those that only training uses.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {name: text(value)}
    fields: dict[str, str] = {}
    for key, part in value.items():
        if str(key) not in ignored and not str(key).endswith(_ONLY_IN_TRAINING):
            fields |= flat(f"{name}.{key}", part, ignored)
    return fields


def text(value: Any) -> str:
    """A string as it is, everything else as JSON."""
    json_value = plain(value)
    return json_value if isinstance(json_value, str) else json.dumps(json_value, sort_keys=True)


def plain(value: Any) -> Any:
    """The value as JSON types, the same for equal values in every process."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # a theta of 10000 and one of 10000.0
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(part) for part in value), key=str)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{type(value).__module__}.{type(value).__qualname__}"  # its `repr` may contain an address
