"""Python functions that a decoding step calls, and the package's files that it enters: a step's cost besides its
tensors, on any machine.

`python -m eval.calls` counts steps of every cache on a model of 30 layers. All have one token less to select than by
default: a cache with fields of its own does not weigh whether selecting pays, so that every step counted selects.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hf_offload_cache
from hf_offload_cache.registry import CACHES, cache_class

from .studies.common import Options, one_run, write_json
from .synthetic import SMOLLM2, Inputs, Shape, build_model, decode_step, fill

LIKENESS = 0.9
"""Likeness of successive inputs, about as text's: a step reads some groups and finds others in memory."""

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


def measure(name: str, shape: Shape, tokens: int, steps: int, warm: int = 4, **fields: Any) -> dict[str, float]:
    """`count` of a step of the cache of that name that selects from `tokens` synthetic tokens, or of an exact one, and
    the "files" that one step enters, on any thread, without `__init__`. The first `warm` steps are not counted."""
    model, inputs, cls = build_model(shape), Inputs(shape, LIKENESS), cache_class(name)
    if not fields.get("exact"):
        fields = {"num_selected": cls.config_class().num_selected - 1, **fields}
    entered = set[str]()

    def note(frame: Any, event: str, argument: object) -> None:
        entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of the threads that the cache starts
    try:
        with cls(model, **fields) as cache:
            fill(cache, model, shape, tokens)
            for _ in range(warm):
                decode_step(model, cache, inputs.next())
            found = count(lambda: decode_step(model, cache, inputs.next()), steps)
            entered.clear()
            sys.setprofile(note)
            decode_step(model, cache, inputs.next())
            sys.setprofile(None)
            report = cache.report()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not fields.get("exact") and report.selected_fraction in (None, 1):
        raise RuntimeError(f"no step of {name} selected from {tokens} tokens: more are needed")
    ours = [file for file in entered if file.startswith(PACKAGE) and not file.endswith("__init__.py")]
    return {**found, "files": len(ours)}


OPTIONS: Options = {
    "tokens": (8192, "tokens of history"),
    "steps": (20, "decoding steps"),
    "layers": (SMOLLM2.layers, "layers of the model"),
    "caches": (list(CACHES), "caches", list(CACHES)),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Function calls of a decoding step, counted by cProfile on the model's thread, and files that it enters."""
    given = one_run(main.__doc__, OPTIONS, argv)
    shape = SMOLLM2.light(given.layers)
    ways: dict[str, tuple[str, dict[str, Any]]] = {"exact": ("disk-swap", {"exact": True})}
    for name in given.caches:
        ways |= {name: (name, {} if name == "spec" else {"look_ahead": False})}
        ways |= {} if name == "spec" else {f"{name}, looking ahead": (name, {"look_ahead": True})}
    print(f"a decoding step, {given.layers} layers, {given.tokens:,} tokens")
    found = {}
    for way, (name, fields) in ways.items():
        found[way] = row = measure(name, shape, given.tokens, given.steps, **fields)
        calls = ", ".join(f"{row[kind]:,.0f} {kind}" for kind in ("all", "python", "ours"))
        print(f"{way}: calls {calls}; {row['ours'] / given.layers:.0f} ours a layer; {row['files']} files", flush=True)
    if given.json:
        write_json(given.json, found)


if __name__ == "__main__":
    main()
