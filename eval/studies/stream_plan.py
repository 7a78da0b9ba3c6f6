"""How near to the best are plans of what to stream, how long do they take to make, and what has a server to send? No
network and no model (SparKV, table II)"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from eval.baselines.greedy import attended_by_all, potential_aware
from hf_offload_cache.streaming import Costs, Line, Plan, bound, meet, staircase

from .common import Rows, Study, judged, main

_CHUNK = 1024
CELL_BYTES = 1024 * 3 * 2 * 64 * 2 * 0.276
"""Of the default level, 1,024 tokens of SmolLM2-135M in a layer."""
_LINE = Line(1.0e-3, 1.2e-7)
"""About a prefill of SmolLM2-135M on two cores: a plan hangs on ratios alone."""
_GREEDY_TOKENS = 10_000
"""Up to here the greedy one is asked: it takes minutes beyond."""
_BOUND_TOKENS = 40_000

PLANS: dict[str, Callable[[Costs], Plan]] = {
    "meet": meet,
    "staircase": staircase,
    "greedy": lambda costs: potential_aware(costs, float(costs.columns[:, -1].sum()) / 10),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    sizes = [2048, 7168, 20_480, 131_072, 1_048_576]
    parser.add_argument("--tokens", type=int, nargs="+", default=sizes)
    parser.add_argument("--balances", type=float, nargs="+", default=[0.05, 1 / 3, 1.0, 3.0, 20.0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--clients", type=int, default=100, help="of one server, each with a link of its own")


def costs_of(tokens: int, layers: int, balance: float, uneven: bool) -> Costs:
    """Of a context; `balance`: seconds of streaming over those of a prefill. Uneven: layers attend to .2 to .9 of what
    comes before, and cells have half to one and a half of the bytes."""
    chunks, noise = -(-tokens // _CHUNK), np.random.default_rng(0)
    lengths = [_CHUNK] * chunks
    attended, nbytes = attended_by_all(lengths, layers), np.full((chunks, layers), CELL_BYTES)
    if uneven:
        attended = attended * noise.uniform(0.2, 0.9, (1, layers))
        nbytes = nbytes * noise.uniform(0.5, 1.5, (chunks, layers))
    costs = Costs.of_line(_LINE, lengths, attended, nbytes, 1.0)
    scale = balance * costs.columns[:, -1].sum() / costs.rest[:, 0].sum()
    return Costs(costs.computed, costs.projected, costs.streamed * scale)


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    for tokens in arguments.tokens:
        for uneven in (False, True):
            for balance in arguments.balances:
                if rows.has(tokens=tokens, uneven=uneven, balance=balance):
                    continue
                costs = costs_of(tokens, arguments.layers, balance, uneven)
                row: dict[str, Any] = {"tokens": tokens, "uneven": uneven, "balance": balance}
                least = bound(costs) if tokens <= _BOUND_TOKENS else None
                for name, make in PLANS.items():
                    if name == "greedy" and tokens > _GREEDY_TOKENS:
                        continue
                    begun = time.perf_counter()
                    plan = make(costs)
                    row[f"{name}_seconds"] = time.perf_counter() - begun
                    row[f"{name}_over"] = None if least is None else float(plan.seconds(costs) / least)
                streamed = sum(depth for depth in meet(costs).depths)
                row["streamed_share"] = 1.0 - streamed / (costs.chunks * costs.layers)
                rows.add(**row)
    return {**summary(rows.rows), "server": served(arguments)}


def served(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """By length: what clients ask of a server, whose links are spread evenly in the logarithm between the balances."""
    found = []
    ends = np.log([min(arguments.balances), max(arguments.balances)])
    for tokens in arguments.tokens:
        chunks, sent, took, planned = -(-tokens // _CHUNK), 0.0, 0.0, 0.0
        for balance in np.exp(np.linspace(*ends, arguments.clients)):
            costs = costs_of(tokens, arguments.layers, float(balance), False)
            begun = time.perf_counter()
            plan = meet(costs)
            planned += time.perf_counter() - begun
            sent += len(plan.order) * CELL_BYTES
            took = max(took, *plan.lanes(costs))
        whole = arguments.clients * chunks * (arguments.layers - 1) * CELL_BYTES
        found.append({
            "tokens": tokens, "bytes": sent, "share": sent / whole, "planning_seconds": planned,
            "longest_seconds": took,
        })  # fmt: skip
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = [row for row in rows if row["meet_over"] is not None]
    dense, uneven = ([row for row in known if row["uneven"] is kind] for kind in (False, True))
    at_20k = [row for row in rows if row["tokens"] == 20_480]
    reached = [
        judged("meet over the bound, alike, the most", _most(dense, "meet_over"), most=1.05),
        judged("staircase over the bound, uneven, the most", _most(uneven, "staircase_over"), most=1.05),
        judged("seconds of meet at 20K tokens, the most", _most(at_20k, "meet_seconds"), most=0.02),
        judged("seconds of the staircase at 20K tokens, the most", _most(at_20k, "staircase_seconds"), most=0.02),
    ]
    greedy = [row["greedy_over"] for row in known if row.get("greedy_over")]
    return {"must_reach": reached, "greedy_over": [min(greedy), max(greedy)] if greedy else None}


def _most(rows: list[dict[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows), default=None)


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    for name in PLANS:
        own = [row for row in rows if f"{name}_seconds" in row]
        axes.scatter([row["tokens"] for row in own], [1e3 * row[f"{name}_seconds"] for row in own], label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms to plan")
    axes.legend()


STUDY = Study("stream_plan", __doc__, run, plot, arguments, {"tokens": [2048, 7168], "balances": [1.0], "clients": 10})

if __name__ == "__main__":
    main(STUDY)
