"""How long until the first token of a published context: streamed, or computed? (SparKV, section VI)"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bucket_server import TRACES, bucket_server, trace
from ..synthetic import LLAMA_1B, LLAMA_8B, build_model
from .common import Rows, Study, main

OURS, LOCAL = "ours", "local prefill"
_QUESTION = 16
"""Tokens behind the context, which both compute."""
SHAPES = {"1b": replace(LLAMA_1B, layers=6, vocabulary=4096), "8b": replace(LLAMA_8B, layers=3, vocabulary=4096)}
"""A few of the layers that such models have."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each length, trace, balance, repeat and contender."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.shape:
        model, tokenizer = build_model(SHAPES[arguments.shape]).to(dtype), None
    else:
        model, tokenizer = load_default_model(dtype) if loaded is None else loaded
    cases = [
        {"tokens": tokens, "trace": kind, "balance": balance, "repeat": repeat}
        for tokens in arguments.tokens
        for repeat in range(arguments.repeats)
        for kind in arguments.traces
        for balance in arguments.balances
    ]
    for tokens in arguments.tokens:
        left = [(name, one) for one in cases for name in (OURS, LOCAL) if not rows.has(name=name, **one)]
        if not (left := [(name, one) for name, one in left if one["tokens"] == tokens]):
            continue
        ids = ids_of(model, tokenizer, tokens)
        with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
            place = Path(folder, "published")
            nbytes, prefill = publish(model, ids, tokens, place, arguments.chunk, folder)
            with bucket_server(place, lambda at: 1e9) as server:
                first_token(OURS, model, ids, tokens, server.url, folder)  # what a process does once
                for name, case in left:
                    mean = nbytes / (case["balance"] * prefill)
                    server.rate = trace(case["trace"], mean, prefill, case["repeat"])
                    server.restart()
                    seconds, report = first_token(name, model, ids, tokens, server.url, folder)
                    rows.add(name=name, **case, seconds=seconds, mbit=mean * 8e-6, **report)
    return summary(rows.rows)


def ids_of(model: Any, tokenizer: Any, tokens: int) -> torch.Tensor:
    """(1, T): a context of so many tokens, and a question."""
    count = tokens + _QUESTION
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return sample_ids(None, tokenizer)[0][:count][None]


def publish(model: Any, ids: torch.Tensor, tokens: int, place: Path, chunk: int, folder: str) -> tuple[int, float]:
    """Bytes of all that can be streamed, and seconds of a prefill, the second one: the first pays for what is done
    once."""
    for again in (False, True):
        with DiskSwapCache(model, path=folder) as cache, torch.no_grad():
            begun = time.perf_counter()
            model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            seconds = time.perf_counter() - begun
            if again:
                manifest = publish_context(cache, str(place), chunk_tokens=chunk)
    return sum(cell.bytes for row in manifest.cells for cell in row[1:] if cell is not None), seconds


def first_token(
    name: str, model: Any, ids: torch.Tensor, tokens: int, url: str, folder: str
) -> tuple[float, dict[str, Any]]:  # fmt: skip
    """Seconds, and what was computed and streamed."""
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack, torch.no_grad():
        if name == LOCAL:
            cache = stack.enter_context(DiskSwapCache(model, path=folder))
            model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        else:
            cache = stack.enter_context(stream_context(url, model, ids, path=folder))
        model(ids[:, tokens:], past_key_values=cache, logits_to_keep=1)
        seconds, report = time.perf_counter() - begun, cache.stream_report
    kept = ("computed", "streamed", "cancelled", "overtaken", "stolen", "lost", "received_bytes", "computing_seconds")
    return seconds, {} if report is None else {field: getattr(report, field) for field in kept}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By trace and balance: how many times longer a prefill takes, and the mean over balances of 1/3 to 3."""
    table, ratios = dict[str, float](), dict[str, list[float]]()
    ours = {_case(row): row["seconds"] for row in rows if row["name"] == OURS}
    for row in rows:
        if row["name"] == LOCAL and (case := _case(row)) in ours:
            tokens, kind, balance, repeat = case
            table[f"{tokens} {kind} {balance:.3g} ({repeat})"] = ratio = row["seconds"] / ours[case]
            if 0.32 <= balance <= 3.01:
                ratios.setdefault(kind, []).append(ratio)
    return {"over ours": table, "mean": {kind: statistics.mean(found) for kind, found in ratios.items()}}


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("tokens", "trace", "balance", "repeat"))


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
