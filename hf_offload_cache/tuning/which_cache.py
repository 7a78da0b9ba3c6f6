"""Chooses the cache that measured best, of those that fit the memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import GOALS, MOST_JSON_BYTES, OffloadConfig, SelectiveConfig, parse_json, parse_size
from ..errors import BudgetError, ConfigError, shown
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from ..model.place import inner_model

if TYPE_CHECKING:
    from ..memory.plan import MemoryPlan


# Plans of all caches for the same memory

@dataclass(frozen=True)
class ComparedPlan:
    """One cache's plan. `plan` and `config` None: it does not fit, or lacks a package, as `refused` says."""

    name: str
    plan: MemoryPlan | None
    config: OffloadConfig | None
    refused: str | None
    attended: int | None = None
    """Tokens whose own keys and values a step attends to, beyond sinks and latest ones; None: all, or unknown."""
    read_bytes: int | None = None
    """`step_bytes` of a cache that selects; None: all, or unknown."""
    chosen_by_model: bool = False
    """The model chooses by itself what steps attend to: see `Geometry.is_indexed`."""
    noting: Callable[[], Iterable[str]] = dataclasses.field(default=tuple, repr=False, compare=False)
    """Find `notes`. Notes that name other memory and caches take dozens of plans."""

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """The lines below the plan's table."""
        return tuple(self.noting())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        plan = None if self.plan is None else self.plan.to_dict()
        config = None if self.config is None else dataclasses.asdict(self.config)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "noting"}
        return {**own, "plan": plan, "config": config, "notes": self.notes}


def compare_plans(
    geometry: Geometry, memory: int | None, context: int, batch: int, fields: dict[str, Any],
    installed: bool = False, goal: str | None = None, path: str | Path | None = None,
    here: bool = True,
) -> list[ComparedPlan]:  # fmt: skip
    """Plans of all caches, in the order of the registry.

    Args:
        memory: bytes; None: as much as each one's own fields take.
        fields: fields for all caches.
        installed: refuse caches that lack a package here.
        goal: "speed": each with its fastest fields; None: with those that it usually chooses.
        path, here: as in `choose_store`.

    Raises `ConfigError` for a field that one of them lacks.
    """
    from ..registry import CACHES, cache_class

    plans = []
    for name in CACHES:
        if installed and (missing := cache_class(name).missing()) is not None:
            plans.append(ComparedPlan(name, None, None, missing))
            continue
        plans.append(_planned(name, geometry, memory, context, batch, fields, goal, path, here))
    return plans


def _planned(
    name: str, geometry: Geometry, memory: int | None, context: int, batch: int, fields: dict[str, Any],
    goal: str | None, path: str | Path | None, here: bool,
) -> ComparedPlan:  # fmt: skip
    from ..registry import cache_class

    cls = cache_class(name)
    fields = cls.choose_store(geometry, (memory, context, batch), fields, path, goal, here)
    try:
        if memory is None:
            config = cls.config_class.load(None, fields)
        else:
            config = cls.fit(geometry, memory, context, batch, fields, goal)
        plan = cls.plan(geometry, config, context, batch)
    except BudgetError as error:
        return ComparedPlan(name, None, None, str(error))
    attended = read = None
    if geometry.is_indexed:
        chosen = max(layer.most_chosen for layer in geometry.layers)
        attended, read = min(context, chosen), step_bytes(geometry, config, context, batch)
    elif isinstance(config, SelectiveConfig) and not config.exact:
        attended, read = min(context, config.attended(context)), step_bytes(geometry, config, context, batch)
    noting = functools.partial(cls.notes, plan, config, geometry, fields)
    return ComparedPlan(name, plan, config, None, attended, read, geometry.is_indexed, noting)


def step_bytes(geometry: Geometry, config: OffloadConfig, context: int, batch: int) -> int:
    """Estimate of the records that one step of all rows reads, if nothing it needs is in memory: all of an exact cache,
    otherwise those of `tokens_fetched` in the bits they are stored in. Tokens that a model's indexer chooses lie in a
    record each at worst; exact keys of the indexer are added: see `read_bytes`."""
    if geometry.is_indexed:
        from ..core.indexer_keys import read_bytes
        from ..core.plan import layer_kinds

        kinds = [kind for kind, _ in layer_kinds(geometry, config, batch)]
        keys = sum(read_bytes(kind, config, context) for kind in kinds)
        forms = [(kind.form, kind.most_chosen) for kind in kinds if kind.has_history]
        entries = sum(min(most, -(-context // form.group_size)) * form.record_bytes for form, most in forms)
        return batch * (keys + entries)
    tokens = context
    if isinstance(config, SelectiveConfig) and not config.exact:
        tokens = min(context, config.tokens_fetched(context))
    stored = geometry.full_kv_bytes(context, batch) - geometry.kept_bytes(context, batch)
    bits = config.stored_bits or 8 * geometry.dtype.itemsize
    return round(tokens / max(1, context) * stored * bits / (8 * geometry.dtype.itemsize))


# The model and the fields of a table of measurements

Identity = dict[str, str]
"""Named values; "name" is for people, the others are equal for equal models."""


def shape_of(name: str, geometry: Geometry) -> Identity:
    """The identity of the model that people call `name`, as far as it is known without its weights."""
    layers = [
        f"{len(list(alike))} of {one.num_heads} heads, {one.num_key_heads} x {one.key_dim} keys and "
        f"{one.num_value_heads} x {one.value_dim} values"
        for one, alike in itertools.groupby(one for one in geometry.layers if one.has_history)
    ]
    return {
        "name": name,
        "layers": "; ".join(layers),
        "layers that stay in memory": str(len(geometry.kept)),
        "dtype": str(geometry.dtype).removeprefix("torch."),
    }


def identity_of(model: Any) -> Identity:
    """Identity of a `PreTrainedModel`: its class and source, its shape, and its `fingerprint`."""
    inner = inner_model(model)
    place = inner.config.name_or_path
    name = type(inner).__name__ + (f" ({place})" if place else "")
    return {**shape_of(name, Geometry.of(inner)), **fingerprint(inner)}


def check_model(stored: Any, path: str | Path, model: Identity) -> None:
    """Raise `ConfigError` if the table at `path` is `stored` to be of another model than `model`, as far as that is
    known; the message names both, and the value that differs."""
    anew = "measure this one with `tune --compare`, or leave `measured` out to use the shipped table"
    if not isinstance(stored, dict):
        raise ConfigError(f"measured: {str(path)!r} does not name its model: {anew}")
    for field, value in model.items():
        if field != "name" and stored.get(field) != value:
            raise ConfigError(
                f"measured: {str(path)!r} is of another model: it was measured with {stored.get('name')}, and this is "
                f"{model['name']}: {field} was {stored.get(field)}, here it is {value}; {anew}"
            )


def written(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of caches in a table: plain JSON values, and nothing of a key."""
    kept = {name: value for name, value in fields.items() if name != "encryption_key"}
    return {name: value if isinstance(value, bool | int | float | None) else str(value) for name, value in kept.items()}


def not_measured(fields: dict[str, Any], usual: OffloadConfig) -> dict[str, Any]:
    """The `fields` that the shipped table was not measured with: other than those of `usual`, which this budget
    chooses without them, and not only for a run."""
    return {
        name: value for name, value in written(fields).items()
        if name not in usual.of_a_run and _in_bytes(name, value) != _in_bytes(name, getattr(usual, name))
    }  # fmt: skip


def _in_bytes(name: str, value: Any) -> Any:
    return parse_size(value) if name in ("write_queue", "host_memory", "host_slots") and value is not None else value


def check_fields(stored: Any, path: str | Path, fields: dict[str, Any]) -> None:
    """Raise `ConfigError` if the table at `path` was measured with other fields than these, except the engine, which
    belongs to a machine."""
    both = stored or {}, written(fields)
    then, now = ({name: _in_bytes(name, value) for name, value in each.items() if name != "engine"} for each in both)
    if then != now:
        raise ConfigError(
            f"measured: {str(path)!r} was measured with the fields {then}, and these are {now}: give the same ones, or "
            "measure with these"
        )


HINTS = ("long-prompt", "long-output")
_ALIKE, _ONE = 0.05, 1.5
"""Shares of needles within 5% count as ties, and so do shares that differ by one needle."""
_ENOUGH = math.log(1.05)
"""KL in nats that a cache chosen for its speed may have: text that the model writes itself would then lose 5% of its
perplexity. Perplexities of a few texts vary more than that."""
_NEAR = round(math.log(2), 2)
"""A measurement after a long output counts for half to twice its memory only."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """A cache of the registry, and the reasons: `plan` has its name, configuration and memory."""

    plan: ComparedPlan
    why: str
    """One line per cache, the chosen one first: its measurements, or why it is left out."""

    @property
    def name(self) -> str:
        """Its registered name."""
        return self.plan.name


def measured_caches(
    path: str | Path | None = None, model: Identity | None = None, fields: dict[str, Any] | None = None
) -> list[Cell]:
    """Measurements of each cache at several contexts and memory sizes: the shipped table (SmolLM2-135M, Python's help
    texts; made by `eval.fidelity`), or that of `path`, as `measure_caches` writes it.

    A cell has "cache", "tokens" and "memory" (a share of the full KV, "1/13"), and those of the following that were
    measured: "kl" in nats and "perplexity" relative to `DynamicCache`'s, "found" of "known" needles in contexts of
    "needle_tokens", "seconds" per step, and the first two after a long output, "long_kl" and "long_perplexity". Cells
    of older files that have "num_selected" are ignored. Raises `ConfigError` for an invalid file, for a table of
    another model than `model`, as far as that is known, and for one measured with other `fields` (None: not compared).
    The shipped table, a first guess, is for all models and fields; but for exact caches, which all give the same
    output, the result is empty.
    """
    if path is None and (fields or {}).get("exact"):
        return []
    if path is None:
        data = importlib.resources.files(__package__).joinpath("measured_caches.json").read_bytes()
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(MOST_JSON_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"measured must be a file that `tune --compare` wrote, {str(path)!r} cannot be read: {error}"
            ) from error
    try:
        values = parse_json(data)
        cells: list[Cell] = [cell for cell in values["cells"] if "num_selected" not in cell]
        for cell in cells:
            _check(cell)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"measured must be a file that `tune --compare` wrote, got {str(path)!r}: {shown(error, 200)}: write it "
            "anew"
        ) from error
    if path is not None and model is not None:
        check_model(values.get("model"), path, model)
    if path is not None and fields is not None:
        check_fields(values.get("fields"), path, fields)
    return cells


def which_cache(
    plans: list[ComparedPlan], cells: list[Cell], memory: float, context: int, goal: str = "fidelity",
    hint: str = "long-prompt",
) -> Chosen:  # fmt: skip
    """The best of the caches that have a plan.

    Args:
        plans: of every cache, by `compare_plans`, for this memory and context.
        cells: of `measured_caches`. Only cells of one memory and context are compared: where most of the caches that
            fit were measured, and among such places the closest in memory, then in context.
        memory: share of the full KV.
        context: tokens per sequence, answer included.
        goal: "fidelity": the cache that retrieves most needles, and among ties the closest to `DynamicCache`; if only
            some were tested with needles, untested ones rank last. "speed": the fastest of those whose KL from
            `DynamicCache` is at most .049 nats, if there are any.
        hint: "long-prompt", or "long-output": fidelity is then the closeness after a long output, if that was measured
            in half to twice this memory; otherwise that after long prompts, and the reason says so.

    Raises `ConfigError` for another goal or hint, `BudgetError` if no cache fits.
    """
    for name, value, known in (("goal", goal, GOALS), ("hint", hint, HINTS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    fitting = [plan for plan in plans if plan.plan is not None]
    if not fitting:
        refused = "; ".join(f"{plan.name}: {plan.refused}" for plan in plans)
        raise BudgetError(f"no cache fits this memory: {refused}")
    names = [plan.name for plan in fitting]
    by_model = fitting[0].chosen_by_model
    cells = [] if by_model else cells
    compared, note = _compared(cells, names, memory, context, goal, hint), ""
    if not compared and not by_model and (goal, hint) == ("fidelity", "long-output"):
        hint, note = "long-prompt", "; no measurement after a long output at this memory"
        compared = _compared(cells, names, memory, context, goal, hint)
    best = min(compared, key=lambda name: _rank(name, compared, goal, hint)) if compared else names[0]
    if compared:
        reason = _sentence(compared[best])
    elif by_model:
        reason = "the first that fits: the model chooses what steps attend to, so all caches give the same output"
    elif fitting[0].config is not None and fitting[0].config.exact:
        reason = "the first that fits: exact caches all give the same output"
    else:
        reason = f"the first that fits, because none has a measurement of {goal}"
    reasons = [f"{best}: {reason}{note}"]
    for plan in plans:
        if plan.name in compared and plan.name != best:
            reasons.append(f"{plan.name}: {_sentence(compared[plan.name])}")
        elif plan.name != best:
            reasons.append(f"{plan.name}: {'no measurement there' if plan.plan else f'left out: {plan.refused}'}")
    return Chosen(next(plan for plan in fitting if plan.name == best), "\n".join(reasons))


def _compared(
    cells: list[Cell], names: list[str], memory: float, context: int, goal: str, hint: str
) -> dict[str, Cell]:
    """By name, the cells to compare these caches by: those with the deciding value, all of one memory and one context.
    Of the places with most of the caches, the closest in memory, then in context."""
    value = "seconds" if goal == "speed" else "long_kl" if hint == "long-output" else "kl"
    places: dict[tuple[str, int], dict[str, Cell]] = {}
    for cell in cells:
        far = value == "long_kl" and round(abs(math.log(Fraction(cell["memory"]) / memory)), 2) > _NEAR
        if cell["cache"] in names and value in cell and not far:
            places.setdefault((cell["memory"], cell["tokens"]), {})[cell["cache"]] = cell

    def distance(place: tuple[str, int]) -> tuple[float, float, float]:
        in_memory, in_context = abs(math.log(Fraction(place[0]) / memory)), abs(math.log(place[1] / context))
        return -len(places[place]), round(in_memory, 2), in_context

    return places[min(places, key=distance)] if places else {}


def _rank(name: str, compared: dict[str, Cell], goal: str, hint: str) -> tuple[float, ...]:
    cell = compared[name]
    if goal == "speed":
        return float(cell.get("kl", math.inf) > _ENOUGH), cell["seconds"]
    if hint == "long-output":
        return (cell["long_kl"],)
    shares = {other: one["found"] / one["known"] for other, one in compared.items() if one.get("known")}
    if name not in shares:
        return float(bool(shares)), cell["kl"]
    best, tie = max(shares.values()), max(_ALIKE, _ONE / cell["known"])
    return (best - shares[name] if shares[name] < best - tie else 0.0), cell["kl"]


def _check(cell: Cell) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` for an invalid cell."""
    memory = str(cell["memory"])  # "1e999999999" is a fraction, too, which takes a day
    share = Fraction(memory) if re.fullmatch(r"\d{1,9}(/[1-9]\d{0,8}|\.\d{1,9})?", memory) else 0
    if not isinstance(cell["cache"], str) or not (_is_count(cell["tokens"]) and 0 < share <= 1):
        raise ValueError(f"a cell of {shown(cell['cache'])}, {shown(cell['tokens'])} tokens and {shown(memory)}")
    for name in ("kl", "perplexity", "seconds", "found", "known", "long_kl", "long_perplexity"):
        if not (name not in cell or math.isfinite(cell[name])):
            raise ValueError(f"{name} is {shown(cell[name])}")
    if not all(_is_count(length) for length in cell.get("needle_tokens", ())):
        raise ValueError(f"needle_tokens is {shown(cell['needle_tokens'])}")
    if "kl" in cell and "perplexity" not in cell:
        raise ValueError("a distance without a perplexity")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**48


def _sentence(cell: Cell) -> str:
    parts = []
    if "kl" in cell:
        parts.append(f"KL {cell['kl']:.3g}, perplexity {cell['perplexity']:.3f} times DynamicCache's")
    if cell.get("known"):
        lengths = [f"{length:,}" for length in cell.get("needle_tokens", ())]
        of = f" in contexts of {', '.join(lengths)} tokens" if lengths else ""
        parts.append(f"{cell['found']} of {cell['known']} needles{of}")
    if "long_kl" in cell:
        parts.append(f"KL {cell['long_kl']:.3g} after a long output")
    if "seconds" in cell:
        parts.append(f"{1e3 * cell['seconds']:.0f} ms a step")
    return f"at {cell['tokens']:,} tokens and {cell['memory']}: {', '.join(parts)}"
