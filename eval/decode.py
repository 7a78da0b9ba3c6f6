"""A decoding step over a long context: `DiskSwapCache` against caches in memory and against reading all back."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.pace import Pace

from .disk import raw_rate
from .synthetic import Inputs, Shape, build_model, decode_step, fill, static_cache

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "DynamicCache": None,
    "StaticCache": None,
    "direct": {"engine": "direct"},
    "mapped": {"engine": "mapped"},
    "reload": {"engine": "direct", "exact": "bitwise"},
    "reload, streamed": {"engine": "direct", "exact": True},
}
"""Name -> fields of `DiskSwapCache`; None for transformers' own. The reloads read every layer back in every step, the
next block while this one is copied (bitwise) or attended to (streamed): what FlexGen does on a machine of this kind."""

LIKENESS = 0.97
"""Of successive inputs (see `Inputs`): gives about the hit rate of the real model on text, 0.75."""

IN_MEMORY, RELOADS = ("DynamicCache", "StaticCache"), ("reload", "reload, streamed")
_WARM_UP = 3
_SETTLED = 2 * Pace.TRIAL + _WARM_UP
"""Steps until a cache has found out whether to look ahead."""


@dataclass
class Contender:
    """One cache with its context, and what its steps took. Seconds and bytes, one entry a step."""

    name: str
    model: LlamaForCausalLM
    cache: Cache
    inputs: Inputs
    repetitions: list[list[float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)

    @property
    def own(self) -> DiskSwapCache | None:
        return self.cache if isinstance(self.cache, DiskSwapCache) else None

    def steps(self, count: int, keep: bool = True) -> None:
        """Decode `count` steps as one repetition."""
        seconds = []
        for _ in range(count):
            embedding = self.inputs.next()
            before = self._waited_and_read()
            start = time.perf_counter()
            decode_step(self.model, self.cache, embedding)
            seconds.append(time.perf_counter() - start)
            after = self._waited_and_read()
            if keep:
                self.stalls.append(after[0] - before[0])
                self.bytes_read.append(int(after[1] - before[1]))
        if keep:
            self.repetitions.append(seconds)

    def _waited_and_read(self) -> tuple[float, int]:
        if self.own is None:
            return 0.0, 0
        shared = self.own.shared
        return shared.counters.stall_seconds, sum(store.bytes_read for store in shared.stores)

    def summary(self) -> dict[str, Any]:
        """Median and p95 over all steps, the medians' spread over repetitions, and what the report says."""
        every = [second for repetition in self.repetitions for second in repetition]
        medians = [statistics.median(repetition) for repetition in self.repetitions]
        row: dict[str, Any] = {
            "median_seconds": statistics.median(every),
            "p95_seconds": float(np.percentile(every, 95)),
            "repetition_medians": medians,
            "spread": (max(medians) - min(medians)) / statistics.median(every),
        }
        if self.own is not None:
            report = self.own.report()
            row["stall_seconds"] = statistics.median(self.stalls)
            row["bytes_read"] = statistics.median(self.bytes_read)
            for name in ("hit_rate", "prefetch_hit_rate", "selected_fraction", "peak_memory_bytes", "store"):
                row[name] = getattr(report, name)
        return row


@contextlib.contextmanager
def reads_waited_for(cache: DiskSwapCache) -> Iterator[dict[str, float]]:
    """Overlap off: every read is waited for where it is issued. Yields its total "seconds" so far."""
    prefetcher = cache.shared.prefetcher
    original, spent = prefetcher.read, {"seconds": 0.0}

    def read(*args: Any) -> Any:
        start = time.perf_counter()
        ticket = original(*args)
        ticket.wait()
        spent["seconds"] += time.perf_counter() - start
        return ticket

    prefetcher.read = read  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        del prefetcher.read


def store_time(contender: Contender, count: int) -> dict[str, float]:
    """Seconds in the store and bytes from it, a step, with overlap off."""
    assert contender.own is not None
    before = contender._waited_and_read()[1]
    with reads_waited_for(contender.own) as spent:
        contender.steps(count, keep=False)
    nbytes = contender._waited_and_read()[1] - before
    return {
        "store_seconds": spent["seconds"] / count,
        "store_bytes_per_second": nbytes / spent["seconds"] if spent["seconds"] else 0.0,
    }


def run(
    tokens: int = 32768,
    steps: int = 20,
    reload_steps: int = 5,
    repetitions: int = 5,
    shape: Shape | None = None,
    names: tuple[str, ...] = tuple(CONTENDERS),
    path: str | None = None,
    fields: dict[str, Any] | None = None,
    likeness: float = LIKENESS,
) -> dict[str, Any]:
    """All contenders in turns, forth and back (ABBA), on one model's weights. `fields` go to "direct" and "mapped".

    Cold: "direct" bypasses the page cache, "mapped" drops its pages after use; both write without it.
    """
    shape = shape or Shape()
    plain, attached = build_model(shape), build_model(shape)  # transformers' own run without our seams
    with contextlib.ExitStack() as stack:
        contenders = []
        room = tokens + _SETTLED + steps * (repetitions + 2)
        for name in track(names, f"contexts of {tokens:,} tokens"):
            own = CONTENDERS[name]
            if own is not None:
                extra = {} if "exact" in own else fields or {}
                cache: Cache = stack.enter_context(DiskSwapCache(attached, path=path, **{**own, **extra}))
            else:
                cache = static_cache(plain, room) if name == "StaticCache" else DynamicCache(config=plain.config)
            model = plain if own is None else attached
            fill(cache, model, shape, tokens)
            if isinstance(cache, DiskSwapCache):
                cache.shared.prefetcher.flush()
            contenders.append(Contender(name, model, cache, Inputs(shape, likeness)))
        length: Callable[[Contender], int] = lambda one: reload_steps if one.name in RELOADS else steps  # noqa: E731
        for one in contenders:
            one.steps(_WARM_UP if one.name in RELOADS else _SETTLED, keep=False)
            if one.own is not None:
                one.own.shared.reset_counters()
        turns = [one for turn in range(repetitions) for one in (contenders if turn % 2 == 0 else contenders[::-1])]
        for one in track(turns, "steps"):
            one.steps(length(one))
        rows = {one.name: one.summary() for one in contenders}
        for one in contenders:
            if one.own is not None:
                rows[one.name] |= store_time(one, length(one))
        raw = [raw_rate(size, path) for size in sorted({s.record_bytes for s in _stores(contenders)} | {1 << 20})]
    return {
        "tokens": tokens,
        "shape": vars(shape),
        "likeness": likeness,
        "threads": torch.get_num_threads(),
        "full_kv_bytes": tokens * shape.token_bytes,
        "rows": rows,
        "raw_rates": raw,
        "ratios": ratios(rows),
    }


def _stores(contenders: list[Contender]) -> Iterator[Any]:
    for one in contenders:
        if one.own is not None:
            yield from one.own.shared.stores


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times faster the faster engine is a step than the best in memory and the faster reload, and how many
    times less it waits ("stall") and reads with overlap off ("store") than that reload."""
    ours = min((n for n in ("direct", "mapped") if n in rows), key=lambda n: rows[n]["median_seconds"])
    found: dict[str, float] = {}
    memory = [rows[name]["median_seconds"] for name in IN_MEMORY if name in rows]
    if memory:
        found["step_against_memory"] = min(memory) / rows[ours]["median_seconds"]
    reloads = [name for name in RELOADS if name in rows]
    if reloads:
        reload = min(reloads, key=lambda name: rows[name]["median_seconds"])
        found["step_against_reload"] = rows[reload]["median_seconds"] / rows[ours]["median_seconds"]
        for key in ("stall", "store"):
            found[f"{key}_against_reload"] = rows[reload][f"{key}_seconds"] / max(rows[ours][f"{key}_seconds"], 1e-9)
    return found


def main() -> None:
    """Seconds a decoding step over a long context of random keys."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reload-steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for direct and mapped")
    parser.add_argument("--likeness", type=float, default=LIKENESS, help="of successive inputs, 0 to 1")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--path", help="folder on the disk to use")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from .needles import parse_setting

    torch.set_num_threads(arguments.threads)
    result = run(
        arguments.tokens,
        arguments.steps,
        arguments.reload_steps,
        arguments.repetitions,
        Shape(layers=arguments.layers),
        tuple(arguments.contenders),
        arguments.path,
        parse_setting(":" + ",".join(arguments.set))[1],
        arguments.likeness,
    )
    for name, row in result["rows"].items():
        more = ""
        if "store_seconds" in row:
            more = f"waited {1e3 * row['stall_seconds']:6.1f}, in the store without overlap "
            more += f"{1e3 * row['store_seconds']:6.1f}"
            more += f" ({row['store_bytes_per_second'] / 1e6:.0f} MB/s), hits {row['hit_rate'] or 0:.2f}"
        print(
            f"{name:17} {1e3 * row['median_seconds']:7.1f} ms a step (p95 {1e3 * row['p95_seconds']:7.1f}, "
            f"spread {row['spread']:.0%}) {more}"
        )
    for raw in result["raw_rates"]:
        print(f"disk alone, {raw['record_bytes'] >> 10} KiB records: {raw['bytes_per_second'] / 1e6:.0f} MB/s")
    print(", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
