"""Pictures of what `eval.fidelity` has measured. The command draws the README's, from the figures that the package
ships: `python -m eval.fidelity_pictures docs/pictures/pareto.png docs/pictures/pareto.svg`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from hf_offload_cache.registry import cache_class
from hf_offload_cache.tuning import measured_caches

from .fidelity_tables import shipped
from .studies.common import Study, draw
from .studies.contexts import share

_LINES = ("disk-swap", "abstract-tree", "cluster", "spec")


def draw_front(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """KL over memory, of the longest context that has it: a line a cache. Without rows, of cells that are shipped."""
    axes, cells = figure.subplots(), shipped(summary)["cells"] if rows else summary["cells"]
    measured = [cell for cell in cells if cell.get("kl")]
    longest = max((cell["tokens"] for cell in measured), default=0)
    for number, cache in enumerate(_LINES):
        own = [one for one in measured if one["cache"] == cache]
        places = sorted((float(Fraction(share(one["memory"]))), one["kl"]) for one in own if one["tokens"] == longest)
        if places:
            axes.plot(*zip(*places, strict=True), marker="o", color=f"C{number}", label=cache_class(cache).__name__)
    ticks = ["1/34", "1/20", "1/13", "1/6.5", "1/4"]
    axes.set(xscale="log", yscale="log", xlabel="memory, of the full KV cache")
    axes.set(ylabel="KL from DynamicCache, nats", title=f"{longest:,} tokens of context: lower is closer")
    axes.set_xticks([float(Fraction(share(tick))) for tick in ticks], ticks, minor=False)
    axes.set_yticks([0.003, 0.01, 0.03, 0.1], ["0.003", "0.01", "0.03", "0.1"], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw_layers(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Draw each layer's attention mass, at the longest context and the memory in which most were measured (of several
    the first)."""
    cells = [cell for cell in summary["cells"] if "layer_mass" in cell]
    axes = figure.subplots()
    if not cells:
        return
    longest = max(cell["tokens"] for cell in cells)
    there = [cell for cell in cells if cell["tokens"] == longest]
    memories = [cell["memory"] for cell in there]
    memory = max(dict.fromkeys(memories), key=memories.count)
    for cell in there:
        if cell["memory"] == memory:
            mass = cell["layer_mass"]
            axes.plot(range(len(mass)), mass, marker="o", label=cell["cache"], linewidth=1, alpha=0.8)
    title = f"{longest:,} tokens, {memory} of the full KV"
    axes.set(xlabel="layer", ylabel="attention mass that is attended to", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")


def main(targets: Sequence[str]) -> None:
    """Draw what is shipped to files."""
    study = Study("fidelity", "", lambda *_: {}, {}, size=(7.5, 4.2))
    for target in targets:
        draw(study, draw_front, {"cells": measured_caches()}, [], Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])
