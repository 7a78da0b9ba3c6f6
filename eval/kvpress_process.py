"""Presses of kvpress, in an environment of their own: `eval.fidelity --kvpress PYTHON` starts it, and asks it.

Imports nothing of this project. Reads one JSON object a line from stdin, and answers each with one on stdout:
{"press": name, "ratio": share of entries that goes, "ids": [...], "next": [...], "logits": FILE} decodes "next" token
by token after "ids" and leaves logits (S, V), float32, in FILE; with "first": tokens that are prefilled at once,
"answer": the most new ones, and "end": ids that end one, in the place of both it answers greedily.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def prefilled(model: Any, press: str, ratio: float, ids: torch.Tensor) -> DynamicCache:
    """What a press leaves of ids (1, T)."""
    cache = DynamicCache(config=model.config)
    with getattr(kvpress, press)(compression_ratio=ratio)(model):
        model.model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def step(model: Any, cache: DynamicCache, token: torch.Tensor, position: int) -> torch.Tensor:
    """Logits (V,) after one token (1, 1), at its own position: the cache has fewer entries than that."""
    where = torch.tensor([[position]])
    said = model(input_ids=token, past_key_values=cache, use_cache=True, position_ids=where)
    return said.logits[0, -1].float()


def answered(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What comes out of one job: {"held": bytes of keys and values after the prefill, "answer": ids of it}."""
    ids = torch.tensor([job["ids"]])
    first = len(job["ids"]) if "next" in job else job["first"]
    cache = prefilled(model, job["press"], job["ratio"], ids[:, :first])
    found: dict[str, Any] = {"held": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}
    if "next" in job:
        said = [step(model, cache, torch.tensor([[token]]), first + at) for at, token in enumerate(job["next"])]
        torch.save(torch.stack(said), job["logits"])
        return found
    for place in range(first, ids.shape[1]):
        logits = step(model, cache, ids[:, place : place + 1], place)
    tokens: list[int] = []
    while len(tokens) < job["answer"]:
        tokens.append(int(logits.argmax()))
        if tokens[-1] in job["end"]:
            break
        logits = step(model, cache, torch.tensor([tokens[-1:]]), ids.shape[1] + len(tokens) - 1)
    return {**found, "answer": tokens}


def main() -> None:
    """The folder of the model and torch's threads are the arguments."""
    torch.set_num_threads(int(sys.argv[2]))
    with contextlib.redirect_stdout(sys.stderr):
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
    for line in sys.stdin:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            found = answered(model, json.loads(line))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
