"""What one layer's time in a decoding step is made of (KVSwap, section 6 and figure 13a)."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hf_offload_cache.core import SelectiveLayer

from ..compare import setting_of
from ..contenders import FULL, METHODS, NO_REUSE, OWN, RELOADS, models
from ..replay import Replay
from .common import Rows, Study, main
from .speed_throughput import QUICK, common_arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("compute", "predict", "gather", "wait")


@contextlib.contextmanager
def timed(replay: Replay) -> Iterator[dict[str, float]]:
    """Seconds so far of choosing ("predict": scores, of guesses too) and of bringing together ("gather": slots and
    copies, waits included) in all layers of a cache of this library."""
    spent = {"predict": 0.0, "gather": 0.0}
    cache = replay.own
    patched: list[tuple[Any, str]] = []

    def watch(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, _counted(original, spent, part))
            patched.append((owner, name))

    for layer in cache.offloaded if cache is not None else ():
        if isinstance(layer, SelectiveLayer) and layer.selecting is not None:
            watch(layer, "choose", "predict")
            watch(layer.fetcher, "gather", "gather")
    try:
        yield spent
    finally:
        for owner, name in patched:
            delattr(owner, name)


def _counted(original: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return call


def breakdown(replay: Replay, steps: int) -> dict[str, float]:
    """Seconds a layer and step of each of `PARTS`, which add up to the whole; "compute" is what is left."""
    cache = replay.own
    counters = None if cache is None else cache.storage.counters
    waited = 0.0 if counters is None else counters.stall_seconds
    start = time.perf_counter()
    with timed(replay) as spent:
        replay.steps(steps, "on", keep=False)
    whole = time.perf_counter() - start
    wait = 0.0 if counters is None else counters.stall_seconds - waited
    gather = max(0.0, spent["gather"] - wait)
    parts = {"predict": spent["predict"], "gather": gather, "wait": wait}
    parts["compute"] = whole - sum(parts.values())
    return {name: parts[name] / steps / replay.setting.shape.layers for name in PARTS}


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """A row for each method: medians over repetitions, seconds a layer and step."""
    setting = setting_of(
        arguments.shape, arguments.tokens, arguments.batch, memory=Fraction(1, 13), path=arguments.path,
        profile=arguments.profile, device=arguments.device,
    )  # fmt: skip
    plain, attached = models(setting)
    for name in arguments.methods:
        if rows.has(method=name):
            continue
        room = 64 + arguments.steps * arguments.repetitions
        with contextlib.closing(Replay(name, setting, plain, attached, room=room)) as replay:
            replay.settle()
            steps = arguments.reload_steps if name in RELOADS else arguments.steps
            found = [breakdown(replay, steps) for _ in range(arguments.repetitions)]
        rows.add(method=name, **{part: statistics.median(one[part] for one in found) for part in PARTS})
    return {row["method"]: {part: row[part] for part in PARTS} for row in rows.rows}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    """Stacked milliseconds a layer, a bar a method."""
    axes = figure.subplots()
    names = [row["method"] for row in rows]
    below = [0.0] * len(rows)
    for part in PARTS:
        heights = [1e3 * row[part] for row in rows]
        axes.bar(names, heights, bottom=below, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("ms a layer and step")
    axes.legend()


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[FULL, "InfiniGen*", "InfiniGen*+ru", NO_REUSE, OWN]
    )


STUDY = Study(
    "speed_latency",
    "What is a layer's time in a decoding step made of: computing, predicting, bringing together, waiting?",
    run,
    plot,
    arguments,
    {**QUICK, "tokens": 4096, "batch": 1},
)

if __name__ == "__main__":
    main(STUDY)
