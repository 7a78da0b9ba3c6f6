"""Decoding over a long context: `DiskSwapCache`, the caches in memory and baselines, at equal memory.

Shapes: SmolLM2-135M and Llama-3.2-1B with random weights, and the replay of Llama-3.1-8B's cache layers (`replay`).
`--targets` runs what the project promises of speed, `--text` the real model on real text.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hf_offload_cache.config import parse_size
from hf_offload_cache.registry import CACHES, cache_class

from . import bench_text
from .bench import machine
from .compare import SHAPES, compare, setting_of
from .contenders import FULL, IN_MEMORY, METHODS, OWN
from .needles import parse_setting
from .profiles import PROFILES
from .speed_targets import targets
from .studies.common import Options, one_run, summary_lines, write_json

OPTIONS: Options = {
    "shape": ("smollm2", "model shape", SHAPES),
    "layers": (int, "layers instead of the shape's own"),
    "batch": ([1], "rows"),
    "context": ([32768], "tokens of a sequence"),
    "methods": ([str], f"caches (default: {OWN}, {FULL}, {', '.join(IN_MEMORY)})", METHODS),
    "profile": (["own"], "devices", PROFILES),
    "memory": ("1/13", 'memory budget, of the full KV, or "default"'),
    "overlap": (["on", "off"], "overlap of reads and computing", ("on", "off")),
    "device": ("cpu", "torch device"),
    "likeness": (float, "similarity of successive inputs, 0 to 1"),
    "steps": (20, "steps of a repetition"),
    "reload_steps": (3, "steps of a repetition, for methods that move everything"),
    "repetitions": (5, "repetitions"),
    "disk_limit": ("20GiB", "disk of all caches together"),
    "memory_limit": ("8GiB", "memory of all caches together"),
    "text": (False, "the default model on real text, prefilled once for all, instead of a shape"),
    "targets": (False, "the project's speed targets instead"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Decoding steps over long contexts: methods in turns, at equal memory. --set FIELD=VALUE is of our caches."""
    given = one_run(main.__doc__, OPTIONS, argv, settings=True)
    memory = None if given.memory == "default" else Fraction(given.memory)
    registered = {cache_class(name).__name__: name for name in CACHES}
    methods = given.methods or ([OWN, *IN_MEMORY] if given.text else [OWN, FULL, *IN_MEMORY])
    if given.text and (others := set(methods) - {*registered, *IN_MEMORY}):
        raise SystemExit(f"--text runs {', '.join((*registered, *IN_MEMORY))}, not {', '.join(sorted(others))}")
    fields = parse_setting(":" + ",".join(given.set))[1]
    sizes: dict[str, Any] = {
        "steps": 3 if given.quick else given.steps, "reload_steps": 1 if given.quick else given.reload_steps,
        "repetitions": 2 if given.quick else given.repetitions, "disk_limit": parse_size(given.disk_limit),
        "memory_limit": parse_size(given.memory_limit), "likeness": given.likeness,
    }  # fmt: skip

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    whole: dict[str, Any] = {"machine": machine(given.path), "arguments": asked}
    if given.text:
        planned = {} if memory is None else {"memory": given.memory}
        ours = {name: {"cache": registered[name], **planned, **fields} for name in methods if name in registered}
        steps = bench_text.FIRST + (8 if given.quick else given.steps * given.repetitions)
        in_memory = [name for name in methods if name in IN_MEMORY]
        lengths = [1024] if given.quick else given.context
        whole["runs"] = [
            bench_text.measure(tokens, batch, steps, ours, in_memory=in_memory, shared_prefill=True, path=given.path)
            for tokens, batch in itertools.product(lengths, given.batch)
        ]
    elif given.targets:
        length = {"tokens": 8192, "batches": (2, 2)} if given.quick else {}

        def keep(runs: dict[str, Any]) -> None:
            if given.json:
                write_json(given.json, {**whole, "runs": runs})

        whole |= targets(keep=keep, path=given.path, device=given.device, say=say, **length, **sizes)
        for line in summary_lines({"must_reach": whole["must_reach"]}):
            print(line)
    else:
        results = []
        for tokens, batch, profile in itertools.product(given.context, given.batch, given.profile):
            setting = setting_of(
                given.shape, 2048 if given.quick else tokens, batch, memory=memory, path=given.path, profile=profile,
                device=given.device, fields=fields,
            )  # fmt: skip
            if given.layers:
                setting = replace(setting, shape=replace(setting.shape, layers=given.layers))
            say(f"--- batch {batch}, {setting.tokens:,} tokens, {profile}")
            results.append(compare(setting, methods, tuple(given.overlap), say=say, **sizes))
        whole["runs"] = results
        for result in results:
            for name, reason in result["left_out"].items():
                print(f"left out: {name}: {reason}")
    if given.json:
        write_json(given.json, whole)
    return int(any(row["met"] is False for row in whole.get("must_reach", ())) and not given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
