"""The best configuration within a budget, for any cache: first the streams, then selected tokens, then reuse slots."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..config import OffloadConfig
from ..errors import BudgetError
from ..report.report import least_size_text, size_text
from .plan import MemoryPlan

# Configurations of one cache under the user's fields, and whether they fit a budget: every choice is made of these

Config = TypeVar("Config", bound=OffloadConfig)

_LEAST_QUEUE, _LARGEST_QUEUE = 2**16, 4 * 2**20
_WIDE_BLOCK = 2048
STREAM_SHARES = (10, 20, 40)
"""Divisors of the budget: the write queue gets one such share, the two buffers of a stream another."""
LEAST_RECENT, SHORT_TAIL = 4, 16


@dataclass
class Search(Generic[Config]):
    """A search for fields that fit a budget. It allocates nothing. `fields` are the user's or a goal's, and never
    change.

    Attributes:
        plan_of: the cache's plan of a configuration.
        records: (bytes, tokens) of a record, for each kind of layer.
        full_kv_bytes: size of the full KV (`DynamicCache`).
        given: names of the user's fields.
        device: type of the device that attention runs on.
        host_memory: limit of the host side; None: no limit.
        longest_block: most tokens of a block on a device other than the CPU, where each block costs launches.
        alone: slots hold a complete choice, so that steps run on a device without the host.
        chosen: tokens a layer of slots with which a device alone can read what the model chooses; 0: none can.
    """

    config_class: type[Config]
    plan_of: Callable[[Config], MemoryPlan]
    records: list[tuple[int, int]]
    memory: int
    max_context: int
    max_batch: int
    fields: dict[str, Any]
    full_kv_bytes: int
    given: frozenset[str]
    device: str = "cpu"
    host_memory: int | None = None
    longest_block: int | None = None
    alone: bool = False
    chosen: int = 0
    _peaks: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)

    def config(self, chosen: dict[str, Any]) -> Config:
        """The configuration of the `chosen` fields, overridden by `fields`, with its limits. Raises `ConfigError`."""
        limits = {"memory": self.memory, "max_context": self.max_context, "max_batch": self.max_batch}
        return self.config_class.load(None, {**chosen, **self.fields, **limits})

    def peaks(self, chosen: dict[str, Any]) -> tuple[int, int]:
        """Maximum bytes in use with the `chosen` fields, overridden by `fields`: those that `memory` limits, and those
        of the host side. Each choice is planned once."""
        key = repr(sorted({**chosen, **self.fields}.items()))
        if key not in self._peaks:
            plan = self.plan_of(self.config(chosen))
            self._peaks[key] = plan.peak_bytes, plan.host_bytes
        return self._peaks[key]

    def excess(self, chosen: dict[str, Any]) -> int:
        """Bytes by which a choice exceeds the limit that it exceeds most; 0 or less: it fits."""
        peak, host = self.peaks(chosen)
        return peak - self.memory if self.host_memory is None else max(peak - self.memory, host - self.host_memory)

    def fits(self, chosen: dict[str, Any]) -> bool:
        return self.excess(chosen) <= 0

    def first_fit(
        self, tried: Iterable[dict[str, Any]], smallest: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The first choice in `tried` that fits; if none does, the first that fits with the smallest streams.

        `smallest` gives a choice the smallest streams; the default is `least_streams`. These do not depend on the
        budget, so the smallest peak is the minimum memory needed. Raises `BudgetError` with that minimum.
        """
        refused = []
        for chosen in tried:
            if self.fits(chosen):
                return chosen
            refused.append(chosen)
        small = [(smallest or self._with_least_streams)(chosen) for chosen in refused]
        for chosen in small:
            if self.fits(chosen):
                return chosen
        peaks = [self.peaks(chosen) for chosen in small]
        hosts = [host for peak, host in peaks if peak <= self.memory]
        raise self.host_refusal(min(hosts)) if hosts else self.refusal(min(peak for peak, _ in peaks))

    def group(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`choices`, or only the last, which needs the least `memory`, if not even that fits: then one plan is enough
        for all of them."""
        return choices if self.peaks(choices[-1])[0] <= self.memory else choices[-1:]

    def shrinking(self, groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The first of the `groups` with a choice that fits; if none has one, the last. Peaks do not grow from group to
        group."""
        if not any(map(self.fits, groups[-1])):
            return groups[-1]
        return groups[bisect_left(groups, True, key=lambda group: any(map(self.fits, group)))]

    def _with_least_streams(self, chosen: dict[str, Any]) -> dict[str, Any]:
        return {**chosen, **self.least_streams(chosen.get("num_recent"))}

    def most(self, chosen: dict[str, Any], name: str, most: int) -> dict[str, Any]:
        """`chosen`, which fits, with its number `name` raised as far as the budget allows, up to `most`.

        Peaks grow almost linearly with most numbers, so interpolation needs few plans. It alternates with bisection.
        Reuse slots count in units of records.
        """
        step = max((tokens for _, tokens in self.records), default=1) if name == "reuse_capacity" else 1
        first = chosen[name] // step

        def tried(count: int) -> dict[str, Any]:
            return {**chosen, name: min(most, count * step) if count > first else chosen[name]}

        least, above_it, halve = first, -(-most // step), False
        below, above = self.excess(chosen), self.excess(tried(above_it))
        if above <= 0:
            return tried(above_it)
        while above_it - least > 1:  # `least` fits, and `above_it` does not
            width = above_it - least
            middle = least + (width // 2 if halve else int(-below / (above - below) * width))
            middle = min(max(middle, least + 1), above_it - 1)
            if (excess := self.excess(tried(middle))) <= 0:
                least, below = middle, excess
            else:
                above_it, above = middle, excess
            halve = 2 * (above_it - least) > width and not halve
        return tried(least)

    def most_slots(self, chosen: dict[str, Any], complete: int) -> dict[str, Any]:
        """As `most` for slots. On a device they hold `complete` tokens of a step's choice if so many fit, also if fewer
        do not: then steps need no buffers of the host."""
        most = self.most(chosen, "reuse_capacity", self.max_context)
        holding = {**chosen, "reuse_capacity": complete}
        if self.device != "cuda" or complete <= most["reuse_capacity"] or not self.fits(holding):
            return most
        return self.most(holding, "reuse_capacity", self.max_context)

    def streams(self, share: int) -> dict[str, Any]:
        """A write queue and blocks that take 1/`share` of the budget each, or their minimum if that is more."""
        block, least = 1024, self.least_block()
        record = max((nbytes / tokens for nbytes, tokens in self.records), default=1)
        while block > least and 2 * self.max_batch * block * record > self.memory // share:
            block //= 2
        queue = min(_LARGEST_QUEUE, self.memory // share)
        return {"block_tokens": max(block, least), "write_queue": max(queue, self.least_queue())}

    def wider_streams(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with its blocks and its write queue doubled in turn while that fits: blocks up to 2048
        tokens and a third of the context, or `longest_block`; the queue up to its share in `streams`.

        Both are used while a prefill runs, which may need less memory than a step. A chunked prefill attends to the
        earlier tokens block by block and merges the results. 8K tokens in chunks of 2048 took a sixth longer with
        blocks of 512 than with blocks of 2048. With `ClusterCache`, 6K tokens took a sixth longer with a queue of 64
        KiB than with 1 MiB (two cores of an AMD EPYC).
        """
        longest = self.longest_block
        block = min(_WIDE_BLOCK, self.max_context // 3) if longest is None else min(longest, self.max_context)
        most = {"block_tokens": block}
        most["write_queue"] = self.streams(STREAM_SHARES[0])["write_queue"]
        growing = [name for name in most if name not in self.fields]
        while growing:
            for name in list(growing):
                wider = {**chosen, name: 2 * chosen[name]}
                if wider[name] > most[name] or not self.fits(wider):
                    growing.remove(name)
                else:
                    chosen = wider
        return chosen

    def least_streams(self, num_recent: int | None = None) -> dict[str, Any]:
        """The smallest queue and blocks, with `num_recent` latest tokens if that is given."""
        recent = {} if num_recent is None else {"num_recent": num_recent}
        return {"block_tokens": self.least_block(num_recent), "write_queue": self.least_queue(), **recent}

    def all_streams(self) -> Iterator[dict[str, Any]]:
        """Queues and blocks to try, the best first: 1/10 of the budget each, 1/20, 1/40, the minimum."""
        yield from (self.streams(share) for share in STREAM_SHARES)
        yield self.least_streams()

    def short_tails(self) -> Iterator[dict[str, Any]]:
        """The smallest queue and blocks, each time with half as many latest tokens."""
        recent = self.config_class.num_recent
        while recent > LEAST_RECENT:
            recent //= 2
            yield self.least_streams(recent)

    def least_queue(self) -> int:
        """Room for two units of every row, so that one is written while another is packed."""
        return max((_LEAST_QUEUE, *(2 * self.max_batch * nbytes for nbytes, _ in self.records)))

    def least_block(self, num_recent: int | None = None) -> int:
        """The minimum block: as many tokens as refill a rolling tail when a context is truncated."""
        recent = self.fields.get("num_recent", num_recent or self.config_class.num_recent)
        group = max((tokens for _, tokens in self.records), default=1)
        return max(16, -(-recent // group) * group + 2 * group)

    def refusal(self, needed: int) -> BudgetError:
        """The error for a budget below `needed` bytes, the minimum. That number is enough as `memory`, and so is the
        rounded size printed after it."""
        given, advice = self._given(), "raise memory, or lower max_context or max_batch"
        advice += ", or leave fields to the planner" if given else ""
        if needed >= self.full_kv_bytes:
            advice = f"{advice}; no cache is needed: the full KV (DynamicCache) takes {size_text(self.full_kv_bytes)}"
        kind = " of device memory" if self.device == "cuda" else ""
        error = BudgetError(
            f"memory is {self.memory:,} bytes ({size_text(self.memory)}), which is too small: {self.max_batch} x "
            f"{self.max_context:,} tokens need at least {needed:,} ({least_size_text(needed)}){kind}{given}: {advice}"
        )
        error.needed = needed
        return error

    def host_refusal(self, needed: int) -> BudgetError:
        """As `refusal`, for host memory below `needed` bytes."""
        limit = self.host_memory or 0
        advice = ", or pass engine=\"auto\"" if self.fields.get("engine") == "memory" else ""
        error = BudgetError(
            f"host_memory is {limit:,} bytes ({size_text(limit)}), which is too small: {self.max_batch} x "
            f"{self.max_context:,} tokens need at least {needed:,} ({least_size_text(needed)}) of host memory"
            f"{self._given()}: raise host_memory, or lower max_context or max_batch{advice}"
        )
        error.needed, error.of_host = needed, True
        return error

    def _given(self) -> str:
        """The user's fields."""
        given = [f"{name}={value!r}" for name, value in self.fields.items() if name in self.given - {"host_memory"}]
        return f" with {', '.join(given)}" if given else ""


LEAST_SELECTED = 64
LOST_BY = "(measured on SmolLM2-135M): raise memory, or lower max_context"
"""End of the warnings about needles that a budget loses."""

FAST_BLOCK = 256
"""Smallest `block_tokens` with which a chunked prefill takes less than a tenth longer than with blocks of 1024."""
_LONG_CONTEXT = 2048
"""Shortest context, in tokens, for which small blocks are reported: a shorter one has only a few blocks."""
_SLOWER = {16: 2.4, 32: 1.7, 48: 1.5, 64: 1.35, 128: 1.2}
"""Processor time of a prefill of 4,096 tokens in chunks of 1,024, relative to blocks of 1024, by `block_tokens`:
three layers of SmolLM2-135M's shape, one x86 core. With two layers of Gemma 3 270M's, a tenth less is added."""


def slow_blocks(config: OffloadConfig) -> str | None:
    """Warning about small blocks, which slow a chunked prefill down because it attends to the earlier tokens block by
    block; None if they are large enough."""
    block, context = config.least_block, config.max_context
    if block >= FAST_BLOCK or context is None or context < _LONG_CONTEXT:
        return None
    times = next((slower for tokens, slower in _SLOWER.items() if block <= tokens), 1.1)
    return (
        f"a chunked prefill takes about {times:g} times the processor time: the budget only has room for blocks of "
        f"{block} tokens (block_tokens), and {FAST_BLOCK} would be enough: raise memory, or lower max_context"
    )


def with_host_slots(search: Search[Config], config: Config) -> Config:
    """`config` with slots in host memory for what the limit of host memory leaves, if the model is on a device and the
    records are on the disk. With records in host memory, slots there would be copies of it."""
    if search.device == "cpu" or search.host_memory is None or config.engine == "memory":
        return config
    chosen = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    if chosen.get("host_slots", 0) is not None:  # the user's, or the cache has none
        return config
    return search.config(search.most({**chosen, "host_slots": 0}, "host_slots", search.host_memory))


def fit_nothing(search: Search[Config]) -> Config:
    """For a model none of whose layers are offloaded: no field can shrink. Raises `BudgetError`."""
    least = {"write_queue": search.least_queue()}
    return search.config(search.first_fit([least], smallest=dict))


def fit_stream(search: Search[Config]) -> Config:
    """For a cache that streams all stored tokens.

    Takes the largest `block_tokens` up to 1024 and the largest `write_queue` up to 4 MiB that need at most 1/10 of the
    budget each; else 1/20, 1/40, or their minimum. Then it lowers `num_recent`, from 32 down to 4, for a shorter
    rolling tail. On a device, blocks get the rest. Raises `BudgetError` with the minimum memory.
    """
    chosen = search.first_fit(search.group([*search.all_streams(), *search.short_tails()]))
    return search.config(chosen if search.longest_block is None else search.wider_streams(chosen))


def fit_slots(search: Search[Config]) -> Config:
    """For a model that chooses by itself what steps attend to: its indexer's keys in memory, or on the disk if they do
    not fit (`indexer_bits=0`); the largest streams that fit, and slots in the rest. On a device slots come first, if
    they can hold what the model chooses: then steps run there alone. Raises `BudgetError` with the minimum memory."""
    none, streams = {"reuse_capacity": 0}, [*search.all_streams(), *search.short_tails()]
    kept: list[dict[str, Any]] = [{}] if "indexer_bits" in search.fields else [{}, {"indexer_bits": 0}]
    groups = [[{**one, **bits, **none} for one in streams] for bits in kept]
    if search.chosen:
        groups = [[{**one, "reuse_capacity": search.chosen} for one in group] for group in groups] + groups
    chosen = search.first_fit(choice for group in groups for choice in search.group(group))
    chosen = search.most({**chosen, **search.fields}, "reuse_capacity", search.max_context)
    return search.config(chosen if search.longest_block is None else search.wider_streams(chosen))


def fit_selective(search: Search[Config]) -> Config:
    """For a cache that selects and has no `fit` of its own.

    Keeps all of `num_selected`, with the largest streams that leave room for it; the rest becomes reuse slots. If that
    does not fit, it shortens the tail, then selects fewer tokens. Raises `BudgetError` with the minimum memory.
    """
    selected: int = search.config(search.least_streams()).num_selected  # type: ignore[attr-defined]
    full = {"num_selected": selected, "reuse_capacity": 0}
    group = max((tokens for _, tokens in search.records), default=1)
    tried = [{**streams, **full} for streams in (*search.all_streams(), search.least_streams(SHORT_TAIL))]
    counts = [*range(selected - group, LEAST_SELECTED, -group), min(selected, LEAST_SELECTED)]
    fewer = search.shrinking([[{**tried[-1], "num_selected": count}] for count in counts])
    chosen = search.first_fit((*search.group(tried), *fewer))
    return search.config(search.most(chosen, "reuse_capacity", search.max_context))
