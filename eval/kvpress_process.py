"""Presses of kvpress, in an environment of their own: `eval.fidelity --kvpress PYTHON` starts it, and asks it.

Imports nothing of this project. Reads one JSON object a line from stdin, and answers each with one on stdout:
{"press": name, "ratio": share of entries that goes, "ids": [...], "next": [...], "logits": FILE} lets "next" follow
after "ids", at once, since what a press has left stays as it is, and leaves logits (S, V), float32, in FILE; with
"first": tokens that are prefilled under the press, "answer": the most new ones, and "end": ids that end one, in the
place of both it answers greedily. Jobs that prefill the same one after another prefill it once.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Prefill:
    """One forward over ids (1, T), and what each press would leave of it: a press comes to a layer when that has
    attended to everything, so that a forward is the same for all of them."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.ids, self._model, self._cache = ids, model, DynamicCache(config=model.config)
        self._layers: list[tuple[Any, dict[str, Any], Any]] = []
        attention = [layer.self_attn for layer in model.model.layers]
        hooks = [module.register_forward_hook(self._seen, with_kwargs=True) for module in attention]
        try:
            model.model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        finally:
            for hook in hooks:
                hook.remove()

    def _seen(self, module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
        self._layers.append((module, given, output[1]))

    def kept(self, press: str, ratio: float) -> DynamicCache:
        """What a press leaves, in a cache of its own."""
        cache = DynamicCache(config=self._model.config)
        for index, layer in enumerate(self._cache.layers):
            cache.update(layer.keys, layer.values, index)
        chosen = getattr(kvpress, press)(compression_ratio=ratio)
        with chosen(self._model):  # what it makes of the model, and then each layer as in a forward
            for module, given, weights in self._layers:
                chosen.forward_hook(module, (), {**given, "past_key_values": cache}, (None, weights))
        return cache


def after(model: Any, cache: DynamicCache, ids: torch.Tensor, position: int) -> torch.Tensor:
    """Logits (S, V) after each of ids (1, S), at their own positions: the cache has fewer entries than that."""
    where = position + torch.arange(ids.shape[1])[None]
    return model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=where).logits[0].float()


def answered(model: Any, job: dict[str, Any], before: Prefill | None) -> tuple[dict[str, Any], Prefill]:
    """What comes out of one job: {"held": bytes of keys and values after the prefill, "answer": ids of it}; and what it
    prefilled, for the next one."""
    ids = torch.tensor([job["ids"]])
    first = len(job["ids"]) if "next" in job else job["first"]
    if before is None or not torch.equal(before.ids, ids[:, :first]):
        before = Prefill(model, ids[:, :first])
    cache = before.kept(job["press"], job["ratio"])
    found: dict[str, Any] = {"held": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}
    if "next" in job:
        torch.save(after(model, cache, torch.tensor([job["next"]]), first), job["logits"])
        return found, before
    tokens, following = [], ids[:, first:]
    for place in (first, *range(ids.shape[1], ids.shape[1] + job["answer"] - 1)):
        tokens.append(int(after(model, cache, following, place)[-1].argmax()))
        if tokens[-1] in job["end"]:
            break
        following = torch.tensor([tokens[-1:]])
    return {**found, "answer": tokens}, before


def main() -> None:
    """The folder of the model and torch's threads are the arguments."""
    torch.set_num_threads(int(sys.argv[2]))
    before = None
    with contextlib.redirect_stdout(sys.stderr):
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
    for line in sys.stdin:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            found, before = answered(model, json.loads(line), before)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
