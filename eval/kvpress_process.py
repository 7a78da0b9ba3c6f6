"""Presses of kvpress, in an environment of their own, which `eval.fidelity --kvpress PYTHON` starts.

Imports nothing of this project. Answers each line of stdin, a JSON object, with one on stdout: {"press": name, "ratio":
share of entries that goes, "ids": [...], "next": [...], "logits": FILE} decodes "next" token by token after "ids" and
leaves logits (S, V), float32, in FILE. With "first" (tokens prefilled under the press), "answer" (the most new ones)
and "end" (ids that end one) it answers greedily. Jobs that prefill the same one after another prefill it once.
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
    """One forward over ids (1, T), and what each press would leave of it. For those that do no more than drop entries
    of a layer when that has attended to everything: a forward is the same for all of them."""

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
        """The entries that a press leaves, in a cache of its own."""
        cache = DynamicCache(config=self._model.config)
        chosen = getattr(kvpress, press)(compression_ratio=ratio)
        with chosen(self._model):  # what it makes of the model, and then each layer as in a forward
            for layer, (module, given, weights) in zip(self._cache.layers, self._layers, strict=True):
                cache.update(layer.keys, layer.values, module.layer_idx)
                chosen.forward_hook(module, (), {**given, "past_key_values": cache}, (None, weights))
        return cache


class Presses:
    """The presses of one model. The latest prefill is kept for the next job."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prefill: Prefill | None = None

    def answered(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of a job: {"held": bytes of keys and values after the prefill, "answer": ids of it}."""
        ids = torch.tensor([job["ids"]])
        first = len(job["ids"]) if "next" in job else job["first"]
        cache = self._prefilled(ids[:, :first]).kept(job["press"], job["ratio"])
        found: dict[str, Any] = {"held": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}
        if "next" in job:
            said = [self._after(cache, torch.tensor([[token]]), first + at) for at, token in enumerate(job["next"])]
            torch.save(torch.stack(said), job["logits"])
            return found
        tokens, following = [], ids[:, first:]
        for place in (first, *range(ids.shape[1], ids.shape[1] + job["answer"] - 1)):
            tokens.append(int(self._after(cache, following, place).argmax()))
            if tokens[-1] in job["end"]:
                break
            following = torch.tensor([tokens[-1:]])
        return {**found, "answer": tokens}

    def _prefilled(self, ids: torch.Tensor) -> Prefill:
        if self._prefill is None or not torch.equal(self._prefill.ids, ids):
            self._prefill = None  # the old one goes before the new one comes
            self._prefill = Prefill(self._model, ids)
        return self._prefill

    def _after(self, cache: DynamicCache, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Logits (V,) after ids (1, S), the first at `position`: the cache has fewer entries than that."""
        where = position + torch.arange(ids.shape[1])[None]
        said = self._model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=where)
        return said.logits[0, -1].float()


def main() -> None:
    """The folder of the model and torch's threads are the arguments."""
    torch.set_num_threads(int(sys.argv[2]))
    with contextlib.redirect_stdout(sys.stderr):
        presses = Presses(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval())
    for line in sys.stdin:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            found = presses.answered(json.loads(line))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
