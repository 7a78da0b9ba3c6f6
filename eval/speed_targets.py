"""What the project promises of speed: each figure as a ratio of rows of one comparison, and the runs that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .compare import compare, setting_of
from .contenders import FULL, IN_MEMORY, NO_REUSE, OWN, RELOADS, SINGLE
from .disk import raw_rate
from .studies.common import judged


def store_over_reload(result: dict[str, Any]) -> float | None:
    """Times less time in the store a step, overlap off, than the reload that takes least."""
    rows = result["rows"]
    taken = [rows.get(name, {}).get("off", {}) for name in RELOADS]
    reloads = [mode["store_seconds"] for mode in taken if "store_seconds" in mode]
    return min(reloads) / rows[OWN]["off"]["store_seconds"] if OWN in rows and reloads else None


def step_over_reload(result: dict[str, Any], overlap: str = "on") -> float | None:
    """Times less time a step than the faster reload; a replay has no MLP."""
    rows = result["rows"]
    reloads = [rows[name][overlap]["median_seconds"] for name in RELOADS if overlap in rows.get(name, {})]
    return min(reloads) / rows[OWN][overlap]["median_seconds"] if OWN in rows and reloads else None


def effect_of_grouping(result: dict[str, Any], rate: Callable[[int], float]) -> dict[str, float]:
    """Store time of single tokens over that of groups, both without reuse, and its share of the ratio of the raw rates
    of the two read sizes. `rate`: bytes a second of raw random reads of a size.

    "share" takes the records' sizes; "share_of_requests" the mean sizes of the requests that were made of them, since
    neighbours among the selected are one request.
    """
    single, grouped = (result["rows"][name] for name in (SINGLE, NO_REUSE))
    measured = single["off"]["store_seconds"] / grouped["off"]["store_seconds"]
    sizes = [row["record_bytes"] for row in (single, grouped)]
    requests = [round(row["off"]["mean_request_bytes"] / 4096) * 4096 for row in (single, grouped)]
    raw, of_requests = (rate(large) / rate(small) for small, large in (sizes, requests))
    return {
        "measured": measured,
        "raw": raw,
        "share": measured / raw,
        "raw_of_requests": of_requests,
        "share_of_requests": measured / of_requests,
    }


def effect_of_reuse(result: dict[str, Any]) -> float:
    """Times less time in the store with the reuse buffer than without, same configuration, overlap off."""
    rows = result["rows"]
    return rows[NO_REUSE]["off"]["store_seconds"] / rows[OWN]["off"]["store_seconds"]


def rate_over_memory(result: dict[str, Any]) -> float | None:
    """tokens/s over the faster of `DynamicCache` and `StaticCache`."""
    rows = result["rows"]
    rates = [rows[name]["on"]["tokens_per_second"] for name in IN_MEMORY if name in rows]
    return rows[OWN]["on"]["tokens_per_second"] / max(rates) if rates else None


def targets(
    tokens: int = 32768,
    batches: tuple[int, int] = (8, 4),
    path: str | None = None,
    device: str = "cpu",
    say: Callable[[str], Any] = print,
    shapes: tuple[str, str] = ("replay", "smollm2"),
    keep: Callable[[dict[str, Any]], Any] = lambda runs: None,
    **arguments: Any,
) -> dict[str, Any]:
    """The rows of the promise that concern time: "must_reach", and the runs that they come from.

    `batches`: of the replay and of the model, beside 1. `keep` is given the runs so far after each, since all of them
    take long. Other arguments are `compare`'s. Raises `ValueError` where one of our own cannot run; a figure without a
    run to compare with is None.
    """
    replay, model = shapes
    common = {"path": path, "device": device}
    runs: dict[str, Any] = {}

    def run(
        name: str, shape: str, batch: int, methods: tuple[str, ...], overlaps: tuple[str, ...], **more: Any
    ) -> dict[str, Any]:
        say(f"--- {shape}, batch {batch}, {more or 'own disk'}")
        found = compare(setting_of(shape, tokens, batch, **common, **more), methods, overlaps, say=say, **arguments)
        needed = [name for name in methods if name in found["left_out"] and name not in (FULL, *IN_MEMORY)]
        if needed:
            raise ValueError(f"{shape}, batch {batch}: {needed[0]} cannot run: {found['left_out'][needed[0]]}")
        runs[name] = found
        keep(runs)
        return found

    one = run("replay", replay, 1, (OWN, NO_REUSE, SINGLE, FULL), ("off", "on"))
    several = run("replay, large batch", replay, batches[0], (OWN, FULL), ("off", "on"))
    emmc = run("replay, emmc", replay, 1, (OWN, NO_REUSE), ("off",), profile="emmc")
    small = run("model", model, 1, (OWN, *IN_MEMORY), ("on",))
    large = run("model, batch", model, batches[1], (OWN, *IN_MEMORY), ("on",))
    rates: dict[int, float] = {}

    def rate(size: int) -> float:
        if size not in rates:
            rates[size] = raw_rate(size, path)["bytes_per_second"]
        return rates[size]

    grouping = effect_of_grouping(one, rate)
    waiting = min(run["rows"][OWN]["on"]["stall_share"] for run in (small, large))
    over_reload = "store time a step over full reload, 8B-shape replay, 32K, {}, 1/13 memory, overlap off"
    grouped = "effect of grouping on store time, no reuse, overlap off: "
    grouped += "share of the raw rate ratio of the two read sizes"
    reuse = "effect of the reuse buffer on store time, same configuration, overlap off: {}"
    in_memory = "tokens/s over the faster of `DynamicCache` and `StaticCache` in memory, SmolLM2 shape, 32K, {}"
    rows = [
        judged(over_reload.format("batch 1"), store_over_reload(one), least=17),
        judged(over_reload.format(f"batch {batches[0]}"), store_over_reload(several), least=60),
        judged(grouped, grouping["share"], least=0.85),
        judged(reuse.format("own disk"), effect_of_reuse(one), least=1.8),
        judged(reuse.format("emulated eMMC"), effect_of_reuse(emmc), least=3),
        judged("share of decode time spent waiting for the store, best configuration", waiting, most=0.15),
        judged(in_memory.format("batch 1"), rate_over_memory(small), least=1.5),
        judged(in_memory.format(f"batch {batches[1]}"), rate_over_memory(large), least=2.5),
    ]
    beside = {
        "step time over full reload, batch 1": step_over_reload(one, "off"),
        f"step time over full reload, batch {batches[0]}": step_over_reload(several, "off"),
        "hit rate, replay, batch 1": one["rows"][OWN]["hit_rate"],
        "grouping": grouping,
        "raw rates, bytes a second": {str(size): found for size, found in rates.items()},
        "cold": one["rows"][OWN]["cold"],
    }
    return {"must_reach": rows, "beside": beside, "runs": runs}
