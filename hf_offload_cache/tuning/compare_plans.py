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


WIDER = {"disk-swap": (800, 1600), "cluster": (800,)}
"""Tokens that a step may attend to in the place of the default's: nearer to `DynamicCache`, and slower."""


@dataclass(frozen=True)
class ComparedPlan:
    """Of one cache. `plan` and `config` None: it does not fit, or lacks a package, as `refused` says."""

    name: str
    plan: MemoryPlan | None
    config: OffloadConfig | None
    refused: str | None
    notes: tuple[str, ...]
    """All that the plan says below its table."""
    attended: int | None
    """Tokens whose own keys and values a step attends to, beyond sinks and latest ones; None: all, or not known."""
    read_bytes: int | None
    """About what a step reads for all rows, if nothing that it wants is in memory, of layers that are all alike."""
    num_selected: int | None = None
    """One of `WIDER`; None: as the cache has it by default."""
    shortfalls: tuple[str, ...] = ()
    """Those of `notes` that say what steps lose."""

    @property
    def label(self) -> str:
        """What tells it from others: its name, and `num_selected` where that is wider."""
        return labelled(self.name, self.num_selected)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        plan = None if self.plan is None else self.plan.to_dict()
        config = None if self.config is None else dataclasses.asdict(self.config)
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
                "plan": plan, "config": config}  # fmt: skip


def labelled(name: str, num_selected: int | None) -> str:
    """As `ComparedPlan.label`."""
    return name if num_selected is None else f"{name} with num_selected={num_selected}"


def compare_plans(
    geometry: Geometry, memory: int | None, context: int, batch: int, fields: dict[str, Any], wider: bool = False,
    installed: bool = False,
) -> list[ComparedPlan]:  # fmt: skip
    """In the order of the registry.

    Args:
        memory: bytes; None: what each one's own fields take.
        fields: those that all caches have.
        wider: behind each also those of `WIDER` that fit the memory as well, with no shortfall that the default has
            not, and attend to half of the context at most.
        installed: refuse what lacks a package here.

    Raises `ConfigError` for a field that one of them lacks.
    """
    from ..registry import CACHES, cache_class

    found = []
    for name in CACHES:
        if installed and (missing := cache_class(name).missing()) is not None:
            found.append(ComparedPlan(name, None, None, missing, (), None, None))
            continue
        own = _planned(name, geometry, memory, context, batch, fields, None)
        found.append(own)
        free = wider and "num_selected" not in fields and not fields.get("exact")
        for count in WIDER.get(name, ()) if free and own.plan is not None else ():
            other = _planned(name, geometry, memory, context, batch, fields, count)
            if 2 * count <= context and other.plan is not None and set(other.shortfalls) <= set(own.shortfalls):
                found.append(other)
    return found


def _planned(
    name: str, geometry: Geometry, memory: int | None, context: int, batch: int, fields: dict[str, Any],
    num_selected: int | None,
) -> ComparedPlan:  # fmt: skip
    from ..config import SelectiveConfig
    from ..registry import cache_class

    cls = cache_class(name)
    if num_selected is not None:
        fields = {**fields, "num_selected": num_selected}
    try:
        if memory is None:
            config = cls.config_class.load(None, fields)
        else:
            config = cls.fit(geometry, memory, context, batch, fields)
        plan = cls.plan(geometry, config, context, batch)
    except BudgetError as error:
        return ComparedPlan(name, None, None, str(error), (), None, None, num_selected)
    attended = brought = None
    if isinstance(config, SelectiveConfig) and not config.exact:
        attended, brought = (min(context, one(context)) for one in (config.attended, config.brought))
    read = None if brought is None else round(brought / max(1, context) * plan.full_kv_bytes)
    notes, lost = cls.notes(plan, config, geometry, fields), cls.shortfalls(config, geometry, fields)
    return ComparedPlan(name, plan, config, None, tuple(notes), attended, read, num_selected, tuple(lost))
