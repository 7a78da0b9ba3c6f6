"""A cache within a budget: what it will hold, and the best fields that fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from ..config import OffloadConfig, at_least, parse_memory, parse_size
from ..errors import BudgetError, ConfigError, UnsupportedModelError, shown
from ..memory.fit import Search, fit_stream, slow_blocks
from ..memory.plan import LayerPlan, MemoryPlan, Planned
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from ..model.place import no_place
from ..stores.engines import resolve_engine
from .layer import OffloadLayer
from .plan import LayerKind, plan_cache, search, stream_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# A configuration from whatever names it: fields, an instance, a JSON of fields, or what tuning wrote

FORMAT = "hf_offload_cache tuning 1"
"""The `format` of what tuning writes. The number goes up when a reader of the old one would read the new one wrong."""

_FAMILY = FORMAT.rpartition(" ")[0]

Config = TypeVar("Config", bound=OffloadConfig)


def load_config(
    config_class: type[Config], config: Any, fields: dict[str, Any], model: Any = None
) -> Config:
    """As `OffloadConfig.load`; also from the path of a JSON that tuning wrote (KVSwap, appendix A.4): the row for
    `max_batch` and `max_context` among `fields`, or for the largest that were tuned for. One that was tuned for another
    model than `model` is refused. Raises `ConfigError`."""
    if isinstance(config, str | Path):
        values = config_class.read(config)
        if is_tuned(values):
            row = tuned_fields(values, Path(config), fields.get("max_context"), fields.get("max_batch"), model)
            known = {field.name for field in dataclasses.fields(config_class)}
            if foreign := sorted(row.keys() - known):
                raise ConfigError(
                    f"config: {str(config)!r} was tuned for {values.get('cache')}, and {config_class.__name__} has no "
                    f"{foreign[0]}: use that cache, or tune for this one"
                )
            return config_class.load(None, {**row, **fields})
    return config_class.load(config, fields)


def is_tuned(values: dict[str, Any]) -> bool:
    """Whether a JSON object is one of `Tuned.save`, of whatever version."""
    return str(values.get("format", "")).rpartition(" ")[0] == _FAMILY


def tuned_fields(
    values: dict[str, Any], path: Path, max_context: int | None, max_batch: int | None, model: Any = None
) -> dict[str, Any]:
    """The fields of a cache for `max_batch` sequences of `max_context` tokens (None: the largest tuned for).

    `values` is the object read from `path`; an adapter's place is taken relative to that file. The row is `nearest`'s.
    `memory` is the row's share of the budget: for as many sequences as are asked for or tuned for in that row,
    whichever is more, and never more than was tuned for.

    Raises `ConfigError`: another version, damaged, or made for another model than `model`; the field that differs is
    named.
    """
    if values["format"] != FORMAT:
        raise ConfigError(
            f"config: {str(path)!r} has the format {shown(repr(values['format']))} and this version reads {FORMAT!r}: "
            "tune again"
        )
    try:
        if model is not None:
            _check_model(values["model"], path, model)
        for row in values["rows"]:
            _check_counts(batch=row["batch"], context=row["context"])
        context = values["max_context"] if max_context is None else max_context
        batch = values["max_batch"] if max_batch is None else max_batch
        row = nearest(values["rows"], batch, context)
        _check_counts(max_batch=values["max_batch"], memory=values["memory"])
        fields = dict(row["fields"])
        if fields.get("adapter") is not None:
            fields["adapter"] = str(path.parent / fields["adapter"])
        sequences = min(values["max_batch"], max(batch, row["batch"]))
        memory = values["memory"] * sequences // values["max_batch"]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"config: {str(path)!r} is not what tuning wrote ({error!r}): tune again") from error
    return {**fields, "memory": memory, "max_context": context, "max_batch": batch}


def _check_counts(**values: Any) -> None:
    """Raises `TypeError` unless they are numbers that can be computed with."""
    for name, value in values.items():
        if type(value) is not int or not 0 < value < 2**63:
            raise TypeError(f"{name} is {shown(repr(value))}")


def nearest(rows: list[dict[str, Any]], batch: int, context: int) -> dict[str, Any]:
    """The row for (batch, context), or else the nearest: the one with the smallest |log2 of the ratio of the batches| +
    |log2 of the ratio of the contexts|, among those whose context is no shorter where there are any (a shorter one's
    compact keys would not fit the budget); of equals the one for more sequences."""
    if not isinstance(batch, int) or not isinstance(context, int) or min(batch, context) < 1:
        raise ConfigError(
            f"max_batch and max_context must be whole numbers of at least 1, got {batch!r} and {context!r}"
        )
    if not rows:
        raise IndexError("no rows")
    longer = [row for row in rows if row["context"] >= context] or rows

    def distance(row: dict[str, Any]) -> tuple[float, int]:
        apart = abs(math.log2(row["batch"] / batch)) + abs(math.log2(row["context"] / context))
        return round(apart, 9), -row["batch"]

    return min(longer, key=distance)


def _check_model(made_for: dict[str, str], path: Path, model: Any) -> None:
    for name, value in fingerprint(model).items():
        if made_for.get(name) != value:
            raise ConfigError(
                f"config: {str(path)!r} was tuned for another model: {name} is {value}, the tuned one's is "
                f"{shown(made_for.get(name))}; tune for this model"
            )


class Budgeted:
    """Class methods of a cache whose `layer_class` says what a layer plans."""

    config_class: ClassVar[type[OffloadConfig]] = OffloadConfig
    layer_class: ClassVar[type[OffloadLayer]] = OffloadLayer
    selects: ClassVar[bool] = False
    """Its steps select, unless the configuration is exact."""
    config: OffloadConfig
    why: str = ""
    """What was measured of this cache and of the others, where `offload_cache` chose it."""

    @classmethod
    def for_budget(
        cls,
        model: Any,
        memory: int | str,
        max_context: int,
        max_batch: int = 1,
        path: str | Path | None = None,
        **fields: Any,
    ) -> Self:
        """The best cache that never holds more than `memory` for up to `max_batch` sequences of `max_context` tokens.

        Args:
            memory: bytes, a size such as "300MiB", or a fraction of what `DynamicCache` would hold, such as "1/13".
            max_context: tokens a sequence, those that are generated included.
            max_batch: sequences, beams included.
            **fields: fields of the configuration that are to stay as they are; `fit` chooses the others.

        A step or a change of rows beyond what was planned raises `BudgetError` before anything of it is taken in; the
        cache goes on with what it holds. Raises as the constructor does, and `BudgetError` with the least memory that
        would do.
        """
        at_least(max_context=max_context, max_batch=max_batch)
        if (why := no_place(model)) is not None:
            raise UnsupportedModelError(why)
        geometry = Geometry.of(model)
        fields = resolve_engine(fields, path)
        limit = parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch))
        config = cls.fit(geometry, limit, max_context, max_batch, fields)
        plan = cls.plan(geometry, config, max_context, max_batch)
        cache: Any = cls(model, path=path, config=config)  # type: ignore[call-arg]
        cache.warn_of(cls.notes(plan, config, geometry, fields))
        return cache

    @classmethod
    def missing(cls) -> str | None:
        """What no cache of this class can do without, is not installed, and how to install it; None: all is there."""
        return None

    @classmethod
    def shortfalls(cls, config: OffloadConfig, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """What a cache of `config` will do worse than a user would expect, and with what it would not; for `plan` and
        `for_budget` to tell. `given`: the fields that the user chose."""
        return []

    @classmethod
    def notes(
        cls, plan: MemoryPlan, config: OffloadConfig, geometry: Geometry, given: Iterable[str] = ()
    ) -> list[str]:
        """Notes that `plan` prints below its table and `for_budget` warns of: the shortfalls, a slower prefill, and
        that no cache is needed. `given`: the fields that the user chose."""
        found = cls.shortfalls(config, geometry, given)
        if geometry.layers and "block_tokens" not in given and (slow := slow_blocks(config)) is not None:
            found.append(slow)
        return found if (needless := plan.needless) is None else [*found, needless]

    @classmethod
    def plan(cls, geometry: Geometry, config: OffloadConfig, max_context: int, max_batch: int) -> MemoryPlan:
        """The most that a cache of `config` holds, by owner, for `max_batch` sequences of up to `max_context` tokens.

        Raises `AdapterError` for an adapter file that cannot be read."""
        beside = cls.plan_beside(geometry, config, max_batch)
        selects = cls.selects and not config.exact
        return plan_cache(
            geometry, config, max_context, max_batch, cls.plan_layer, cls.layer_class.heads_apart, beside, selects
        )

    @classmethod
    def plan_layer(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """What one layer takes at most for sequences of `context` tokens; here, where it attends to all of them."""
        stream = LayerPlan(shared=Planned(decode={"stream buffers": stream_bytes(kind, config)}))
        return cls.layer_class.plan_history(kind, config, context) + stream

    @classmethod
    def plan_beside(cls, geometry: Geometry, config: OffloadConfig, batch: int) -> Planned:
        """What a method holds beside its layers."""
        return Planned()

    @classmethod
    def fit(
        cls, geometry: Geometry, memory: int, max_context: int, max_batch: int, fields: dict[str, Any]
    ) -> OffloadConfig:
        """The best configuration that keeps `max_batch` sequences of `max_context` tokens within `memory` bytes.

        `fields` are the user's and stay. Raises `BudgetError` with the least memory that would do, `ConfigError`.
        """

        def peak_of(config: OffloadConfig) -> int:
            return cls.plan(geometry, config, max_context, max_batch).peak_bytes

        apart = cls.layer_class.heads_apart
        choices = search(cls.config_class, peak_of, geometry, (memory, max_context, max_batch), fields, apart)
        if geometry.layers:
            return cls.choose_fields(choices, geometry)
        least = {"write_queue": choices.least_queue()}  # nothing gives way where nothing is offloaded
        return choices.config(choices.first_fit([least], smallest=dict))

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        """The best configuration of a search: what a method's own fields give way to, and for."""
        return fit_stream(search)

    @classmethod
    def stored_fields(cls, config: Any, geometry: Geometry) -> dict[str, Any]:
        """The values of `config.kept_on_open` for `fit`: what the configuration left to the model's shape is named, as
        the stored layers have it; fields that are None otherwise are left out."""
        values = {name: getattr(config, name) for name in config.kept_on_open}
        return {name: value for name, value in values.items() if value is not None}

    def check_budget(self, model: PreTrainedModel) -> None:
        """Raises `BudgetError` where the configuration names a budget and limits that do not go together."""
        memory, context, batch = self.config.memory, self.config.max_context, self.config.max_batch
        if memory is None or context is None or batch is None:
            return
        peak = self.plan(Geometry.of(model), self.config, context, batch).peak_bytes
        if peak > parse_size(memory, "memory"):
            raise BudgetError(
                f"memory is {parse_size(memory):,} bytes, and {batch} x {context:,} tokens can take {peak:,} with "
                "these fields: give as much, or let for_budget() choose the fields"
            )
