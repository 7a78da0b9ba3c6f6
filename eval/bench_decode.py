"""Decoding over a long context: `DiskSwapCache`, the caches in memory and baselines, at equal memory.

Shapes: SmolLM2-135M and Llama-3.2-1B with random weights, and the replay of Llama-3.1-8B's cache layers (`replay`).
`--targets` runs what the project promises of speed. `bench_text` has the real model on real text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from .bench import machine
from .contenders import FULL, IN_MEMORY, METHODS, NO_REUSE, OWN, SINGLE
from .needles import parse_setting
from .profiles import PROFILES
from .replay import SHAPES, compare, setting_of
from .studies.common import Options, judged, one_run, say, summary_lines, write_json

_SHORT = 64
"""Tokens of hardly any history."""
OPTIONS: Options = {
    "shape": ("smollm2", "model shape", SHAPES),
    "batch": ([1], "rows"),
    "context": ([32768], "tokens of a sequence"),
    "methods": ([str], f"caches (default: {OWN}, {FULL}, {', '.join(IN_MEMORY)})", METHODS),
    "profile": (["own"], "devices", PROFILES),
    "memory": ("1/13", "memory budget, of the full KV"),
    "overlap": (["on", "off"], "overlap of reads and computing", ("on", "off")),
    "steps": (20, "steps of a repetition"),
    "beyond": (False, "also how long a step takes beyond the model's with hardly any history"),
    "targets": (False, "the project's speed targets instead"),
}


def targets(
    path: str | None, sizes: dict[str, Any], quick: bool, keep: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The speed targets as "must_reach", and their runs, which `keep` is given after each. Raises `ValueError` if one
    of ours cannot run; a figure without a run to compare with is None."""
    runs: dict[str, Any] = {}
    tokens, several, few = (8192, 2, 2) if quick else (32768, 8, 4)

    def run(
        name: str, shape: str, batch: int, methods: tuple[str, ...], overlaps: tuple[str, ...], profile: str = "own"
    ) -> dict[str, Any]:
        say(f"--- {name}: {shape}, batch {batch}, {profile}")
        setting = setting_of(shape, tokens, batch, path=path, profile=profile)
        runs[name] = compare(setting, methods, overlaps, say=say, **sizes)
        for one in set(methods) & set(runs[name]["left_out"]) - {FULL, *IN_MEMORY}:
            raise ValueError(f"{name}: {one} cannot run: {runs[name]['left_out'][one]}")
        keep(runs)
        return runs[name]

    def over_ours(result: dict[str, Any], others: tuple[str, ...], ours: str = OWN) -> float | None:
        """Seconds of the fastest of the others over ours: in the store, or of a step where reads overlap."""
        mode, field = ("off", "store_seconds") if others[0] not in IN_MEMORY else ("on", "median_seconds")
        rows = result["rows"]
        seconds = [rows[name][mode][field] for name in others if name in rows]
        return min(seconds) / rows[ours][mode][field] if seconds else None

    one = run("replay", "replay", 1, (OWN, NO_REUSE, SINGLE, FULL), ("off", "on"))
    large = run("replay, large batch", "replay", several, (OWN, FULL), ("off", "on"))
    emmc = run("replay, emmc", "replay", 1, (OWN, NO_REUSE), ("off",), "emmc")
    model = run("model", "smollm2", 1, (OWN, *IN_MEMORY), ("on",))
    batch = run("model, batch", "smollm2", few, (OWN, *IN_MEMORY), ("on",))
    reached = [
        judged("store time of a full reload over ours, batch 1", over_ours(one, (FULL,)), least=17),
        judged(f"the same, batch {several}", over_ours(large, (FULL,)), least=60),
        judged("store time of single tokens over groups", over_ours(one, (SINGLE,), NO_REUSE), least=1),
        judged("store time without the reuse buffer over with it", over_ours(one, (NO_REUSE,)), least=1.8),
        judged("the same, emulated eMMC", over_ours(emmc, (NO_REUSE,)), least=3),
        judged("tokens/s over the faster cache in memory, batch 1", over_ours(model, IN_MEMORY), least=1.5),
        judged(f"the same, batch {few}", over_ours(batch, IN_MEMORY), least=2.5),
    ]
    return {"must_reach": reached, "runs": runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Decoding steps over long contexts: methods in turns, at equal memory. --set FIELD=VALUE is of our caches."""
    given = one_run(main.__doc__, OPTIONS, argv, settings=True)
    sizes = {"steps": 3, "reload_steps": 1, "repetitions": 2} if given.quick else {"steps": given.steps}
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    whole: dict[str, Any] = {"machine": machine(given.path), "arguments": asked, "runs": []}

    def keep(runs: Any) -> None:
        if given.json:
            write_json(given.json, {**whole, "runs": runs})

    if given.targets:
        whole |= targets(given.path, sizes, given.quick, keep)
        for line in summary_lines({"must_reach": whole["must_reach"]}):
            print(line)
    else:
        fields = parse_setting(":" + ",".join(given.set))[1]
        same = {"memory": Fraction(given.memory), "path": given.path, "fields": fields}
        methods = given.methods or [OWN, FULL, *IN_MEMORY]
        for tokens, batch, profile in itertools.product(given.context, given.batch, given.profile):
            setting = setting_of(given.shape, 2048 if given.quick else tokens, batch, profile=profile, **same)
            say(f"--- batch {batch}, {setting.tokens:,} tokens, {profile}")
            found = compare(setting, methods, tuple(given.overlap), say=say, **sizes)
            whole["runs"].append(found)
            if given.beyond:
                short = compare(setting_of(given.shape, _SHORT, batch, **same), ("DynamicCache",), ("on",), **sizes)
                alone = short["rows"]["DynamicCache"]["on"]["median_seconds"]
                found["beyond_seconds"] = {
                    name: row["on"]["median_seconds"] - alone for name, row in found["rows"].items()
                }
                for name, seconds in found["beyond_seconds"].items():
                    print(f"{name}: {1e3 * seconds:.0f} ms beyond the model")
            for name, reason in found["left_out"].items():
                print(f"left out: {name}: {reason}")
    if given.json:
        write_json(given.json, whole)
    return int(any(row["met"] is False for row in whole.get("must_reach", ())) and not given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
