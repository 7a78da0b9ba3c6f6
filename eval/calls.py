"""How many Python functions a decoding step calls: what a step costs beside its tensors, whatever the machine.

`python -m eval.calls` counts with cProfile over steps of `DiskSwapCache` on a model of 30 layers.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hf_offload_cache
from hf_offload_cache import DiskSwapCache

from .studies.common import Options, one_run
from .synthetic import SMOLLM2, Inputs, Shape, build_model, decode_step, fill

LIKENESS = 0.9
"""Of successive inputs, about as text's: a step reads some groups and finds others in memory."""

PACKAGE = str(Path(hf_offload_cache.__file__).parent)


def count(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Function calls of one `step()` on this thread, the mean of `steps`: "all", "python" (the rest are built in) and
    "ours", which are the package's own."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    found: Counter[str] = Counter()
    for (file, _, _), (_, calls, *_) in pstats.Stats(profile).stats.items():
        found["all"] += calls
        found["python"] += calls if file != "~" else 0
        found["ours"] += calls if file.startswith(PACKAGE) else 0
    return {name: found[name] / steps for name in ("all", "python", "ours")}


def measure(shape: Shape, tokens: int, steps: int, warm: int = 4, **fields: Any) -> dict[str, float]:
    """Calls of a step that selects from `tokens` synthetic tokens. The first `warm` steps are not counted."""
    model = build_model(shape)
    inputs = Inputs(shape, LIKENESS)
    with DiskSwapCache(model, **fields) as cache:
        fill(cache, model, shape, tokens)
        for _ in range(warm):
            decode_step(model, cache, inputs.next())
        found = count(lambda: decode_step(model, cache, inputs.next()), steps)
        report = cache.report()
    if report.selected_fraction in (None, 1):
        raise RuntimeError(f"no step selected from {tokens} tokens: more are needed")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Function calls of a decoding step, counted by cProfile; worker threads are not."""
    options: Options = {"tokens": (8192, "tokens of history"), "steps": (20, "decoding steps")}
    given = one_run(main.__doc__, options, argv)
    # By itself a cache goes on with the faster one, once both were tried.
    ways = {"settled": False, "looking ahead": True}
    found = {way: measure(SMOLLM2.light(), given.tokens, given.steps, look_ahead=flag) for way, flag in ways.items()}
    head = f"calls a decoding step, {SMOLLM2.layers} layers, {given.tokens:,} tokens"
    print(f"{head:50}" + "".join(f"{way:>16}" for way in ways))
    for name in ("all", "python", "ours"):
        print(f"  {name:48}" + "".join(f"{found[way][name]:16,.0f}" for way in ways))


if __name__ == "__main__":
    main()
