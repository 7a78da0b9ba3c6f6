"""How well is it told what a chunk takes to compute: by a line, a roofline, a small network? (SparKV, figure 8)"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import numpy as np
import torch

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import Filling
from hf_offload_cache.streaming import (
    BLOCK,
    ActiveBlocks,
    CostNetwork,
    LayerCells,
    Line,
    SparsePrefill,
    measure_active_blocks,
)
from hf_offload_cache.tuning import sample_ids

from ..baselines.cost_models import Roofline
from ..busy import busy
from .common import Rows, Study, judged, main

DENSE = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7168, help="of the context")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--masses", type=float, nargs="+", default=[DENSE, 0.98, 0.9],
                        help="of the attention that active blocks have; 1: all is attended to")  # fmt: skip
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1], help="processes that compute beside it")
    parser.add_argument("--repeats", type=int, default=5, help="the last one is told by the others")


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each mass, load, repeat and chunk, with seconds by layer. All is told of the last repeat by what the
    others took: a line of its own for each load, as it is fitted while a context is loaded."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    ids = sample_ids(None, tokenizer)[0][: arguments.tokens]
    for mass in arguments.masses:
        blocks = ActiveBlocks(BLOCK, {})
        if mass != DENSE:
            blocks = measure_active_blocks(model, ids, mass, path=arguments.path)
        for load in arguments.loads:
            left = [one for one in range(arguments.repeats) if not rows.has(mass=mass, load=load, repeat=one)]
            with busy(load if left else 0):
                for repeat in left:
                    _measure(model, ids, blocks, arguments, rows, {"mass": mass, "load": load, "repeat": repeat})
    return summary(rows.rows, model)


def _measure(
    model: Any, ids: torch.Tensor, blocks: ActiveBlocks, arguments: argparse.Namespace, rows: Rows,
    key: dict[str, Any],
) -> None:  # fmt: skip
    size, sparse = arguments.chunk, SparsePrefill(blocks)
    with DiskSwapCache(model, exact=True, path=arguments.path) as cache:
        filling = Filling(cache)
        for place, part in enumerate(ids[None].split(size, 1)):
            told: list[float] = []

            def tell(layer: int, told: list[float] = told) -> bool:
                told.append(time.perf_counter())
                return True

            filling.compute(part, tell, sparse if blocks.layers else None)
            told.append(time.perf_counter())
            filling.note(part)
            layers = range(len(told) - 1)
            seconds = [after - before for before, after in itertools.pairwise(told)]
            start, stop = place * size, place * size + part.shape[1]
            attended = [blocks.attended(layer, start, stop) for layer in layers]
            rows.add(**key, place=place, tokens=part.shape[1], total=sum(seconds), seconds=seconds, attended=attended)


def summary(rows: list[dict[str, Any]], model: Any) -> dict[str, Any]:
    """Mean relative errors of what each says of a layer of a chunk in the last repeat; the last layer, behind which the
    model's head comes, left out."""
    last = max(row["repeat"] for row in rows)
    known = [row for row in rows if row["repeat"] < last] or rows
    network, roofline = CostNetwork(*_cells(known)), Roofline(model)
    table: dict[str, dict[str, float]] = {}
    for mass in dict.fromkeys(row["mass"] for row in rows):
        for load in dict.fromkeys(row["load"] for row in rows):
            own = own_of(known, mass, load)
            cells, took = _cells([row for row in own_of(rows, mass, load) if row["repeat"] == last])
            before, seconds = _cells(own)
            line = Line.fitted(before.tokens, before.attended, seconds)
            roofline.fit(before, seconds)
            told = {
                "line": line.seconds(cells.tokens, cells.attended),
                "roofline": roofline.seconds(cells),
                "network": network.seconds(cells),
            }
            name = ("dense" if mass == DENSE else f"mass {mass}") + (f", {load} beside" if load else "")
            table[name] = {who: float(np.mean(np.abs(one / took - 1))) for who, one in told.items()}
    quiet = {name: of for name, of in table.items() if "beside" not in name}
    line = float(np.mean([of["line"] for of in quiet.values()]))
    roof = float(np.mean([of["roofline"] for of in quiet.values()]))
    reached = [
        judged("error of the line, quiet machine", line, most=0.15),
        judged("error of the line over a fitted roofline's", line / roof, most=0.5),
    ]
    return {"errors": table, "must_reach": reached}


def own_of(rows: list[dict[str, Any]], mass: float, load: int) -> list[dict[str, Any]]:
    return [row for row in rows if (row["mass"], row["load"]) == (mass, load)]


def _cells(rows: list[dict[str, Any]]) -> tuple[LayerCells, np.ndarray]:
    flat = [
        (row["tokens"], attended, row["place"], attended / BLOCK, row["load"], seconds)
        for row in rows
        for attended, seconds in zip(row["attended"][:-1], row["seconds"][:-1], strict=True)
    ]
    *of, seconds = np.array(flat, dtype=float).T
    return LayerCells(*of), seconds


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes, table = figure.subplots(), found["errors"]
    for place, who in enumerate(("line", "roofline", "network")):
        at = [number + place / 4 for number in range(len(table))]
        axes.bar(at, [100 * of[who] for of in table.values()], 1 / 4, label=who)
    axes.set_xticks([at + 0.25 for at in range(len(table))], table)
    axes.set(ylabel="mean error in %")
    axes.legend()


STUDY = Study(
    "stream_costs", __doc__, run, plot, arguments, {"tokens": 2048, "loads": [0], "masses": [1.0, 0.9], "repeats": 2}
)

if __name__ == "__main__":
    main(STUDY)
