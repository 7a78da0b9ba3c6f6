"""Which cache? The one that does best, of those that fit the memory, by what was measured of all of them."""

from __future__ import annotations

import importlib.resources
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import BudgetError, ConfigError
from .compare_plans import ComparedPlan

GOALS = ("fidelity", "speed")
HINTS = ("long-prompt", "long-output")
_ALIKE = 0.05
"""Shares of facts found that lie within this of each other are alike: a dozen facts tell no more."""
_ENOUGH = 1.05
"""Perplexity, over `DynamicCache`'s, that a cache chosen for its speed may have."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """A cache of the registry, and why: `plan` has its name, its configuration and what it will hold."""

    plan: ComparedPlan
    why: str
    """One sentence a cache: what was measured of it, or why it does not fit."""

    @property
    def name(self) -> str:
        """As the registry has it."""
        return self.plan.name


def measured_caches(path: str | Path | None = None) -> list[Cell]:
    """What was measured of each cache at lengths of context and shares of memory: the shipped table (SmolLM2-135M,
    Python's help texts; made by `eval.fidelity`), or that of `path`, as `measure_caches` writes it.

    A cell has "cache", "tokens" and "memory" (a share of the full KV, "1/13"), and of the following what was measured:
    "kl" in nats and "perplexity" to `DynamicCache`'s, "found" of "known" facts, "seconds" of a step, and the first two
    after a long output, "long_kl" and "long_perplexity". Raises `ConfigError` for a file that is none.
    """
    if path is None:
        text = importlib.resources.files(__package__).joinpath("measured_caches.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"measured must be a file that `tune --compare` wrote: {error}") from error
    try:
        cells = json.loads(text)["cells"]
        for cell in cells:
            _, _, _ = cell["cache"], math.log(cell["tokens"]), Fraction(cell["memory"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"measured must be a file that `tune --compare` wrote, got {str(path)!r}: {error!r}: write it anew"
        ) from error
    return cells


def which_cache(
    plans: list[ComparedPlan], cells: list[Cell], memory: float, context: int, goal: str = "fidelity",
    hint: str = "long-prompt",
) -> Chosen:  # fmt: skip
    """The best of the caches that have a plan.

    Args:
        plans: of every cache, by `compare_plans`, for this memory and context.
        cells: of `measured_caches`. Of each cache that counts which is nearest in memory, then in context.
        memory: share of the full KV.
        context: tokens a sequence, answer included.
        goal: "fidelity": what finds most facts, and of those that find as many what is nearest to `DynamicCache`;
            "speed": the fastest of those whose perplexity is within 5% of `DynamicCache`'s, if there are some.
        hint: "long-prompt", or "long-output": then what is nearest after thousands of tokens of output counts.

    Raises `ConfigError` for another goal or hint, `BudgetError` where no cache fits.
    """
    for name, value, known in (("goal", goal, GOALS), ("hint", hint, HINTS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    fitting = [plan for plan in plans if plan.plan is not None]
    if not fitting:
        reasons = "; ".join(f"{plan.name}: {plan.refused}" for plan in plans)
        raise BudgetError(f"no cache fits this memory: {reasons}")
    nearest = {plan.name: _nearest(cells, plan.name, memory, context, goal, hint) for plan in fitting}
    told = {name: cell for name, cell in nearest.items() if cell is not None}
    best = min(told, key=lambda name: _rank(told[name], told, goal, hint)) if told else fitting[0].name
    reasons = [f"{best}: {_sentence(nearest[best])}"]
    for plan in plans:
        if plan.name != best:
            reason = _sentence(nearest[plan.name]) if plan.name in nearest else f"does not fit: {plan.refused}"
            reasons.append(f"{plan.name}: {reason}")
    return Chosen(next(plan for plan in fitting if plan.name == best), "\n".join(reasons))


def _needed(goal: str, hint: str) -> tuple[str, ...]:
    if goal == "speed":
        return ("seconds",)
    return ("long_kl",) if hint == "long-output" else ("kl",)


def _nearest(cells: list[Cell], name: str, memory: float, context: int, goal: str, hint: str) -> Cell | None:
    own = [cell for cell in cells if cell["cache"] == name and all(field in cell for field in _needed(goal, hint))]

    def distance(cell: Cell) -> tuple[float, float]:
        apart = abs(math.log(Fraction(cell["memory"]) / memory)), abs(math.log(cell["tokens"] / context))
        return round(apart[0], 2), apart[1]

    return min(own, key=distance, default=None)


def _rank(cell: Cell, others: dict[str, Cell], goal: str, hint: str) -> tuple[float, ...]:
    if goal == "speed":
        return float(cell.get("perplexity", 1.0) > _ENOUGH), cell["seconds"]
    if hint == "long-output":
        return (cell["long_kl"],)
    shares = [share for share in map(_found, others.values()) if share is not None]
    share = _found(cell)
    lost = share is not None and share < max(shares) - _ALIKE
    return (max(shares) - share if lost and share is not None else 0.0), cell["kl"]


def _found(cell: Cell) -> float | None:
    return cell["found"] / cell["known"] if cell.get("known") else None


def _sentence(cell: Cell | None) -> str:
    if cell is None:
        return "nothing was measured of it"
    parts = []
    if "kl" in cell:
        parts.append(f"KL {cell['kl']:.3g}, perplexity {cell['perplexity']:.3f} times DynamicCache's")
    if cell.get("known"):
        parts.append(f"{cell['found']} of {cell['known']} facts")
    if "long_kl" in cell:
        parts.append(f"KL {cell['long_kl']:.3g} after a long output")
    if "seconds" in cell:
        parts.append(f"{1e3 * cell['seconds']:.0f} ms a step")
    return f"at {cell['tokens']:,} tokens and {cell['memory']}: {', '.join(parts)}"
