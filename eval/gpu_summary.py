"""What follows from the rows of `eval.bench_gpu`: figures of all layers, the largest batch, promises and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .bench import judged
from .studies.quality_needles_budget import lost

SCALED = "scaled"
"""Part of the rows that are computed from those of fewer layers."""
_DYNAMIC, _OFFLOADED = "DynamicCache", "DynamicCache(offloading=True)"
EXACT = "DiskSwapCache(exact=True)"
"""The contender that attends to all tokens, streamed from host memory, as `_OFFLOADED` does."""
_KEY = ("tokens", "batch", "name")

Rows = list[dict[str, Any]]


def scaled(rows: Rows, layers: int) -> Iterator[dict[str, Any]]:
    """Rows of `layers` layers from those of the fewest and the most layers that were measured: on the line through both
    medians and peaks. The spread is that of the row with the most."""
    for key in dict.fromkeys(tuple(row[name] for name in _KEY) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in _KEY) == key and "median_seconds" in row]
        own.sort(key=lambda row: row["layers"])
        if len(own) < 2:
            continue
        few, more = own[0], own[-1]

        def line(name: str, few: dict[str, Any] = few, more: dict[str, Any] = more) -> float:
            slope = (more[name] - few[name]) / (more["layers"] - few["layers"])
            return float(more[name] + slope * (layers - more["layers"]))

        median = line("median_seconds")
        if median <= 0:
            continue
        times = {name: median * more[name] / more["median_seconds"] for name in ("least_seconds", "most_seconds")}
        said = f"computed from {few['layers']} and {more['layers']} layers"
        yield {
            "part": SCALED, "layers": layers, **dict(zip(_KEY, key, strict=True)), "said": said,
            "median_seconds": median, **times, "tokens_per_second": more["batch"] / median,
            "peak_bytes": line("peak_bytes"), "repetitions": more["repetitions"],
        }  # fmt: skip


def next_batch(rows: Rows, limit: int) -> int | None:
    """The batch to try after these, of one contender, some of which failed; None: the largest is known to a sixteenth.
    Peaks of two batches say where memory of `limit` bytes ends."""
    peaks = {row["batch"]: max(row["peak_bytes"], row["filled_peak_bytes"]) for row in rows if "median_seconds" in row}
    low = max(peaks, default=0)
    high = min((row["batch"] for row in rows if "failed" in row and row["batch"] > low), default=None)
    if not peaks:
        return None if rows else 1
    if high is not None:
        return None if high - low <= max(1, low // 16) else (low + high) // 2
    if len(peaks) == 1:
        return 2 * low
    before, last = sorted(peaks)[-2:]
    slope = (peaks[last] - peaks[before]) / (last - before)
    more = int(0.95 * (limit - peaks[last]) / slope) if slope > 0 else low
    return low + min(3 * low, max(1, more))


def steps_of(rows: Rows, tokens: int, batch: int) -> dict[str, dict[str, Any]]:
    """Rows of all layers by name: complete ones, else computed ones."""
    found = {}
    for part in (SCALED, "complete"):
        for row in rows:
            if (row["part"], row.get("tokens"), row.get("batch")) == (part, tokens, batch) and "median_seconds" in row:
                found[row["name"]] = row
    return found


def largest(rows: Rows, gigabytes: int, tokens: int) -> dict[str, dict[str, Any]]:
    """The row of the largest batch by name."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if (row["part"], row.get("gigabytes"), row.get("tokens")) != ("capped", gigabytes, tokens):
            continue
        if "median_seconds" in row and row["batch"] > found.get(row["name"], {"batch": 0})["batch"]:
            found[row["name"]] = row
    return found


def _over(rows: dict[str, dict[str, Any]], one: str, other: str, field: str = "median_seconds") -> float | None:
    if one not in rows or other not in rows or field not in rows[one] or field not in rows[other]:
        return None
    return float(rows[one][field] / rows[other][field])


def promises(rows: Rows, ours: Iterable[str]) -> Rows:
    """The limits for a GPU, for each of our caches, and whether they are reached."""
    text = {row["name"]: row for row in rows if (row["part"], row.get("tokens")) == ("text", 32768)}
    many, long = steps_of(rows, 32768, 8), steps_of(rows, 131072, 1)
    cap = largest(rows, 24, 32768)
    kernels = [row for row in rows if row["part"] == "kernels"]
    found = []
    for name in ours:
        if name == EXACT:
            prefill = _over(text, name, _OFFLOADED, "prefill_median_seconds")
            found += [
                judged(f"prefill of 32K over offloading's, {name}", prefill, most=1),
                judged(f"a step of 8 x 32K, offloading's over {name}'s", _over(many, _OFFLOADED, name), least=1),
                judged(f"a step of 128K, offloading's over {name}'s", _over(long, _OFFLOADED, name), least=1),
            ]
            continue
        graphed = name.endswith(", graphed")  # whose prefill is not another
        dense, offloaded = (3.0, 20.0) if graphed else (1.5, 10.0)
        found += [
            judged(f"a step of 8 x 32K, DynamicCache's over {name}'s", _over(many, _DYNAMIC, name), least=dense),
            judged(f"the same of offloading, {name}", _over(many, _OFFLOADED, name), least=offloaded),
            judged(f"rows in 24 GiB over DynamicCache's, {name}", _over(cap, name, _DYNAMIC, "batch"), least=8),
            judged(f"their tokens/s, {name}", _over(cap, name, _DYNAMIC, "tokens_per_second"), least=4),
        ]
        if graphed:
            over = _over(long, _DYNAMIC, name)
            found.append(judged(f"a step of 128K, DynamicCache's over {name}'s", over, least=1.5))
        else:
            prefill = _over(text, name, _DYNAMIC, "prefill_median_seconds")
            found.append(judged(f"prefill of 32K over DynamicCache's, {name}", prefill, most=1.3))
    for tokens, least in ((2048, 2.0), (8192, 2.8), (32768, 3.4)):
        within = _over(largest(rows, 48, tokens), "SpecCache", _DYNAMIC, "tokens_per_second")
        found.append(judged(f"tokens/s in 48 GiB over DynamicCache's, SpecCache, {tokens:,}", within, least=least))
    for row in kernels:
        if row.get("least_share") is not None:
            found.append(judged(f"share of the floor, {row['name']}", row.get("share"), least=row["least_share"]))
        if row.get("most_over") is not None:
            what = f"{row['name']} over {row.get('compared_with')}"
            found.append(judged(what, row.get("over"), most=row["most_over"]))
    return found


def summary(rows: Rows, ours: list[str]) -> dict[str, Any]:
    """Tables for a terminal, means of the fidelity, and "must_reach"."""
    steps = {}
    for row in rows:
        if row["part"] in ("text", SCALED, "complete") and "median_seconds" in row:
            at = f"{row['part']}, {row['batch']} x {row['tokens']:,}, {row['name']}"
            steps[at] = {"ms": 1e3 * row["median_seconds"], "least": 1e3 * row["least_seconds"],
                         "most": 1e3 * row["most_seconds"], "GB": row["peak_bytes"] / 1e9}  # fmt: skip
    batches = {}
    tried = (row for row in rows if row["part"] == "capped")
    for gigabytes, tokens in dict.fromkeys((row["gigabytes"], row["tokens"]) for row in tried):
        for name, row in largest(rows, gigabytes, tokens).items():
            at = f"{gigabytes} GiB, {tokens:,} tokens, {name}"
            batches[at] = {"batch": row["batch"], "tokens_per_second": row["tokens_per_second"]}
    quality: dict[str, dict[str, float]] = {}
    read = [row for row in rows if row["part"] == "quality" and "kl" in row]
    for name in dict.fromkeys(row["name"] for row in read):
        own = [row for row in read if row["name"] == name]
        means = {key: [row[key] for row in own if row[key] is not None] for key in ("kl", "top1", "perplexity")}
        quality[name] = {key: sum(values) / len(values) for key, values in means.items() if values}
    for name, found in lost([row for row in rows if row["part"] == "needles" and "answered" in row]).items():
        quality.setdefault(name, {}).update(needles=found["answered"], asked=found["asked"])
    shares = {row["name"]: row["share"] for row in rows if row["part"] == "kernels" and "share" in row}
    failed = {
        ", ".join(f"{key} {row[key]}" for key in ("part", "gigabytes", "layers", *_KEY) if key in row): row["failed"]
        for row in rows
        if "failed" in row
    }
    return {"steps": steps, "largest batches": batches, "quality": quality, "share of the floor": shares,
            "failed": failed, "must_reach": promises(rows, ours)}  # fmt: skip


# --- plots -----------------------------------------------------------------------------------------------------------


def _bars(axes: Any, values: dict[str, float], what: str, title: str) -> None:
    names = list(values)[::-1]
    axes.barh(range(len(names)), [values[name] for name in names])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=what, title=title)
    axes.spines[["top", "right"]].set_visible(False)


def draw_steps(found: dict[str, Any], rows: Rows, figure: Any) -> None:
    """Tokens a second of all layers by contender, a picture for each length and batch, and of the largest batches."""
    panels: list[tuple[str, dict[str, dict[str, Any]]]] = []
    steps = [row for row in rows if row["part"] in (SCALED, "complete")]
    for tokens, batch in dict.fromkeys((row["tokens"], row["batch"]) for row in steps):
        panels.append((f"{batch} x {tokens:,} tokens", steps_of(rows, tokens, batch)))
    tried = [row for row in rows if row["part"] == "capped"]
    for gigabytes, tokens in dict.fromkeys((row["gigabytes"], row["tokens"]) for row in tried):
        panels.append((f"{tokens:,} tokens in {gigabytes} GiB", largest(rows, gigabytes, tokens)))
    read = {row["name"]: row for row in rows if row["part"] == "text" and "median_seconds" in row}
    panels += [("text", read)] if read else []
    _panels(figure, panels, lambda row: row["tokens_per_second"], "tokens a second")


def _panels(figure: Any, panels: Any, value: Callable[[dict[str, Any]], float], what: str) -> None:
    if panels:
        grid = list(figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat)
        for axes, (title, by_name) in zip(grid, panels, strict=False):
            _bars(axes, {name: value(row) for name, row in by_name.items()}, what, title)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()


def draw_kernels(found: dict[str, Any], rows: Rows, figure: Any) -> None:
    """Share of the floor that each kernel reaches."""
    axes = figure.subplots()
    _bars(axes, found["share of the floor"], "share of the floor", "bytes over the bandwidth of a copy")
    axes.axvline(1, color="black", linewidth=0.8)
