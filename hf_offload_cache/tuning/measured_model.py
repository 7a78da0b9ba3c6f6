"""Which model a table of `measure_caches` is of, and whether that is another one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from ..config import OffloadConfig
from ..errors import ConfigError
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from ..model.inner_model import inner_model

Identity = dict[str, str]
"""Named values; "name" is for people, others are equal for equal models."""


def shape_of(name: str, geometry: Geometry) -> Identity:
    """What is known of the model that people call `name` without its weights."""
    layers = [
        f"{len(list(alike))} of {one.num_heads} heads, {one.num_key_heads} x {one.key_dim} keys and "
        f"{one.num_value_heads} x {one.value_dim} values"
        for one, alike in itertools.groupby(geometry.layers)
    ]
    return {
        "name": name,
        "layers": "; ".join(layers),
        "layers that stay in memory": str(len(geometry.kept)),
        "dtype": str(geometry.dtype).removeprefix("torch."),
    }


def identity_of(model: Any) -> Identity:
    """Of a `PreTrainedModel`: its class and where it is from, its shape, and its `fingerprint`."""
    inner = inner_model(model)
    place = inner.config.name_or_path
    name = type(inner).__name__ + (f" ({place})" if place else "")
    return {**shape_of(name, Geometry.of(inner)), **fingerprint(inner)}


def check_model(stored: Any, path: str | Path, model: Identity) -> None:
    """Raises `ConfigError` where a table that lies at `path` is `stored` to be of another model than `model`, by what
    is known of that; both, and the value that differs, are named."""
    anew = "measure this one with `tune --compare`, or leave measured out for the table that is shipped"
    if not isinstance(stored, dict):
        raise ConfigError(f"measured: {str(path)!r} does not say which model it is of: {anew}")
    for field, value in model.items():
        if field != "name" and stored.get(field) != value:
            raise ConfigError(
                f"measured: {str(path)!r} is of another model: it was measured with {stored.get('name')}, and this is "
                f"{model['name']}: {field} was {stored.get(field)}, here it is {value}; {anew}"
            )


def written(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of caches as a table has them: plain JSON values; of a key nothing."""
    kept = {name: value for name, value in fields.items() if name != "encryption_key"}
    return {name: value if isinstance(value, bool | int | float | None) else str(value) for name, value in kept.items()}


def not_measured(fields: dict[str, Any], config: OffloadConfig) -> dict[str, Any]:
    """Those of `fields` that the shipped table was not measured with: other than the defaults of the class of `config`,
    and not of a run alone."""
    usual = type(config)()
    return {
        name: value for name, value in written(fields).items()
        if name not in config.of_a_run and value != getattr(usual, name)
    }  # fmt: skip


def check_fields(stored: Any, path: str | Path, fields: dict[str, Any]) -> None:
    """Raises `ConfigError` where a table that lies at `path` was measured with other fields than these: but for the
    engine, which is of a machine."""
    both = stored or {}, written(fields)
    then, now = ({name: value for name, value in each.items() if name != "engine"} for each in both)
    if then != now:
        raise ConfigError(
            f"measured: {str(path)!r} was measured with the fields {then}, and these are {now}: give the same ones, or "
            "measure with these"
        )
