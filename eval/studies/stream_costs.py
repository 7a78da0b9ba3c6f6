"""How well does a line predict the seconds of a chunk in a layer, and how well the paper's network? (SparKV)

Each context is predicted from the contexts before it. Processor seconds are measured, so that other work on the machine
counts little. The machine's load during each forward is an input of the network, as in the paper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import Filling
from hf_offload_cache.streaming import BLOCK, Costs, Line, SparsePrefill, measure_active_blocks, staircase
from hf_offload_cache.tuning import sample_ids

from ..baselines.greedy import Schedule
from .common import Rows, Study, main

_FORWARDS = 4
"""Forwards that the package fits its line to."""


def cost_network(features: np.ndarray, seconds: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Two hidden layers over a chunk's place, its active blocks and the machine's load (n, 3), fitted to seconds per
    token (n,): a function that predicts them, at least a tenth of their mean."""
    mean, deviation = features.mean(0), features.std(0) + 1e-9
    level, spread = float(seconds.mean()), float(seconds.std()) + 1e-12
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second, last = (torch.nn.Linear(*sizes).double() for sizes in ((3, 48), (48, 24), (24, 1)))
    network = torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), last)
    inputs, targets = torch.from_numpy((features - mean) / deviation), torch.from_numpy((seconds - level) / spread)
    # The paper descends by batches; this data is so small that all of it fits one.
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def error() -> torch.Tensor:
        optimizer.zero_grad()
        decay = sum(weights.square().sum() for weights in network.parameters())
        loss: torch.Tensor = (network(inputs)[:, 0] - targets).square().mean() + 1e-5 * decay
        loss.backward()
        return loss

    optimizer.step(error)
    network.requires_grad_(False)
    return lambda asked: np.maximum(
        network(torch.from_numpy((asked - mean) / deviation))[:, 0].numpy() * spread + level, level / 10
    )


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each context and chunk, with the seconds of its layers; then predict each context."""
    model, tokenizer = load_default_model(torch.float32) if loaded is None else loaded
    text = sample_ids(None, tokenizer)[0]
    for number in range(arguments.contexts):
        ids = text.roll(-number * arguments.tokens // 2)[: arguments.tokens]
        for mass in arguments.masses:
            if rows.has(context=number, mass=mass):
                continue
            sparse = SparsePrefill(blocks := measure_active_blocks(model, ids, mass, path=arguments.path))
            with DiskSwapCache(model, exact=True, path=arguments.path) as cache:
                filling, start = Filling(cache), 0
                for chunk, part in enumerate(ids[None].split(arguments.chunk, 1)):
                    begun, ends, stop = (time.perf_counter(), time.process_time()), list[float](), start + part.shape[1]

                    def goes_on(layer: int, ends: list[float] = ends) -> bool:
                        ends.append(time.process_time())
                        return True

                    filling.compute(part, goes_on, sparse)
                    used = (time.process_time() - begun[1]) / (time.perf_counter() - begun[0]) / torch.get_num_threads()
                    filling.note(part)
                    attended = [blocks.attended(layer, start, stop) for layer in range(len(ends) - 1)]
                    rows.add(
                        context=number, mass=mass, chunk=chunk, tokens=part.shape[1], place=(start + stop) / 2,
                        load=max(0.0, 1 - used), seconds=np.diff(ends).tolist(), attended=attended,
                    )  # fmt: skip
                    start = stop
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all contexts but the first: relative errors of a layer's and of a chunk's seconds, and how much longer
    the plan made from predictions takes than the plan made from what was measured."""
    contexts = list(dict.fromkeys((row["context"], row["mass"]) for row in rows))
    errors: dict[str, list[tuple[float, ...]]] = {}
    for at in range(1, len(contexts)):
        known = [row for row in rows if (row["context"], row["mass"]) in contexts[:at]]
        asked = [row for row in rows if (row["context"], row["mass"]) == contexts[at]]
        measured = np.array([row["seconds"] for row in asked])
        for name, predicted in _predicted(known, asked).items():
            layer, chunk = predicted / measured, predicted.sum(1) / measured.sum(1)
            longer = np.mean([_longer(predicted, measured, balance) for balance in (1 / 3, 1.0, 3.0)])
            found = np.abs(layer - 1).mean(), np.abs(chunk - 1).mean(), longer
            errors.setdefault(name, []).append(tuple(map(float, found)))
    kinds = ("layer", "chunk", "plan")
    return {"errors": {name: dict(zip(kinds, np.mean(own, 0).tolist(), strict=True)) for name, own in errors.items()}}


def _predicted(known: list[dict[str, Any]], asked: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Name -> seconds (chunks, layers) of the `asked` rows."""
    latest, (tokens, features, seconds), (of_asked, target, _) = known[-_FORWARDS:], _cells(known), _cells(asked)
    whole = Line.fitted(*([float(np.mean(row[name])) for row in latest] for name in ("tokens", "attended", "seconds")))
    line = Line.fitted(tokens, features[:, 1] * BLOCK, seconds)
    idle = np.array([1.0, 1.0, 0.0])
    each = {
        "line, latest forwards": whole.seconds(of_asked, target[:, 1] * BLOCK),
        "line, all layers": line.seconds(of_asked, target[:, 1] * BLOCK),
        "network": cost_network(features, seconds / tokens)(target) * of_asked,
        "network, load unknown": cost_network(features * idle, seconds / tokens)(target * idle) * of_asked,
    }
    return {name: predicted.reshape(len(asked), -1) for name, predicted in each.items()}


def _longer(predicted: np.ndarray, measured: np.ndarray, balance: float) -> float:
    """Time of the plan made from predicted seconds over that of the plan made from measured ones, less 1; `balance`:
    seconds of streaming everything over those of a prefill."""
    streamed = np.full(measured.shape, balance * measured.sum() / measured[:, 1:].size)
    right, guessed = (Costs(computed, 0.1 * computed, streamed) for computed in (measured, predicted))
    plans = (Schedule.from_the_end(staircase(costs), right).seconds(right) for costs in (guessed, right))
    return next(plans) / next(plans) - 1


def _cells(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each chunk and layer: tokens (n,), place, active blocks and load (n, 3), and seconds (n,)."""
    table = np.array([
        (row["tokens"], row["place"], attended / BLOCK, row["load"], seconds)
        for row in rows
        for attended, seconds in zip(row["attended"], row["seconds"], strict=True)
    ], dtype=float)  # fmt: skip
    return table[:, 0], table[:, 1:4], table[:, 4]


STUDY = Study(
    "stream_costs", __doc__, run,
    {
        "tokens": (5120, "tokens of a context"),
        "contexts": (4, "texts"),
        "masses": ([0.98, 0.9], "attention mass of the active blocks"),
        "chunk": (1024, "tokens of a chunk"),
    },
    {"tokens": 2048, "contexts": 2},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
