"""Decoding over a long context: `DiskSwapCache` beside the caches in memory and its baselines, at equal memory.

Shapes: SmolLM2-135M and Llama-3.2-1B with random weights, and the replay of Llama-3.1-8B's cache layers (`replay`).
`--targets` runs what the project promises of speed, `--text` the real model on real text.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from hf_offload_cache.config import parse_size
from hf_offload_cache.registry import CACHES, cache_class

from . import bench_text
from .bench import machine
from .compare import SHAPES, compare, setting_of
from .contenders import FULL, IN_MEMORY, METHODS, OWN
from .needles import parse_setting
from .profiles import PROFILES
from .speed_targets import targets
from .studies.common import summary_lines, write_json


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Tokens/s of every method in every run as bars, at `target`. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for result in results for name in result["rows"]))
    figure = Figure(figsize=(1.5 + 1.2 * len(names), 1 + 2.2 * len(results)), layout="constrained")
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        modes = list(next(iter(result["rows"].values()), {}))
        modes = [mode for mode in ("on", "off") if mode in modes]
        for position, mode in enumerate(modes):
            found = [result["rows"].get(name, {}).get(mode, {}).get("tokens_per_second", 0.0) for name in names]
            places = [place + (position - 0.5 * (len(modes) - 1)) * 0.4 for place in range(len(names))]
            axes.bar(places, found, 0.38, label=f"overlap {mode}")
        axes.set_xticks(range(len(names)), names, rotation=20)
        axes.set_ylabel("tokens/s")
        axes.set_title(f"batch {result['batch']}, {result['tokens']:,} tokens, {result['profile']}")
        axes.legend()
    figure.savefig(target, dpi=120)


def _fraction(text: str) -> Fraction | None:
    return None if text == "default" else Fraction(text)


def main() -> int:
    """Decoding steps over long contexts: methods in turns, at equal memory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--layers", type=int, help="of the shape, instead of its own")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[32768], help="tokens a sequence")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help=f"default: {OWN}, {FULL}, {', '.join(IN_MEMORY)}")
    parser.add_argument("--profile", nargs="+", choices=PROFILES, default=["own"], help="devices to stand in for")
    parser.add_argument("--memory", type=_fraction, default=Fraction(1, 13), help='of the full KV, or "default"')
    parser.add_argument("--overlap", nargs="+", choices=("on", "off"), default=["on", "off"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help=f"of {OWN} and its variants; --text: of all"
    )
    parser.add_argument("--likeness", type=float, help="of successive inputs, 0 to 1")
    parser.add_argument("--steps", type=int, default=20, help="a repetition; 200 and 5 repetitions are 1,000 tokens")
    parser.add_argument("--reload-steps", type=int, default=3, help="the same of methods that move everything")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--disk-limit", type=parse_size, default=20 << 30)
    parser.add_argument("--memory-limit", type=parse_size, default=8 << 30)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument(
        "--text", action="store_true",
        help="the real model on real text, prefilled once for all, in the place of a shape (see eval.bench_text)",
    )  # fmt: skip
    parser.add_argument("--targets", action="store_true", help="what is promised of speed, instead")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, no more")
    parser.add_argument("--path", help="folder on the disk to use")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave it out")
    if given.plot and given.text:
        parser.error("--plot draws shapes, not --text: leave one of them out")
    registered = {cache_class(name).__name__: name for name in CACHES}
    methods = given.methods or ([OWN, *IN_MEMORY] if given.text else [OWN, FULL, *IN_MEMORY])
    if given.text and (others := set(methods) - {*registered, *IN_MEMORY}):
        parser.error(f"--text runs {', '.join((*registered, *IN_MEMORY))}, not {', '.join(sorted(others))}")
    torch.set_num_threads(given.threads)
    sizes: dict[str, Any] = {
        "steps": 3 if given.quick else given.steps,
        "reload_steps": 1 if given.quick else given.reload_steps,
        "repetitions": 2 if given.quick else given.repetitions,
        "disk_limit": given.disk_limit,
        "memory_limit": given.memory_limit,
        "likeness": given.likeness,
    }

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    whole: dict[str, Any] = {"machine": machine(given.path), "arguments": _plain(vars(given))}
    if given.text:
        fields = parse_setting(":" + ",".join(given.set))[1]
        planned = {} if given.memory is None else {"memory": str(given.memory)}
        ours = {name: {"cache": registered[name], **planned, **fields} for name in methods if name in registered}
        steps = bench_text.FIRST + (8 if given.quick else given.steps * given.repetitions)
        in_memory = [name for name in methods if name in IN_MEMORY]
        lengths = [1024] if given.quick else given.context
        whole["runs"] = [
            bench_text.measure(tokens, batch, steps, ours, in_memory=in_memory, shared_prefill=True, path=given.path)
            for tokens, batch in itertools.product(lengths, given.batch)
        ]
        results = []
    elif given.targets:
        length = {"tokens": 8192, "batches": (2, 2)} if given.quick else {}

        def keep(runs: dict[str, Any]) -> None:
            if given.json:
                write_json(given.json, {**whole, "runs": runs})

        whole |= targets(keep=keep, path=given.path, device=given.device, say=say, **length, **sizes)
        results = list(whole["runs"].values())
        for line in summary_lines({key: whole[key] for key in ("beside", "must_reach")}):
            print(line)
    else:
        results = []
        for tokens, batch, profile in itertools.product(given.context, given.batch, given.profile):
            setting = setting_of(
                given.shape, 2048 if given.quick else tokens, batch, memory=given.memory, path=given.path,
                profile=profile, device=given.device, fields=parse_setting(":" + ",".join(given.set))[1],
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
    if given.plot:
        draw(results, given.plot)
    return int(any(row["met"] is False for row in whole.get("must_reach", ())) and not given.quick)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON has them."""
    plain = (int, float, list, type(None))
    return {key: value if isinstance(value, plain) else str(value) for key, value in arguments.items()}


if __name__ == "__main__":
    raise SystemExit(main())
