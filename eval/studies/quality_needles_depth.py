"""Where in a document are planted facts lost? Needles over depth and length: a heat map beside DynamicCache's."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model

from ..needles import make_needles
from .common import Rows, Study, main
from .found_facts import ask, lost
from .teacher_forced import contenders_of, setting_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 3072, 4096, 7168], metavar="TOKENS")
    parser.add_argument("--depths", type=int, default=5, help="bands of depth")
    parser.add_argument("--samples", type=int, default=2, help="documents a length and depth")
    parser.add_argument("--memory", default="1/13", help="budget: a share of the full KV, a size, or none")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    contenders = contenders_of(arguments, {arguments.memory: {}}, memory=arguments.memory)
    for length in arguments.lengths:
        needles = make_needles(tokenizer, arguments.depths * arguments.samples, length)
        ask(arguments, rows, contenders, needles, model, tokenizer, length=length)
    maps = {}
    for name in dict.fromkeys(row["name"] for row in rows.rows):
        maps[name] = [band_shares(rows.where(name=name, length=n), arguments.depths) for n in arguments.lengths]
    return {"contenders": lost(rows.rows), "lengths": arguments.lengths, "answered": maps}


def band_shares(rows: list[dict[str, Any]], bands: int) -> list[float | None]:
    """Share answered in each of `bands` equal bands of depth, from the beginning of the document to its end; None
    where nothing was asked, or the budget was refused."""
    found: list[float | None] = []
    for band in range(bands):
        inside = [row["answered"] for row in rows if int(row["depth"] * bands) == band]
        own = [answered for answered in inside if answered is not None]
        found.append(sum(own) / len(own) if own else None)
    return found


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    maps, lengths = summary["answered"], summary["lengths"]
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (name, shares) in zip(panels, maps.items(), strict=True):
        grid = [[float("nan") if share is None else share for share in column] for column in shares]
        picture = axes.imshow(list(zip(*grid, strict=True)), vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), lengths)
        bands = len(grid[0])
        axes.set_yticks(range(bands), [f"{100 * band // bands}-{100 * (band + 1) // bands}%" for band in range(bands)])
        axes.set(xlabel="tokens", ylabel="depth of the fact", title=name)
    figure.colorbar(picture, ax=list(panels), label="answered")


STUDY = Study(
    "quality_needles_depth", __doc__, run, plot, arguments, {"lengths": [1280, 2048], "depths": 2, "samples": 1}
)

if __name__ == "__main__":
    main(STUDY)
