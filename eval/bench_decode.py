"""Decoding over a long context: `DiskSwapCache`, the caches in memory and baselines, at equal memory.

Shapes: SmolLM2-135M and Llama-3.2-1B with random weights, and the replay of Llama-3.1-8B's cache layers (`replay`).
`--targets` runs what the project promises of speed. `bench_text` has the real model on real text.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from .bench import machine
from .contenders import FULL, IN_MEMORY, METHODS, NO_REUSE, OWN, SINGLE
from .needles import parse_setting
from .profiles import PROFILES
from .replay import SHAPES, compare, setting_of
from .studies.common import Options, judged, one_run, summary_lines, write_json

_SHORT = 64
"""Tokens of hardly any history."""
OPTIONS: Options = {
    "shape": ("smollm2", "model shape", SHAPES),
    "batch": ([1], "rows"),
    "context": ([32768], "tokens of a sequence"),
    "methods": ([str], f"caches (default: {OWN}, {FULL}, {', '.join(IN_MEMORY)})", METHODS),
    "profile": (["own"], "devices", PROFILES),
    "memory": ("1/13", 'memory budget, of the full KV, or "default"'),
    "overlap": (["on", "off"], "overlap of reads and computing", ("on", "off")),
    "device": ("cpu", "torch device"),
    "steps": (20, "steps of a repetition"),
    "reload_steps": (3, "steps of a repetition, for methods that move everything"),
    "repetitions": (5, "repetitions"),
    "beyond": (False, "also how long a step takes beyond the model's with hardly any history"),
    "targets": (False, "the project's speed targets instead"),
}


def over_ours(
    result: dict[str, Any], others: tuple[str, ...], overlap: str, field: str, ours: str = OWN
) -> float | None:
    """Seconds of the fastest of the others over ours, "store_seconds" or "median_seconds" of a step."""
    rows = result["rows"]
    seconds = [rows[name][overlap][field] for name in others if name in rows]
    return min(seconds) / rows[ours][overlap][field] if seconds else None


def targets(
    tokens: int = 32768, batches: tuple[int, int] = (8, 4), path: str | None = None, device: str = "cpu",
    say: Callable[[str], Any] = print, shapes: tuple[str, str] = ("replay", "smollm2"),
    keep: Callable[[dict[str, Any]], Any] = lambda runs: None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """The speed targets as "must_reach", and their runs. `batches`: of the replay and of the model, besides 1. `keep`
    is given the runs so far after each. Other arguments are `compare`'s. Raises `ValueError` if one of ours cannot run;
    a figure without a run to compare with is None."""
    replay, model = shapes
    runs: dict[str, Any] = {}

    def run(
        name: str, shape: str, batch: int, methods: tuple[str, ...], overlaps: tuple[str, ...], profile: str = "own"
    ) -> dict[str, Any]:
        say(f"--- {name}: {shape}, batch {batch}, {profile}")
        setting = setting_of(shape, tokens, batch, path=path, device=device, profile=profile)
        runs[name] = compare(setting, methods, overlaps, say=say, **arguments)
        for one in set(methods) & set(runs[name]["left_out"]) - {FULL, *IN_MEMORY}:
            raise ValueError(f"{name}: {one} cannot run: {runs[name]['left_out'][one]}")
        keep(runs)
        return runs[name]

    one = run("replay", replay, 1, (OWN, NO_REUSE, SINGLE, FULL), ("off", "on"))
    several = run("replay, large batch", replay, batches[0], (OWN, FULL), ("off", "on"))
    emmc = run("replay, emmc", replay, 1, (OWN, NO_REUSE), ("off",), "emmc")
    small = run("model", model, 1, (OWN, *IN_MEMORY), ("on",))
    large = run("model, batch", model, batches[1], (OWN, *IN_MEMORY), ("on",))
    store, step = ("off", "store_seconds"), ("on", "median_seconds")
    reached = [
        judged("store time of a full reload over ours, batch 1", over_ours(one, (FULL,), *store), least=17),
        judged(f"the same, batch {batches[0]}", over_ours(several, (FULL,), *store), least=60),
        judged("store time of single tokens over groups", over_ours(one, (SINGLE,), *store, NO_REUSE), least=1),
        judged("store time without the reuse buffer over with it", over_ours(one, (NO_REUSE,), *store), least=1.8),
        judged("the same, emulated eMMC", over_ours(emmc, (NO_REUSE,), *store), least=3),
        judged("tokens/s over the faster cache in memory, batch 1", over_ours(small, IN_MEMORY, *step), least=1.5),
        judged(f"the same, batch {batches[1]}", over_ours(large, IN_MEMORY, *step), least=2.5),
    ]
    return {"must_reach": reached, "runs": runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Decoding steps over long contexts: methods in turns, at equal memory. --set FIELD=VALUE is of our caches."""
    given = one_run(main.__doc__, OPTIONS, argv, settings=True)
    memory = None if given.memory == "default" else Fraction(given.memory)
    methods = given.methods or [OWN, FULL, *IN_MEMORY]
    fields = parse_setting(":" + ",".join(given.set))[1]
    sizes: dict[str, Any] = {
        "steps": 3 if given.quick else given.steps, "reload_steps": 1 if given.quick else given.reload_steps,
        "repetitions": 2 if given.quick else given.repetitions,
    }  # fmt: skip

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    whole: dict[str, Any] = {"machine": machine(given.path), "arguments": asked}
    if given.targets:
        length = {"tokens": 8192, "batches": (2, 2)} if given.quick else {}

        def keep(runs: dict[str, Any]) -> None:
            if given.json:
                write_json(given.json, {**whole, "runs": runs})

        whole |= targets(keep=keep, path=given.path, device=given.device, say=say, **length, **sizes)
        for line in summary_lines({"must_reach": whole["must_reach"]}):
            print(line)
    else:
        results = []
        same = {"memory": memory, "path": given.path, "device": given.device, "fields": fields}
        for tokens, batch, profile in itertools.product(given.context, given.batch, given.profile):
            setting = setting_of(given.shape, 2048 if given.quick else tokens, batch, profile=profile, **same)
            say(f"--- batch {batch}, {setting.tokens:,} tokens, {profile}")
            results.append(compare(setting, methods, tuple(given.overlap), say=say, **sizes))
            if given.beyond:
                short = compare(setting_of(given.shape, _SHORT, batch, **same), ("DynamicCache",), ("on",), **sizes)
                alone = short["rows"]["DynamicCache"]["on"]["median_seconds"]
                beyond = {name: row["on"]["median_seconds"] - alone for name, row in results[-1]["rows"].items()}
                results[-1]["beyond_seconds"] = beyond
                for name, seconds in beyond.items():
                    print(f"{name}: {1e3 * seconds:.0f} ms beyond the model")
        whole["runs"] = results
        for result in results:
            for name, reason in result["left_out"].items():
                print(f"left out: {name}: {reason}")
    if given.json:
        write_json(given.json, whole)
    return int(any(row["met"] is False for row in whole.get("must_reach", ())) and not given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
