"""A cache's configuration, loaded from any of its forms, and the check against its budget."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..config import GOALS, OffloadConfig, SelectiveConfig, parse_memory, parse_size
from ..errors import BudgetError, ConfigError, shown
from ..memory.fit import fit_nothing, fit_slots, slow_blocks, with_host_slots
from ..memory.machine import free_memory
from ..memory.plan import MemoryPlan
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry, unknown_shapes
from ..model.place import device_type, offloaded_layers
from ..report.report import least_size_text, size_text
from ..stores.engines import resolve_engine
from .indexer_keys import read_bytes
from .layers import planner
from .plan import layer_kinds, search

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# A configuration from fields, an instance, a JSON of fields, or a tuning result

FORMAT = "hf_offload_cache tuning 1"
"""The `format` of a tuning result; a file of another version raises `ConfigError`."""

_FAMILY = FORMAT.rpartition(" ")[0]

Config = TypeVar("Config", bound=OffloadConfig)


def load_config(
    config_class: type[Config], config: Any, fields: dict[str, Any], model: Any = None
) -> Config:
    """As `OffloadConfig.load`, and also from the path of a tuning result (KVSwap, appendix A.4).

    Takes the row for `max_batch` and `max_context` among `fields`, or for the largest tuned ones. Raises `ConfigError`,
    also for a result that was tuned for another model than `model`."""
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
    """Whether a JSON object was written by `Tuned.save`, in any version."""
    return str(values.get("format", "")).rpartition(" ")[0] == _FAMILY


def tuned_fields(
    values: dict[str, Any], path: Path, max_context: int | None, max_batch: int | None, model: Any = None
) -> dict[str, Any]:
    """The fields of a cache for `max_batch` sequences of `max_context` tokens (None: the largest tuned for).

    `values` is the object read from `path`; an adapter's path is relative to that file. `nearest` picks the row.
    `memory` is the row's share of the budget: for the larger of the requested and the row's number of sequences, at
    most the number tuned for.

    Raises `ConfigError` for another version, a damaged file, or another model than `model`, naming the field that
    differs.
    """
    if values["format"] != FORMAT:
        raise ConfigError(
            f"config: {str(path)!r} has the format {shown(repr(values['format']))} and this library reads {FORMAT!r}: "
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
    """Raise `TypeError` unless all values are positive integers below 2**63."""
    for name, value in values.items():
        if type(value) is not int or not 0 < value < 2**63:
            raise TypeError(f"{name} is {shown(repr(value))}")


def nearest(rows: list[dict[str, Any]], batch: int, context: int) -> dict[str, Any]:
    """The row for (batch, context), or else the one at the smallest distance: |log2 of the ratio of the batches| +
    |log2 of the ratio of the contexts|.

    Rows with a shorter context count only if there are no others, because their compact keys would not fit the budget.
    Among equal rows, it is the one for more sequences."""
    if not isinstance(batch, int) or not isinstance(context, int) or min(batch, context) < 1:
        raise ConfigError(
            f"max_batch and max_context must be whole numbers of at least 1, got {batch!r} and {context!r}"
        )
    if not rows:
        raise IndexError("no rows")
    longer = [row for row in rows if row["context"] >= context] or rows

    def distance(row: dict[str, Any]) -> tuple[float, int]:
        ratios = abs(math.log2(row["batch"] / batch)) + abs(math.log2(row["context"] / context))
        return round(ratios, 9), -row["batch"]

    return min(longer, key=distance)


def _check_model(made_for: dict[str, str], path: Path, model: Any) -> None:
    for name, value in fingerprint(model).items():
        if made_for.get(name) != value:
            raise ConfigError(
                f"config: {str(path)!r} was tuned for another model: {name} is {value}, the tuned one's is "
                f"{shown(made_for.get(name))}; tune for this model"
            )


# Checks and notes of a cache within a budget

def check_budget(config: OffloadConfig, model: PreTrainedModel, plan: Callable[..., MemoryPlan]) -> None:
    """Raise `BudgetError` if a configuration's limits do not fit its budget. `plan`: the cache class's."""
    context, batch = config.max_context, config.max_batch
    if (config.memory is None and config.host_memory is None) or context is None or batch is None:
        return
    planned = plan(Geometry.of(model), config, context, batch)
    kinds = (" of device memory", " of host memory") if planned.device == "cuda" else ("", "")
    for name, peak, kind, advice in (
        ("memory", planned.peak_bytes, kinds[0], "let for_budget() choose the fields"),
        ("host_memory", planned.host_bytes, kinds[1], "lower max_context or max_batch"),
    ):
        limit = getattr(config, name)
        if limit is not None and peak > parse_size(limit, name):
            raise BudgetError(
                f"{name} is {parse_size(limit):,} bytes, and {batch} x {context:,} tokens can take {peak:,}{kind} with "
                f"these fields: raise {name}, or {advice}"
            )


def notes_of(
    cls: Any, plan: MemoryPlan, config: OffloadConfig, geometry: Geometry, given: Iterable[str]
) -> list[str]:
    """Notes on a plan of any method: needles that it loses, a slower prefill, and that no cache is needed. `given`:
    fields the user chose."""
    fields = dict(given) if isinstance(given, Mapping) else {name: getattr(config, name) for name in given}
    slow = slow_blocks(config) if geometry.layers and "block_tokens" not in given else None
    notes = _lost_note(cls, config, geometry, fields), slow, _keys_note(config, geometry, given), plan.needless
    return [note for note in notes if note is not None]


def _keys_note(config: OffloadConfig, geometry: Geometry, given: Iterable[str]) -> str | None:
    """A note that a plan left the keys of the model's indexers on the disk; None: it did not."""
    if config.indexer_bits != 0 or "indexer_bits" in given or config.max_context is None:
        return None
    nbytes = sum(read_bytes(kind, config, config.max_context) for kind, _ in layer_kinds(geometry, config, 1))
    where = "host memory" if config.engine == "memory" else "the disk"
    there = "on the GPU" if geometry.device == "cuda" else "in memory"
    text = f"each step reads all keys of the model's indexers from {where}, {size_text(nbytes)} a sequence"
    return f"{text}: raise memory to keep them {there}" if nbytes else None


_MOST_LOST = 0.1
"""Share of needles from which on a plan says how many it loses."""


def _lost_note(cls: Any, config: OffloadConfig, geometry: Geometry, given: dict[str, Any]) -> str | None:
    """The share of needles that these fields were measured to lose, if it is large, with the memory and the cache that
    lose fewer."""
    memory, context, batch = config.memory, config.max_context, config.max_batch
    chosen = config.exact or geometry.is_indexed or not geometry.layers
    lost = 0.0 if chosen else cls.goals.lost(config, geometry)
    if not _MOST_LOST < lost < 1 or memory is None or context is None or batch is None:  # 1: it was not measured
        return None
    fewer, limit, full = [], parse_size(memory), geometry.full_kv_bytes(context, batch)

    def loses(one: Any, most: int, fields: dict[str, Any]) -> float:
        try:
            return float(one.goals.lost(fit_goal(one, None, geometry, (most, context, batch), fields), geometry))
        except (BudgetError, ConfigError):
            return 1.0

    from ..registry import CACHES, cache_class

    limits = "memory", "max_context", "max_batch"
    own = {name: value for name, value in given.items() if name not in limits}
    if loses(cls, limit, own) <= _MOST_LOST:
        fewer.append('leave out goal="speed"')
    more = [full // part for part in range(full // max(1, limit), 0, -1) if full // part > limit]
    enough = len(more) if fewer else bisect_left(more, True, key=lambda most: loses(cls, most, own) <= _MOST_LOST)
    if enough < len(more):
        fewer.append(f"raise memory to {least_size_text(more[enough])}")
    for one in map(cache_class, CACHES):
        if one is not cls and one.goals.lost is not _unknown and (found := loses(one, limit, {})) <= _MOST_LOST:
            fewer.append(f"use {one.__name__}, which loses {found:.0%} in this memory")
    advice = ", or ".join(fewer) or ("leave fields to the planner" if own else "lower max_context")
    return f"about {lost:.0%} of the needles that the full KV finds are lost {_MEASURED}: {advice}"


_MEASURED = "(measured on SmolLM2-135M up to 8K tokens)"


# The store of a model's records on a GPU

HOST_SHARE = Fraction(3, 4)
"""Share of the available host memory that records may take. Pinned memory is neither swapped nor reclaimed, and the
available memory includes the page cache, from which weights and saved contexts are read. Queues, staging, activations
and other processes need the remainder. vLLM refuses more than .7 of a host's memory for swapped keys and values."""
_LIMITS_UNKNOWN = "records go to host memory if max_context and max_batch are given and there is room"


def choose_store(
    cls: Any, geometry: Geometry, limits: tuple[int | None, int, int], fields: dict[str, Any],
    path: str | Path | None, goal: str | None = None, here: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """`fields` of a cache class with engine "auto" resolved, for `limits` (memory or None, context, batch).

    "auto" is "memory" for a model on a GPU whose records fit into host memory; otherwise it is the engine that reads
    files in the folder `path`. With a memory, the records are those of the fields that `fit_goal` chooses for it.
    Unless the machine is `here`, only `host_memory` says what it has, and "auto" stays if that is not enough. Raises
    `ConfigError` for a `host_memory` of a model on a CPU."""
    if geometry.device != "cuda" and fields.get("host_memory") is not None:
        config = cls.config_class.load(None, fields).on_a_cpu()
        fields = {**fields, **{name: getattr(config, name) for name in ("host_memory", *config.renamed.values())}}
    if fields.get("engine", "auto") == "auto" and geometry.device == "cuda":
        in_memory, (memory, context, batch) = {**fields, "engine": "memory"}, limits
        with contextlib.suppress(BudgetError):
            config = cls.config_class.load(None, in_memory)
            if memory is not None:
                config = cls.fit(geometry, memory, context, batch, in_memory, goal)
            if _has_host_room(cls, geometry, config, context, batch, here)[0]:
                return in_memory
    return resolve_engine(fields, path) if here else fields


def configured(
    cls: Any, config: Any, fields: dict[str, Any], model: PreTrainedModel
) -> tuple[OffloadConfig, str | None]:
    """The configuration of a cache of `model`, within its budget. Raises as `load_config` does, and `BudgetError`.

    For a model on a GPU, engine "auto" is "memory" if limits are given for which the records fit into host memory, and
    the text, for the report, says how much of it they need."""
    given, where = load_config(cls.config_class, config, fields, model), None
    if device_type(model) != "cuda":
        given = given.on_a_cpu()
    else:
        context, batch, automatic = given.max_context, given.max_batch, given.engine == "auto"
        if context is not None and batch is not None and (unknown := unknown_shapes(model)) is None:
            in_memory = load_config(cls.config_class, config, {**fields, "engine": "memory"}, model)
            fits, where = _has_host_room(cls, Geometry.of(model), in_memory, context, batch)
            given = in_memory if automatic and fits else given
        elif automatic:
            where = _LIMITS_UNKNOWN if None in (context, batch) else f"records do not go to host memory: {unknown}"
    given = given.for_layers(offloaded_layers(model))
    check_budget(given, model, cls.plan)
    return given, where


def _has_host_room(
    cls: Any, geometry: Geometry, config: OffloadConfig, context: int, batch: int, here: bool = True
) -> tuple[bool, str]:
    """Whether a cache with engine "memory" fits into host memory, and the figures. The limit is its
    `host_memory`, or a share of what this machine has available."""
    try:
        plan: MemoryPlan = cls.plan(geometry, config, context, batch)
    except NotImplementedError:  # a method that does not declare its memory
        return False, f"it is not known how much host memory the records of {cls.__name__} need"
    free = free_memory() if here else None
    if config.host_memory is not None:
        limit = parse_size(config.host_memory, "host_memory")
        room, words = (limit, "host_memory") if free is None or limit <= free else (free, "all that is available")
    elif free is not None:
        room, words = math.floor(HOST_SHARE * free), f"{HOST_SHARE} of what is available"
    else:
        return False, "it is not known how much host memory is free"
    return plan.host_bytes <= room, (
        f"records in host memory need {size_text(plan.host_bytes)} of it, and {size_text(room)} may be used ({words})"
    )


# Fields for a budget

def _unknown(config: Any, geometry: Geometry) -> float:
    """`Goals.lost` of a cache that was not measured."""
    return 0.0


def _never(config: Any) -> bool:
    """`Goals.quickest` of a cache with one choice."""
    return False


def _never_alone(geometry: Geometry, context: int, batch: int, fields: Mapping[str, Any]) -> bool:
    """`Goals.alone` of a cache whose steps go over the host."""
    return False


def _none(context: int) -> tuple[dict[str, Any], ...]:
    """`Goals.faithful` of a cache without fields for it."""
    return ()


Curve = tuple[tuple[float, float], ...]
"""Measured points, ascending."""


def on_curve(place: float, curve: Curve) -> float:
    """The value at `place` of a measured curve: linear between its points, constant beyond them."""
    places, values = zip(*curve, strict=True)
    return float(np.interp(place, places, values))


_NEEDLES, FEW_LOST = 0.02, 0.04
"""Difference of `Goals.lost` that counts, and a share that never counts."""


class Goals(NamedTuple):
    """The fields that a cache class chooses for the goals of a budget; others are chosen to fit."""

    faithful: Callable[[int], tuple[dict[str, Any], ...]] = _none
    """For "fidelity", and contexts of so many tokens: the first of these that fit without other shortfalls, or more
    needles `lost`, than the last of `quick`; otherwise those of `quick`."""
    quick: tuple[Mapping[str, Any], ...] = (MappingProxyType({}),)
    """For "speed": chosen as `faithful` are. The last of these is taken if no others are, and for any goal; the others
    also where the last does not fit."""
    lost: Callable[[Any, Geometry], float] = _unknown
    """The share of needles that a configuration loses, as measured."""
    quickest: Callable[[Any], bool] = _never
    """Whether a configuration by the last of `quick` has so much room that the others would be slower."""
    lost_alone: Callable[[Any, Geometry], float] = _unknown
    """As `lost`, for comparing steps on a device that select fewer tokens than was measured: with assumed shares."""
    alone: Callable[[Geometry, int, int, Mapping[str, Any]], bool] = _never_alone
    """Whether steps of a context, a batch and the user's fields run on a device without the host, if slots hold a
    complete choice. Then they hold one, and fewer tokens are selected where the others would lose no fewer needles."""


_EVERY, _FEWER = 400, (700, 560, 400)
"""Tokens that a step selects for each 4,000 of the context to be close to full attention, and in short contexts or
little memory. With estimates and 8 bits, at 8K the KL to it is .0028 with 800 and .0045 with 560 tokens (SmolLM2-135M),
at 16K .005 with 1,600 and .025 with 560, at 30K .004 with 3,200 and .053 with 560 (Gemma 3 270M)."""


_FEWER_ALONE = (480, 400, 350, 300, 250, 200, 160, 130)
"""Tokens to select if slots of every layer hold a complete choice, and there is no room for more."""


def counts_for_fidelity(context: int) -> list[int]:
    """Tokens to select in a context of so many, the most first: a tenth of it, then fewer for less memory."""
    wanted, counts = _EVERY * ((context + 5 * _EVERY) // (10 * _EVERY)), list[int]()
    while wanted > _FEWER[0]:
        counts.append(wanted)
        wanted = wanted * 3 // 4
    return [*counts, *(_FEWER if counts else _FEWER[1:])]


def choices_for_fidelity(context: int, **fields: Any) -> tuple[dict[str, Any], ...]:
    """`Goals.faithful` with these `fields`: for each of `counts_for_fidelity`, entries in 16 bits, or in 8 if 16 leave
    no room for so many."""
    counts = counts_for_fidelity(context)
    return tuple({"num_selected": count, **fields, "entry_bits": bits} for count in counts for bits in (None, 8))


def check_goal(cls: Any, goal: str | None, fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a goal that a cache class does not have."""
    if goal is not None and goal not in GOALS:
        raise ConfigError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}")
    if goal == "fidelity" and cls.selects and not fields.get("exact") and not cls.goals.faithful(0):
        raise ConfigError(f'{cls.__name__} has no fields for goal="fidelity": use DiskSwapCache, or leave goal out')


def check_limits(cls: Any, memory: int | str | None, goal: str | None, fields: Mapping[str, Any]) -> None:
    """As `check_goal`. Also raise `ConfigError` for a `memory` of no known form, and for a goal without memory."""
    if memory is not None:
        parse_memory(memory, sys.maxsize)  # a share's form, for any request
    elif goal is not None:
        raise ConfigError(f"goal={goal!r} chooses fields for a memory budget: give memory too, or leave goal out")
    check_goal(cls, goal, fields)


def fit_goal(
    cls: Any, goal: str | None, geometry: Geometry, limits: tuple[int, int, int], fields: dict[str, Any]
) -> OffloadConfig:
    """The fields of a cache class for `limits` (memory, context, batch) and a goal. Raises as `OffloadCache.fit`."""
    check_goal(cls, goal, fields)
    goals: Goals = cls.goals if cls.selects and not fields.get("exact") and not geometry.is_indexed else Goals()
    *others, least = goals.quick
    refused: list[BudgetError] = []

    def lacks(config: OffloadConfig) -> set[str]:
        return set() if geometry.is_indexed else set(cls.shortfalls(config, geometry, fields))

    def fitted(own: Mapping[str, Any], alone: bool = False) -> OffloadConfig | None:
        """With memory for candidates, or without if a step then lacks less."""
        found = list[OffloadConfig]()
        for narrow in ({},) if "candidates" in fields else ({}, {"candidates": False}):
            try:
                found.append(_fit(cls, geometry, limits, fields, {**own, **narrow}, alone))
            except BudgetError as error:
                refused.append(error)
            else:  # what a step on a device lacks is not for the candidates' sake
                if alone or (goals.lost(found[-1], geometry) <= FEW_LOST and not lacks(found[-1])):
                    break
        few = _few([goals.lost(one, geometry) for one in found])
        return min(found, key=lambda one: (goals.lost(one, geometry) > few, len(lacks(one))), default=None)

    faithful = () if goal == "speed" else goals.faithful(limits[1])
    on_device = None
    if goals.alone(geometry, *limits[1:], fields):
        choices = [*faithful, *others, least]
        counts = [count for count in _FEWER_ALONE if goal != "speed" or count <= _EVERY]
        choices += [{**choices[0], "num_selected": count} for count in counts]
        if goal is None:
            choices = [own for own in choices if 2 * own.get("num_selected", 0) <= limits[1]]
            choices = choices if any(own in choices for own in faithful) else [least, *choices]  # 16 bits first
        choices.sort(key=lambda own: -own.get("num_selected", _EVERY))
        found = list[tuple[float, OffloadConfig]]()
        for own in _left_of(cls, choices, fields):
            if (config := fitted(own, True)) is not None:
                found.append((goals.lost_alone(config, geometry), config))
                if found[-1][0] <= FEW_LOST:
                    break
        enough = _few([share for share, _ in found])
        on_device = next((config for share, config in found if share <= enough), None)
        refused.clear()
        many = isinstance(on_device, SelectiveConfig) and on_device.tokens_fetched(limits[1]) >= _EVERY
        if on_device is not None and (goal == "speed" or (goal is None and many)):
            return on_device
    last = fitted(least)
    if last is None:  # entries in 8 bits may still fit
        quick, allowed, most = others, set[str](), 1.0
    else:
        quick = others if goal == "speed" and not goals.quickest(last) else []
        allowed, most = lacks(last), _few([goals.lost(last, geometry)])
    for own in _left_of(cls, (*faithful, *quick), fields):
        if goal is None and 2 * own.get("num_selected", 0) > limits[1]:
            continue
        config = fitted(own)
        if config is not None and (
            last is None or (goals.lost(config, geometry) <= most and allowed.issuperset(lacks(config)))
        ):
            refused.clear()
            return on_device if on_device is not None and _selects_as_many(on_device, config) else config
    if on_device is not None and (last is None or _selects_as_many(on_device, last)):
        refused.clear()
        return on_device
    try:
        if last is None:
            raise min(refused, key=lambda error: (not error.of_host, error.needed or 1 << 62))
    finally:
        refused.clear()  # an error that this frame holds would hold the frame, and its callers
    return last


def _selects_as_many(config: OffloadConfig, other: OffloadConfig) -> bool:
    """Whether a step of `config` selects as many tokens as one of `other`."""
    assert isinstance(config, SelectiveConfig) and isinstance(other, SelectiveConfig)
    context = config.max_context or 0
    return config.tokens_fetched(context) >= other.tokens_fetched(context)


def _few(lost: Iterable[float]) -> float:
    """The largest share of needles that counts as no more than the least of `lost`."""
    return max(FEW_LOST, min(lost, default=0.0) + _NEEDLES)


def steps_over_host(cls: Any, geometry: Geometry, config: OffloadConfig, context: int, batch: int) -> list[str]:
    """A note if records lie in host memory, and steps of some layers need the host nevertheless, and why."""
    if geometry.device != "cuda" or config.engine != "memory" or config.exact or not cls.selects:
        return []
    if not cls.layer_class.needs_slots and not geometry.is_indexed:
        return []
    plan_of = planner(cls.layer_class)

    def alone(kind: Any, own: OffloadConfig) -> bool:
        decides = kind.topk and kind.indexer_bytes and own.indexer_bits == 8  # the host, at the edge of a choice
        return not decides and bool(plan_of(kind, own, context).alone)

    kinds, whys = layer_kinds(geometry, config, batch), list[str]()
    for (kind, own), count in Counter(kinds).items():
        if kind.has_history and not alone(kind, own):
            if alone(kind, dataclasses.replace(own, memory=None)):
                why = "its memory has slots for all that a step may select: raise memory"
            elif kind.most_chosen:
                why = "indexer_bits is not 8" if kind.topk else "its indexer scores single tokens, not blocks"
            else:
                why = "what chooses records is in its memory, not on the disk, and kernels take such heads and fields"
            whys += [why] * count
    text = "steps of {} of {} layers need the host; a GPU alone runs them if {}"
    return [text.format(count, len(kinds), why) for why, count in Counter(whys).items()]


def missed_goal(cls: Any, goal: str | None, config: OffloadConfig, fields: dict[str, Any]) -> list[str]:
    """A note if `config`, fitted with `fields`, does not have those of `goal`."""
    faithful = cls.goals.faithful(config.max_context or 0)
    if goal != "fidelity" or not faithful or config.exact:
        return []
    own = _left_of(cls, faithful, fields)
    if not own:
        return []
    met = [all(getattr(config, name) == value for name, value in chosen.items()) for chosen in own]
    if not any(met):
        return ['goal="fidelity" has no room in this memory: raise memory, or lower max_context']
    found, best = own[met.index(True)], own[0]
    if {**found, "entry_bits": None} == {**best, "entry_bits": None}:  # 8 bits are as close as 16
        return []
    has, wants = (
        ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None) for chosen in (found, best)
    )
    return [f'goal="fidelity" has room for {has} only, where more memory gets {wants}: raise memory']


def _left_of(cls: Any, choices: Iterable[Mapping[str, Any]], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of each choice for a goal that the user's `fields` leave open. A choice that contradicts these, or
    repeats another, is dropped."""
    found: list[dict[str, Any]] = []
    for choice in choices:
        own = {name: value for name, value in choice.items() if name not in fields}
        try:
            cls.config_class.load(None, {**own, **fields})
        except ConfigError:
            continue
        if own not in found:
            found.append(own)
    return found


def _fit(
    cls: Any, geometry: Geometry, limits: tuple[int, int, int], fields: dict[str, Any], of_goal: Mapping[str, Any],
    alone: bool = False,
) -> OffloadConfig:  # fmt: skip
    """The fields that `cls` chooses beside the user's `fields` and those `of_goal`; `alone`: see `Search`."""
    options = search(cls.config_class, cls.plan, geometry, limits, fields, of_goal, alone)
    if not geometry.layers:
        return fit_nothing(options)
    if fields.get("exact"):
        exact: OffloadConfig = cls.choose_exact(options)
        return exact
    if geometry.is_indexed and issubclass(cls.config_class, SelectiveConfig):
        return fit_slots(options)
    return with_host_slots(options, cls.choose_fields(options, geometry))
