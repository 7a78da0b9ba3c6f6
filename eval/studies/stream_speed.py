"""How long until the first token of a published context: streamed, computed, or both? (SparKV, section VI)"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.console import load_default_model
from hf_offload_cache.streaming import Costs, Line, meet
from hf_offload_cache.streaming import stream_context as module
from hf_offload_cache.tuning import sample_ids

from ..baselines.greedy import attended_by_all
from ..baselines.loaders import FromTheFront, SplitLoader, WholeChunks
from ..bucket_server import TRACES, bucket_server, trace
from ..synthetic import LLAMA_1B, LLAMA_8B, build_model
from .common import Rows, Study, main

OURS, LOCAL, STREAMED, SPLIT, WHOLE = "ours", "local prefill", "streaming alone", "fixed split", "whole chunks"
CONTENDERS = (OURS, LOCAL, STREAMED, SPLIT, WHOLE)
_QUESTION = 16
"""Tokens behind the context, which all compute."""


SHAPES = {"1b": replace(LLAMA_1B, layers=6, vocabulary=4096), "8b": replace(LLAMA_8B, layers=3, vocabulary=4096)}
"""A few of the layers that such models have."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each length, trace, balance, repeat and contender. What does not depend on the link is measured
    once for each length."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.shape:
        model, tokenizer = build_model(SHAPES[arguments.shape]).to(dtype), None
    else:
        model, tokenizer = load_default_model(dtype) if loaded is None else loaded
    cases = [
        {"trace": kind, "balance": balance, "repeat": repeat}
        for repeat in range(arguments.repeats)
        for kind in arguments.traces
        for balance in arguments.balances
    ]
    for tokens in arguments.tokens:
        left = [
            (name, {"tokens": tokens, **case})
            for case in cases
            for name in CONTENDERS
            if not rows.has(name=name, tokens=tokens, **case)
        ]
        if not left:
            continue
        ids = ids_of(model, tokenizer, tokens)
        with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
            place = Path(folder, "published")
            line, nbytes, prefill = prepare(model, ids, tokens, place, arguments.chunk, folder)
            layers = model.config.num_hidden_layers
            known = study_costs(line, tokens, arguments.chunk, layers, nbytes, 1e9)
            with bucket_server(place, lambda at: 1e9) as server:
                first_token(STREAMED, model, ids, tokens, server.url, known, folder)  # what a process does once
                for name, case in left:
                    mean = nbytes / (case["balance"] * prefill)
                    costs = study_costs(line, tokens, arguments.chunk, layers, nbytes, mean)
                    server.rate = trace(case["trace"], mean, prefill, case["repeat"])
                    server.restart()
                    seconds, report = first_token(name, model, ids, tokens, server.url, costs, folder)
                    rows.add(name=name, **case, seconds=seconds, mbit=mean * 8e-6, **report)
    return summary(rows.rows)


def ids_of(model: Any, tokenizer: Any, tokens: int) -> torch.Tensor:
    """(1, T): a context of so many tokens, and a question."""
    count = tokens + _QUESTION
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return sample_ids(None, tokenizer)[0][:count][None]


def study_costs(line: Line, tokens: int, chunk: int, layers: int, nbytes: int, bandwidth: float) -> Costs:
    """Of a context whose `nbytes` are the same for all cells but the first layer's."""
    lengths = [chunk] * (tokens // chunk)
    cells = np.full((len(lengths), layers), nbytes / len(lengths) / (layers - 1))
    return Costs.of_line(line, lengths, attended_by_all(lengths, layers), cells, bandwidth)


def prepare(
    model: Any, ids: torch.Tensor, tokens: int, place: Path, chunk: int, folder: str
) -> tuple[Line, int, float]:
    """Publish; what a forward takes by its tokens, bytes of all that can be streamed, and seconds of a prefill."""
    took = []
    for _ in range(2):  # the first one pays for what is done once
        with DiskSwapCache(model, path=folder) as cache, torch.no_grad():
            begun = time.perf_counter()
            model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            took.append(time.perf_counter() - begun)
            if len(took) == 2:
                manifest = publish_context(cache, str(place), chunk_tokens=chunk)
    with DiskSwapCache(model, path=folder) as cache, torch.no_grad():
        begun = time.perf_counter()
        model(ids[:, : tokens // 2], past_key_values=cache, logits_to_keep=1)
        half = time.perf_counter() - begun
    line = Line.fitted([tokens // 2, tokens], [tokens / 4, tokens / 2], [half, took[-1]])
    return line, sum(cell.bytes for row in manifest.cells for cell in row[1:] if cell is not None), took[-1]


def first_token(
    name: str, model: Any, ids: torch.Tensor, tokens: int, url: str, costs: Costs, folder: str
) -> tuple[float, dict[str, Any]]:
    """Seconds, and what was computed and streamed. The fixed split is the best one for `costs`."""
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if name == LOCAL:
            cache = stack.enter_context(DiskSwapCache(model, path=folder))
            with torch.no_grad():
                model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        else:
            stack.enter_context(_as(name, costs))
            cache = stack.enter_context(stream_context(url, model, ids, path=folder))
        with torch.no_grad():
            model(ids[:, tokens:], past_key_values=cache, logits_to_keep=1)
        seconds, report = time.perf_counter() - begun, cache.stream_report
    if report is None:
        return seconds, {}
    kept = ("computed", "streamed", "cancelled", "overtaken", "stolen", "lost", "received_bytes", "computing_seconds")
    return seconds, {field: getattr(report, field) for field in kept}


@contextlib.contextmanager
def _as(name: str, costs: Costs) -> Iterator[None]:
    """`stream_context` is what `name` says in here."""
    if name == OURS:
        yield
    elif name == WHOLE:
        with mock.patch.object(module, "Cells", WholeChunks):
            yield
    else:
        split = 0 if name == STREAMED else round(sum(depth / costs.layers for depth in meet(costs).depths))
        loader, cells = (type("Split", (kind,), {"split": split}) for kind in (SplitLoader, FromTheFront))
        with mock.patch.object(module, "Loader", loader), mock.patch.object(module, "Cells", cells):
            yield


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By trace and balance: how many times longer the others take, and the mean over balances of 1/3 to 3."""
    table, ratios = dict[str, dict[str, float]](), dict[str, list[float]]()
    cases = dict.fromkeys((row["tokens"], row["trace"], row["balance"], row["repeat"]) for row in rows)
    for case in cases:
        key = dict(zip(("tokens", "trace", "balance", "repeat"), case, strict=True))
        seconds = {row["name"]: row["seconds"] for row in rows if key.items() <= row.items()}
        if OURS not in seconds:
            continue
        over = {name: own / seconds[OURS] for name, own in seconds.items() if name != OURS}
        tokens, kind, balance, repeat = case
        table[f"{tokens} {kind} {balance:.3g} ({repeat})"] = over
        for name, ratio in over.items() if 0.32 <= balance <= 3.01 else ():
            ratios.setdefault(f"{kind}: {name}", []).append(ratio)
    mean = {name: statistics.mean(found) for name, found in ratios.items()}
    return {"over ours": table, "mean": mean}


STUDY = Study(
    "stream_speed", __doc__, run,
    {
        "tokens": ([2048, 4096, 7168], "tokens of the context"),
        "balances": ([0.05, 1 / 3, 1.0, 3.0, 20.0], "seconds of streaming over those of a prefill"),
        "traces": (["constant"], "links", TRACES),
        "repeats": (1, "repetitions"),
        "chunk": (1024, "tokens of a chunk"),
        "dtype": ("bfloat16", "of the model"),
        "shape": (str, "a model of random weights instead of the default one", SHAPES),
    },
    {"tokens": [2048], "balances": [1.0], "dtype": "float32"},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
