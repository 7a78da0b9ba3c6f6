"""What each cache of the registry would hold in the same memory, side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError

if TYPE_CHECKING:
    from ..config import OffloadConfig
    from ..memory.plan import MemoryPlan
    from ..model.geometry import Geometry


@dataclass(frozen=True)
class ComparedPlan:
    """Of one cache. `plan` and `config` None: it does not fit, and `refused` says why."""

    name: str
    plan: MemoryPlan | None
    config: OffloadConfig | None
    refused: str | None
    notes: tuple[str, ...]
    attended: int | None
    """Tokens whose own keys and values a step attends to, beyond sinks and latest ones; None: all, or not known."""
    read_bytes: int | None
    """About what a step reads for all rows, if nothing that it wants is in memory, of layers that are all alike."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        plan = None if self.plan is None else self.plan.to_dict()
        config = None if self.config is None else dataclasses.asdict(self.config)
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
                "plan": plan, "config": config}  # fmt: skip


def compare_plans(
    geometry: Geometry, memory: int | None, context: int, batch: int, fields: dict[str, Any]
) -> list[ComparedPlan]:
    """In the order of the registry. `memory`: bytes; None: what each one's own fields take. `fields`: those that all
    caches have. Raises `ConfigError` for a field that one of them lacks."""
    from ..config import SelectiveConfig
    from ..registry import CACHES, cache_class

    found = []
    for name in CACHES:
        cls = cache_class(name)
        try:
            if memory is None:
                config = cls.config_class.load(None, fields)
            else:
                config = cls.fit(geometry, memory, context, batch, fields)
            plan = cls.plan(geometry, config, context, batch)
        except BudgetError as error:
            found.append(ComparedPlan(name, None, None, str(error), (), None, None))
            continue
        attended = brought = None
        if isinstance(config, SelectiveConfig) and not config.exact:
            attended, brought = (min(context, one(context)) for one in (config.attended, config.brought))
        read = None if brought is None else round(brought / max(1, context) * plan.full_kv_bytes)
        notes = tuple(cls.shortfalls(config, geometry, fields))
        found.append(ComparedPlan(name, plan, config, None, notes, attended, read))
    return found
