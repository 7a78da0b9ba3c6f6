"""How many tokens a second does a GPU decode at the largest batch that its memory holds (SpeCache, tables 3 and 4)?

A model of Mistral-7B's shape with random weights, of which some of the layers are run: what those hold and take is
multiplied. So are its records in host memory, which all layers of a large batch would not fit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from hf_offload_cache import SpecCache

from .common import Rows, Study, main

LAYERS = 32
_DYNAMIC = "DynamicCache"
_METHODS: dict[str, dict[str, Any]] = {
    "2 bits": {"bits": 2},
    "1 bit": {"bits": 1},
    "2 bits, not ahead": {"bits": 2, "speculative": False},
    "2 bits, alone": {"bits": 2, "num_selected": 0},
}
_PREFILLED = 1 << 17
"""Tokens of a prefill, of all rows, each of which then becomes several, whose next tokens differ: rows share what is
stored, and nothing else. What a prefill takes is no part of decoding."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan of 5 ms a layer for every new length
    model = _model(arguments)
    every = sum(weight.nbytes for weight in model.parameters())
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    weights = every + (LAYERS - arguments.layers) * layer
    for tokens in arguments.contexts:
        for method in arguments.methods:
            if rows.has(tokens=tokens, method=method):
                continue
            batch = arguments.batch
            if batch is None:
                few = _measured(model, method, tokens, 4, 4, arguments)
                room = 1e9 * arguments.cap - weights
                a_row = (few["held"] * LAYERS / arguments.layers + few["beside"]) / 4
                batch = max(1, int(room / a_row))
            found = _measured(model, method, tokens, batch, arguments.steps, arguments)
            held = weights + found["held"] * LAYERS / arguments.layers + found["beside"]
            milliseconds = found["milliseconds"] * LAYERS / arguments.layers
            rows.add(
                tokens=tokens, method=method, batch=batch, gigabytes=held / 1e9, milliseconds=milliseconds,
                tokens_per_second=1e3 * batch / milliseconds, **{name: found[name] for name in _SHOWN if name in found},
            )  # fmt: skip
    return {f"{row['method']}, {row['tokens']} tokens": row["tokens_per_second"] for row in rows.rows}


_SHOWN = ("spread", "prefill_seconds", "hit_rate")


def _model(arguments: argparse.Namespace) -> Any:
    width = arguments.width
    config = MistralConfig(
        num_hidden_layers=arguments.layers, sliding_window=None, head_dim=width, hidden_size=32 * width,
        intermediate_size=112 * width, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return MistralForCausalLM(config).to(torch.bfloat16).eval()


def _measured(model: Any, method: str, tokens: int, batch: int, steps: int, arguments: Any) -> dict[str, Any]:
    """Bytes that the layers that are run hold and what a step takes beside that, and a step's time."""
    cuda = model.device.type == "cuda"
    made = torch.Generator(model.device).manual_seed(1)
    rows = max(1, min(batch, _PREFILLED // tokens))
    ids, token = (
        torch.randint(5, 30000, shape, generator=made, device=model.device) for shape in ((rows, tokens), (batch, 1))
    )
    fields = {"engine": "memory", "path": arguments.path, **_METHODS.get(method, {})}
    cache: Any = DynamicCache(config=model.config) if method == _DYNAMIC else SpecCache(model, **fields)
    begun, before = time.perf_counter(), _allocated(cuda)
    try:
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
            _wait(cuda)
            prefilled = time.perf_counter() - begun
            cache.batch_select_indices(torch.arange(batch, device=model.device) % rows)
            taken = []
            for step in range(steps):
                if cuda and step == 2:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
                _wait(cuda)
                taken.append(1e3 * (time.perf_counter() - start))
        held, most = _allocated(cuda) - before, torch.cuda.max_memory_allocated() if cuda else 0
        low, middle, high = statistics.quantiles(taken[2:], n=4)
        found = {"held": held, "beside": max(0, most - _allocated(cuda)), "milliseconds": middle}
        found |= {"spread": (high - low) / middle, "prefill_seconds": prefilled}
        found |= {} if method == _DYNAMIC else {"hit_rate": cache.report().hit_rate}
    finally:
        if method != _DYNAMIC:
            cache.close()
        del cache, ids
        if cuda:
            torch.cuda.empty_cache()
    return found


def _allocated(cuda: bool) -> int:
    return torch.cuda.memory_allocated() if cuda else 0


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


STUDY = Study(
    "gpu_batches", __doc__, run,
    {
        "contexts": ([2048, 8192, 32768], "tokens of context"),
        "methods": ([_DYNAMIC, "2 bits", "1 bit"], "caches", (_DYNAMIC, *_METHODS)),
        "cap": (48.0, "GB of memory for all layers"),
        "layers": (8, f"layers that are run, of {LAYERS}"),
        "batch": (int, "sequences (default: as many as fit the cap)"),
        "steps": (24, "decoding steps"),
        "width": (128, "of a head; there are 32 heads, and 8 of keys"),
        "device": ("cuda", "torch device"),
    },
    {"contexts": [256], "batch": 2, "layers": 2, "width": 8, "steps": 5, "device": "cpu"},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
