"""Configurations of one cache under the user's fields, and whether they fit a budget: what every choice is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..config import OffloadConfig
from ..errors import BudgetError
from ..report.text import least_size_text, size_text

Config = TypeVar("Config", bound=OffloadConfig)

_LEAST_QUEUE, _LARGEST_QUEUE = 2**16, 4 * 2**20
_WIDE_BLOCK = 2048
STREAM_SHARES = (10, 20, 40)
"""The write queue, and the two buffers of a stream, take one part in so many of the budget each."""
LEAST_RECENT, SHORT_TAIL = 4, 16


@dataclass
class Search(Generic[Config]):
    """Nothing is allocated. `fields` are the user's and stay as they are.

    Attributes:
        peak_of: bytes that a configuration holds at most, by the plan of its cache.
        records: (bytes, tokens) of a record, of each kind of layer.
        full_kv_bytes: what `DynamicCache` would hold.
    """

    config_class: type[Config]
    peak_of: Callable[[Config], int]
    records: list[tuple[int, int]]
    memory: int
    max_context: int
    max_batch: int
    fields: dict[str, Any]
    full_kv_bytes: int
    _peaks: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def config(self, chosen: dict[str, Any]) -> Config:
        """The configuration of `chosen` fields under the user's, with its limits. Raises `ConfigError`."""
        limits = {"memory": self.memory, "max_context": self.max_context, "max_batch": self.max_batch}
        return self.config_class.load(None, {**chosen, **self.fields, **limits})

    def peak(self, chosen: dict[str, Any]) -> int:
        """Bytes that `chosen` under the user's fields holds at most; planned once, whoever asks."""
        key = repr(sorted({**chosen, **self.fields}.items()))
        if key not in self._peaks:
            self._peaks[key] = self.peak_of(self.config(chosen))
        return self._peaks[key]

    def fits(self, chosen: dict[str, Any]) -> bool:
        return self.peak(chosen) <= self.memory

    def first_fit(
        self, tried: Iterable[dict[str, Any]], smallest: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The first of `tried` that fits; if none does, the first that fits with the smallest streams.

        `smallest` gives a choice with the smallest streams; None: `least_streams` does. These do not depend on the
        memory, so the least that any choice takes is the minimum memory needed. Raises `BudgetError` with that minimum.
        """
        refused = []
        for chosen in tried:
            if self.fits(chosen):
                return chosen
            refused.append(chosen)
        small = [(smallest or self._with_least_streams)(chosen) for chosen in refused]
        peaks = [self.peak(chosen) for chosen in small]
        for chosen, peak in zip(small, peaks, strict=True):
            if peak <= self.memory:
                return chosen
        raise self.refusal(min(peaks))

    def _with_least_streams(self, chosen: dict[str, Any]) -> dict[str, Any]:
        return {**chosen, **self.least_streams(chosen.get("num_recent"))}

    def most(self, chosen: dict[str, Any], name: str, most: int) -> dict[str, Any]:
        """`chosen`, which fits, with its number `name` as large as fits, up to `most`."""
        least = chosen[name]
        while least < most:
            middle = (least + most + 1) // 2
            if self.fits({**chosen, name: middle}):
                least = middle
            else:
                most = middle - 1
        return {**chosen, name: least}

    def streams(self, share: int) -> dict[str, Any]:
        """A write queue and blocks that take one part in `share` of the budget each, but what they need."""
        block, least = 1024, self.least_block()
        record = max((nbytes / tokens for nbytes, tokens in self.records), default=1)
        while block > least and 2 * self.max_batch * block * record > self.memory // share:
            block //= 2
        queue = min(_LARGEST_QUEUE, self.memory // share)
        return {"block_tokens": max(block, least), "write_queue": max(queue, self.least_queue())}

    def wider_blocks(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with its blocks doubled while that fits, up to 2048 tokens and a third of the context.

        A prefill in pieces attends over all that came before block by block, and merges what each gives: 8K tokens in
        pieces of 2048 took a sixth more time with blocks of 512 than with blocks of 2048.
        """
        most = min(_WIDE_BLOCK, self.max_context // 3)
        while 2 * chosen["block_tokens"] <= most:
            wider = {**chosen, "block_tokens": 2 * chosen["block_tokens"]}
            if not self.fits(wider):
                break
            chosen = wider
        return chosen

    def least_streams(self, num_recent: int | None = None) -> dict[str, Any]:
        """The smallest queue and blocks; with `num_recent` latest tokens where that is given."""
        recent = {} if num_recent is None else {"num_recent": num_recent}
        return {"block_tokens": self.least_block(num_recent), "write_queue": self.least_queue(), **recent}

    def all_streams(self) -> Iterator[dict[str, Any]]:
        """Queues and blocks to try, the best first: a tenth of the budget each, a twentieth, a fortieth, the least."""
        yield from (self.streams(share) for share in STREAM_SHARES)
        yield self.least_streams()

    def short_tails(self) -> Iterator[dict[str, Any]]:
        """The smallest queue and blocks, with fewer and fewer latest tokens."""
        recent = self.config_class().num_recent
        while recent > LEAST_RECENT:
            recent //= 2
            yield self.least_streams(recent)

    def least_queue(self) -> int:
        """Room for two units of every row, so that one is written while another is packed."""
        return max((_LEAST_QUEUE, *(2 * self.max_batch * nbytes for nbytes, _ in self.records)))

    def least_block(self, num_recent: int | None = None) -> int:
        """No less than a rolling tail is filled from when a context is cut."""
        recent = self.fields.get("num_recent", num_recent or self.config_class().num_recent)
        group = max((tokens for _, tokens in self.records), default=1)
        return max(16, -(-recent // group) * group + 2 * group)

    def refusal(self, needed: int) -> BudgetError:
        """The error for a budget if nothing takes less than `needed` bytes. That number is enough as memory, and so is
        the rounded size printed after it."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        advice = "give as much, or lower max_context or max_batch"
        if given:
            given, advice = f" with {given}", f"{advice}, or leave fields to the planner"
        if needed >= self.full_kv_bytes:
            advice = f"{advice}; no cache is needed: the full KV (DynamicCache) takes {size_text(self.full_kv_bytes)}"
        return BudgetError(
            f"memory is {self.memory:,} bytes ({size_text(self.memory)}); {self.max_batch} x {self.max_context:,} "
            f"tokens need at least {needed:,} ({least_size_text(needed)}){given}: {advice}"
        )
