"""One text, what an exact cache says behind it, and how near and how fast another cache comes to that."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..core.selective_cache import SelectiveCache
from .calibrate import ObservedCache, observed
from .distance import divergence
from .synthetic import attention_modules, fill

LEAD, RECITED = 8, 16
"""Tokens of a recital: of its beginning, which tells where it is from, and of what can be known from there."""
RECITAL = LEAD + RECITED


@dataclass(frozen=True)
class Nearness:
    """What one cache did."""

    seconds: float
    """Of a step, the median."""
    text_distance: float
    """KL from the exact cache, nats a token, where the text goes on; 0 where it does not."""
    recital_distance: float
    """The same where earlier parts of it are recited: a cache that does not find the place cannot say them."""


class Trial:
    """`ids` (T,): the first `context` are put into each cache; behind them the rest is decoded as it stands, and then
    `recitals` parts of the context, from places at even distances. Holds keys and values of the context in memory."""

    def __init__(self, model: Any, ids: torch.Tensor, context: int, recitals: int) -> None:
        ids = ids.to(model.device)
        self._text = len(ids) - context
        places = [(2 * part + 1) * (context - RECITAL) // (2 * recitals) for part in range(recitals)]
        self._fed = torch.cat([ids[context:], *(ids[place : place + RECITAL] for place in places)])
        self._model, self._modules = model, attention_modules(model)
        with ObservedCache(model, exact=True, engine="memory") as whole, torch.no_grad():
            model(input_ids=ids[None, :context], past_key_values=whole, use_cache=True, logits_to_keep=1)
            self._layers = {}
            for layer in whole.offloaded:
                keys, values = (part.clone() for part in layer.whole()[:2])
                self._layers[layer.layer_idx] = keys, values, observed(layer)
            said = model(input_ids=self._fed[None], past_key_values=whole, use_cache=True).logits[0]
            self._exact = said.float().cpu()

    def of(self, cache: SelectiveCache) -> Nearness:
        """What an empty cache does, which is for this call."""
        for layer in cache.offloaded:
            fill(layer, self._modules[layer.layer_idx], *self._layers[layer.layer_idx])
        cache.storage.prefetcher.flush()
        said, seconds = self._decode(cache)
        distances = divergence(self._exact, said)
        recited = distances[self._text :].unflatten(0, (-1, RECITAL))[:, LEAD:]
        text = float(distances[: self._text].mean()) if self._text else 0.0
        return Nearness(statistics.median(seconds), text, float(recited.mean()))

    def _decode(self, cache: Any) -> tuple[torch.Tensor, list[float]]:
        """Logits (n, V), float32, after each token, and the seconds of each step."""
        said, seconds = [], []
        with torch.no_grad():
            for token in self._fed.split(1):
                start = time.perf_counter()
                logits = self._model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0, -1]
                said.append(logits.float().cpu())
                seconds.append(time.perf_counter() - start)
        return torch.stack(said), seconds
