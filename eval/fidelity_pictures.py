"""What `eval.fidelity` has measured, as pictures."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from hf_offload_cache.registry import CACHES
from hf_offload_cache.tuning import which_cache as compare_plans

from .fidelity_contenders import WIDER
from .fidelity_tables import Cell
from .studies.contexts import share
from .studies.found_facts import REFERENCE

_LOOKS = {
    "random": ("0.6", "x"), "window": ("0.6", "v"), "4-bit": ("black", "P"), "2-bit": ("black", "X"),
    "DynamicCache": ("black", "*"), "StaticCache": ("black", "D"),
}  # fmt: skip


def draw_front(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """KL, facts and tokens a second over memory, of the longest context that has them; what nothing beats is joined."""
    left, middle, right = figure.subplots(1, 3)
    cells = summary["cells"]
    looks = _looks(dict.fromkeys(cell["cache"] for cell in cells))
    _panel(left, looks, cells, lambda cell: max(cell["kl"], 1e-4) if "kl" in cell else None, least=True)
    left.set(ylabel="KL from DynamicCache, nats (text)", yscale="log")
    _panel(middle, looks, cells, lambda cell: 100 * cell["found"] / cell["known"] if "found" in cell else None)
    middle.set(ylabel="facts found, % of DynamicCache's", ylim=(-4, 104))
    _panel(right, looks, cells, lambda cell: 1 / cell["seconds"] if "seconds" in cell else None)
    right.set(ylabel="tokens a second")
    shown = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in (left, middle, right)]
    labels = {label: line for pairs in shown for line, label in pairs}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=7, fontsize="small")


def _looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name -> colour and marker, in every panel; a wider step has the colour of its cache."""
    found = dict(_LOOKS)
    for name in names:
        if name not in found and name not in WIDER:
            found[name] = f"C{len(found) - len(_LOOKS)}", "o" if name in CACHES else "s"
    for name, fields in WIDER.items():
        place = compare_plans.WIDER[fields["cache"]].index(fields["num_selected"])
        found[name] = found.get(fields["cache"], ("black", ""))[0], "^dph"[place]
    return found


def _panel(axes: Any, looks: dict[str, tuple[str, str]], cells: list[Cell], value: Any, least: bool = False) -> None:
    others = (cell for cell in cells if cell["name"] != REFERENCE)
    longest = max((cell["tokens"] for cell in others if value(cell) is not None), default=None)
    if longest is None:
        return
    there = [cell for cell in cells if cell["tokens"] == longest and value(cell) is not None and _placed(cell)]
    places = [(_held(cell), value(cell), cell) for cell in there]
    for cache in dict.fromkeys(cell["cache"] for cell in there):
        own = sorted((held, found) for held, found, cell in places if cell["cache"] == cache)
        colour, marker = looks[cache]
        axes.plot(*zip(*own, strict=True), marker=marker, color=colour, label=cache, linewidth=1, alpha=0.8)
    front: list[tuple[float, float]] = []
    for held, found, _ in sorted(places, key=lambda place: (place[0], place[1] if least else -place[1])):
        if not front or (found < front[-1][1] if least else found > front[-1][1]):
            front.append((held, found))
    axes.step(*zip(*front, strict=True), where="post", color="gold", linewidth=6, alpha=0.4, zorder=0, label="best")
    axes.set(xscale="log", xlabel="memory, of the full KV", title=f"{longest:,} tokens")
    ticks = ["1/34", "1/20", "1/13", "1/6.5", "1/4", "1"]
    axes.set_xticks([float(Fraction(share(tick))) for tick in ticks], ticks, minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _placed(cell: Cell) -> bool:
    """Whether its memory is known: that of a quantized cache is measured with texts."""
    return "peak_share" in cell or cell["memory"] != "itself"


def _held(cell: Cell) -> float:
    """What it holds, where that was measured, else what it may."""
    return float(cell["peak_share"] if "peak_share" in cell else Fraction(share(cell["memory"])))


def draw_layers(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Of the longest context, and the memory in which most were measured (of several the first), the attention mass of
    each layer."""
    cells = [cell for cell in summary["cells"] if "layer_mass" in cell]
    axes = figure.subplots()
    if not cells:
        return
    longest = max(cell["tokens"] for cell in cells)
    there = [cell for cell in cells if cell["tokens"] == longest]
    memories = [cell["memory"] for cell in there]
    memory = max(dict.fromkeys(memories), key=memories.count)
    looks = _looks(dict.fromkeys(cell["cache"] for cell in summary["cells"]))
    for cell in there:
        if cell["memory"] == memory:
            colour, marker = looks[cell["cache"]]
            mass = cell["layer_mass"]
            axes.plot(range(len(mass)), mass, marker=marker, color=colour, label=cell["cache"], linewidth=1, alpha=0.8)
    title = f"{longest:,} tokens, {memory} of the full KV"
    axes.set(xlabel="layer", ylabel="attention mass that is attended to", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
