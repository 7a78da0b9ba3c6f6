"""A cache within a budget: what it will hold, and the best fields that fit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..config import OffloadConfig, at_least, parse_memory, parse_size
from ..errors import BudgetError, UnsupportedModelError
from ..memory.fit import fit_stream, slow_blocks
from ..memory.plan import LayerPlan, MemoryPlan, Planned
from ..memory.search import Search
from ..model.geometry import Geometry
from ..model.place import no_place
from ..stores.engines import resolve_engine
from .offload_layer import OffloadLayer
from .planned import LayerKind, plan_cache, search

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        layer, apart = cls.layer_class, cls.layer_class.heads_apart
        beside = cls.plan_beside(geometry, config, max_batch)

        def layer_plan(kind: LayerKind, own: OffloadConfig) -> LayerPlan:
            return layer.planned(kind, own, max_context)

        return plan_cache(
            geometry, config, max_context, max_batch, layer_plan, apart, beside, cls.selects and not config.exact
        )

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
