"""The best fields of `DiskSwapCache` for a memory budget, without a measured profile.

KVSwap's own solver, `tuning.solve`, needs profiles (appendix A). This one weighs compact keys against slots by two
curves that were measured once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...core.budget import FEW_LOST, counts_for_fidelity, on_curve
from ...history.records import RecordFormat
from ...memory.fit import LEAST_SELECTED, LOST_BY, SHORT_TAIL, STREAM_SHARES, Search
from ...model.geometry import Geometry
from .adapter import adapter_rank
from .coding import default_summary_bytes, most_bytes
from .config import DiskSwapConfig
from .low_rank_keys import default_rank

# The worth of compact key bytes and of slots, as measured: how a budget is divided, and when it is too small

LOST = (
    (0.0, 1.0), (0.031, 0.6), (0.042, 0.4), (0.0625, 0.12), (0.083, 0.1), (0.104, 0.04), (0.125, 0.001), (0.188, 0.0),
)  # fmt: skip
"""Bytes of a code over the elements of a joined key -> share of the full cache's needles that are lost.

Measured on SmolLM2-135M with prompts of 4,000 and 7,000 tokens, 400 tokens selected, 16 to 79 needles a value. Needles
that even the longest code lost are left out. Values are smoothed where a longer code lost more. Gemma 3 270M loses
fewer in 7,600 tokens, with estimates: codes of .031, .043, .0625 and .082 found 5, 7, 8 and 8 of 8. In 15,500 tokens,
without estimates, codes of .043 and .0625 found 2 and 5 of 8."""
HITS = ((0.0, 0.0), (0.28, 0.29), (0.52, 0.49), (0.76, 0.66), (1.0, 0.80), (1.5, 0.87), (2.0, 0.89), (4.0, 0.92))
"""Slots over the units of one selection -> hit rate, measured with the same model on text. Gemma 3 270M has .36, .65
and .78 at .5, 1 and 2, with 800 tokens selected."""
RETRIEVES = 0.1
"""Bytes over elements below which a code loses needles: a smaller one gets a warning."""
RETRIEVES_TRUNCATED = 0.2
"""`RETRIEVES` for truncated keys."""
_SPEED = 0.1
"""Worth of a hit rate of 1, as a share of needles: a step without hits takes about 1.5 times as long."""
QUEUE_HALVED = 0.004
"""Cost of halving the write queue, as a share of needles: a prefill waits for the disk more often."""
_SHARES = (1 / 4, 1 / 6, 1 / 8, 5 / 48, 1 / 12, 1 / 16, 5 / 96, 1 / 24, 1 / 32)
"""Bytes over elements to try."""


def faithful(context: int) -> tuple[dict[str, Any], ...]:
    """`Goals.faithful`: `counts_for_fidelity` are selected, the next best tokens are estimated, and entries are stored
    in 8 bits."""
    counts = counts_for_fidelity(context)
    return (
        *({"num_selected": count, "remainder": True, "entry_bits": 8} for count in counts),
        {"num_selected": 400, "remainder": True, "entry_bits": None},
        {"num_selected": 400, "remainder": False, "entry_bits": 8},
    )


QUICK: tuple[dict[str, Any], ...] = ({"remainder": False, "entry_bits": 8}, {"remainder": False})
"""`Goals.quick`: in 8 bits, slots hold twice as many tokens, and a step reads half as much and takes as long. Some very
small budgets have no room to convert entries."""


def quickest(config: DiskSwapConfig) -> bool:
    """`Goals.quickest`: slots in 16 bits hold twice what a step selects. With so few reads 8 bits take 1.28 times as
    long (1/13 of 30K tokens). At 15K slots hold 1.1 times, and 8 bits take as long (SmolLM2-135M)."""
    return (config.reuse_capacity or 0) >= 2 * config.num_selected


def sizes_to_try(key_width: int) -> list[int]:
    """Code sizes in bytes that are worth trying, ascending."""
    most = most_bytes(key_width)
    return sorted({max(4, min(most, round(share * key_width))) for share in _SHARES})


def worth(summary_bytes: int, key_width: int, slots: float, selected: float) -> float:
    """Score for comparing caches: codes of `summary_bytes`, slots for `slots` tokens, `selected` tokens a step."""
    return _SPEED * on_curve(slots / max(1, selected), HITS) - on_curve(summary_bytes / key_width, LOST)


def _reach(selected: float, alone: bool = False) -> float:
    """Factor by which codes may be shorter than in steps that select 400 tokens: a step that selects more also finds a
    token that a shorter code ranks lower. Of 11 needles in 7K tokens, 800 tokens with 12 bytes found 8, and 400 with 20
    found 7 (SmolLM2-135M). More than 800 tokens count as 800, because no more were measured. Fewer than 400 count as
    400, but for a device that runs steps `alone` the same root is assumed: it weighs tokens against codes."""
    return min(2.0, max(0.0 if alone else 1.0, selected / 400)) ** 0.5


def needles_lost(config: DiskSwapConfig, geometry: Geometry, alone: bool = False) -> float:
    """The share of needles that coded keys of this size lose, by `LOST`. For truncated keys 0, or 1 if they are short:
    their share was not measured. `alone`: see `_reach`."""
    width = max((form.key_width for form in geometry.forms(config.group_size)), default=0)
    if config.summaries != "coded" or not width:
        return float(bool(width and shortfalls(config, width, ())))
    nbytes = config.summary_bytes or default_summary_bytes(width)
    return on_curve(nbytes * _reach(config.num_selected, alone) / width, LOST)


def shortfalls(config: DiskSwapConfig, key_width: int, given: Iterable[str]) -> list[str]:
    """Warnings about compact keys too short to retrieve needles, for keys of `key_width` elements. A rank or an adapter
    that the user set (named in `given`) gets none."""
    chosen, warnings = set(given), []
    if config.summaries == "coded":
        name, most = "compact keys", most_bytes(key_width)
        nbytes = min(config.summary_bytes or default_summary_bytes(key_width), most)
        needed = min(math.ceil(RETRIEVES * key_width / _reach(config.num_selected)), most)
    else:
        name = f"compact keys truncated to a rank, in {config.summaries},"
        itemsize, usual_rank = getattr(torch, config.summaries).itemsize, default_rank(key_width)
        nbytes = (config.rank or usual_rank) * itemsize
        needed = min(math.ceil(RETRIEVES_TRUNCATED * key_width), usual_rank * itemsize)
    if nbytes < needed and (config.summaries == "coded" or not chosen & {"rank", "adapter"}):
        warnings.append(
            f"{name} of {nbytes} bytes a token lose needles that the full cache finds; {needed} bytes lose hardly any "
            f"{LOST_BY}"
        )
    return warnings


_LAST_TAIL = 8
"""`num_recent` if not even `SHORT_TAIL` leaves room."""

MAX_COMPRESSION = 32
"""Limit of sigma: bytes of a token's keys over bytes of its compact key (KVSwap, appendix A.4)."""


def fit_disk_swap(search: Search[DiskSwapConfig], forms: list[RecordFormat], area_bytes: int) -> DiskSwapConfig:
    """The best configuration that fits the budget. Priorities, in this order:

    1. `num_selected` is 400 (appendix A.2), or a goal's, and compact keys are long enough to retrieve needles. Codes
       have an eighth of a byte an element; truncated keys, if the fields ask for them, five sixths of the default rank.
       Shorter keys lose needles, whereas fewer slots only cost time. To make room, first the look-ahead's staging areas
       go (`look_ahead=False`, unless they take less than a tenth of the budget). Then the write queue and the two
       streaming buffers shrink: from a tenth of the budget each (at most 4 MiB and 1024 tokens) to a fortieth, then to
       the minimum.
    2. The rest of the budget goes to codes and slots by their `worth`. With truncated keys it goes, in turn, to slots
       for `num_selected` tokens, the default rank, slots for twice `num_selected`, a rank of half the key width, and
       slots for all tokens. A prefill has no slots, so its room goes to blocks of up to 2048 tokens and a third of the
       context.
       For a device that runs steps alone, slots hold a complete choice from the first on.
    3. If step 1 does not fit, the longest compact keys that fit are used, down to 1/32 of the keys' bytes (sigma's
       limit). Slots get the rest. Below that, `num_recent` shrinks (16, then 8). If codes still do not fit (a
       short context of a small model), keys are truncated. `num_selected` shrinks last (to 64).

    `group_size` and sinks never change.

    Args:
        forms: record format of each kind of layer.
        area_bytes: bytes of one staging area.

    Raises `BudgetError` with the minimum memory needed, `ConfigError` for a wrong field.
    """
    for name in ("rank", "summary_bytes"):
        if search.fields.get(name, 0) is None:
            del search.fields[name]
    look_ahead = 2 * area_bytes <= search.memory // 10 and not search.alone
    kinds: list[_Coded | _Truncated] = [_Truncated(search, forms)]
    if search.alone:
        kinds = [_Coded(search, forms)]
    elif search.config({}).summaries == "coded":
        kinds.insert(0, _Coded(search, forms))
        if search.fields.get("summary_dtype") == "coded" or "summary_bytes" in search.fields:
            kinds.pop()
    frugal, levels = list(_frugal(search, forms)), list(_levels(search, look_ahead))
    slots = _selected(search) if search.alone else 0
    tried = []
    for keys, chosen in _tried(search, kinds, levels, frugal, slots):
        if search.fits(chosen):
            return search.config(search.wider_streams(keys.filled(chosen)))
        tried.append(chosen)
    return search.config(search.first_fit(tried))


def _tried(
    search: Search[DiskSwapConfig], kinds: list[_Coded | _Truncated], levels: list[dict[str, Any]],
    frugal: list[list[dict[str, Any]]], slots: int,
) -> Iterator[tuple[_Coded | _Truncated, dict[str, Any]]]:  # fmt: skip
    """Fields to try, best first, and what they keep of keys."""
    complete = [fewer[0] for fewer in frugal]
    for keys in kinds:
        for amount, some in ((keys.wanted, levels), (keys.least, [*reversed(levels), *complete])):
            group = [{**level, **keys.of(amount), "reuse_capacity": slots} for level in some]
            yield from ((keys, chosen) for chosen in search.group(group))
    for fewer in [[level] for level in complete] if search.alone else frugal:
        each = [[{**level, **keys.of(keys.least), "reuse_capacity": slots} for keys in kinds] for level in fewer]
        yield from zip(kinds, search.shrinking(each), strict=True)


class _Truncated:
    """Truncated keys: the ranks to try, and how the rest of a budget is spent."""

    def of(self, amount: int) -> dict[str, Any]:
        """The fields for a rank of `amount`."""
        return {"rank": amount}

    def __init__(self, search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> None:
        self._search = search
        self.least, self.most = _ranks(forms, search)
        self._default = max((default_rank(form.key_width) for form in forms), default=1)
        self.wanted = min(self.most, max(self.least, -(-self._default * 5 // 6)))

    def filled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with the rest of the budget spent on rank and slots."""
        search, selected, default = self._search, chosen["num_selected"], self._default
        chosen = search.most(chosen, "rank", min(-(-default * 5 // 6), self.most))
        chosen = search.most(chosen, "reuse_capacity", selected)
        chosen = search.most(chosen, "rank", min(default, self.most))
        chosen = search.most(chosen, "reuse_capacity", 2 * selected)
        chosen = search.most(chosen, "rank", self.most)
        return search.most(chosen, "reuse_capacity", search.max_context)


class _Coded:
    """Coded keys: the code sizes to try, and how the rest of a budget is spent."""

    def of(self, amount: int) -> dict[str, Any]:
        """The fields for codes of `amount` bytes."""
        return {"summary_bytes": amount}

    def __init__(self, search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> None:
        self._search = search
        self._width = max((form.key_width for form in forms), default=1)
        given = search.fields.get("summary_bytes")
        self._amounts = sizes_to_try(self._width) if given is None else [given]
        self.least = self._amounts[0]
        self.wanted = default_summary_bytes(self._width) if given is None else given

    def filled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with the rest of the budget spent on codes and slots by their `worth`. No slots are
        bought with the bytes that keep nearly all needles.

        Ties go to the smaller queue, then to the longer code. Choices are tried in the order of their worth with
        slots for all tokens, an upper bound.
        """
        search, width, selected = self._search, self._width, chosen["num_selected"]
        queues = {queue for queue in map(_queue_of, map(search.streams, STREAM_SHARES)) if queue < _queue_of(chosen)}
        choices = [
            (halved, amount, queue)
            for halved, queue in enumerate([_queue_of(chosen), *sorted(queues, reverse=True)])
            for amount in self._amounts
        ]

        def value(halved: int, amount: int, slots: int) -> tuple[float, int, int]:
            lost = on_curve(amount * _reach(selected, search.alone) / width, LOST)
            return worth(amount, width, slots, selected) - halved * QUEUE_HALVED - (lost > FEW_LOST), halved, amount

        def most(choice: tuple[int, int, int]) -> tuple[float, int, int]:
            return value(choice[0], choice[1], search.max_context)

        best = None
        for halved, amount, queue in sorted(choices, key=most, reverse=True):
            if best is not None and most((halved, amount, queue)) < best[0]:
                break
            tried = {**chosen, "write_queue": queue, "summary_bytes": amount}
            if search.fits(tried):
                tried = search.most(tried, "reuse_capacity", search.max_context)
                reached = value(halved, amount, tried["reuse_capacity"])
                if best is None or reached > best[0]:
                    best = reached, tried
        return chosen if best is None else best[1]


def _queue_of(chosen: dict[str, Any]) -> int:
    queue: int = chosen["write_queue"]
    return queue


def _selected(search: Search[DiskSwapConfig]) -> int:
    return search.fields.get("num_selected", DiskSwapConfig.num_selected)


def _levels(search: Search[DiskSwapConfig], look_ahead: bool) -> Iterator[dict[str, Any]]:
    """Fields to try with the full `num_selected`, best first."""
    streams = [search.streams(share) for share in STREAM_SHARES]
    full: dict[str, Any] = {"num_selected": _selected(search), "look_ahead": False}
    if look_ahead:
        yield {**streams[0], **full, "look_ahead": None}
    for stream in streams:
        yield {**stream, **full}
    yield {**search.least_streams(), **full}


def _frugal(search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> Iterator[list[dict[str, Any]]]:
    """Fields to try if no level fits: a shorter tail with fewer and fewer groups, then a still shorter tail. Peaks do
    not grow along a list."""
    group, most = max((form.group_size for form in forms), default=1), _selected(search)
    for recent in (SHORT_TAIL, _LAST_TAIL):
        fields = {**search.least_streams(recent), "look_ahead": False}
        counts = [most, *range(most - group, LEAST_SELECTED, -group), LEAST_SELECTED]
        yield [{**fields, "num_selected": count} for count in counts]


def _ranks(forms: list[RecordFormat], search: Search[DiskSwapConfig]) -> tuple[int, int]:
    """Smallest and largest rank to try: sigma's limit; half the key width, or the adapter's rank if that is less."""
    fields = search.fields
    if fields.get("rank") is not None:
        return fields["rank"], fields["rank"]
    item = _item_bytes(search.config({}).summaries)
    least = max((-(-form.key_width * form.dtype.itemsize // (MAX_COMPRESSION * item)) for form in forms), default=1)
    most = max((max(1, form.key_width // 2, default_rank(form.key_width)) for form in forms), default=1)
    if fields.get("adapter") is not None:
        most = min(most, adapter_rank(fields["adapter"]))
    return min(least, most), most


def _item_bytes(summaries: str) -> int:
    """Bytes of one component of truncated keys: 1 for "coded", which falls back to int8."""
    return 1 if summaries == "coded" else getattr(torch, summaries).itemsize
