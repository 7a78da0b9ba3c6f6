"""Watching a cache decode, from outside: what each layer asked, what it attended to, and what it should have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from hf_offload_cache.core import OffloadCache, OffloadLayer, SelectiveLayer
from hf_offload_cache.fetch import Choice, Fetched
from hf_offload_cache.methods.spec import SpecLayer
from hf_offload_cache.model import AttentionCall


@dataclass(frozen=True)
class Look:
    """One layer in one step of one sequence."""

    layer_idx: int
    weights: torch.Tensor
    """(H, T) float32: the layer's own query's softmax over all keys that it ever stored."""
    columns: list[torch.Tensor] | None
    """(n,) positions that were attended to, ascending, for each row of heads: all of them, or those of a key head where
    these have groups of their own. None: all, in all rows."""

    @property
    def mass(self) -> float:
        """Share of the attention mass on what was attended to, mean over heads."""
        if self.columns is None:
            return 1.0
        heads = self.weights.unflatten(0, (len(self.columns), -1))
        found = [own[:, columns].sum(-1) for own, columns in zip(heads, self.columns, strict=True)]
        return float(torch.cat(found).mean())

    def between(self, first: int, last: int) -> tuple[float, float]:
        """Shares of the attention mass on positions `first` to `last` - 1: on those attended to, and on as many with
        most of it, for each row; means over rows of heads."""
        assert self.columns is not None
        found = []
        for own, columns in zip(self.weights.unflatten(0, (len(self.columns), -1)), self.columns, strict=True):
            inside = own.sum(0)[first:last]
            some = columns[(columns >= first) & (columns < last)] - first
            whole = inside.sum().clamp(min=1e-9)
            best = inside.topk(len(some)).values.sum()
            found.append((float(inside[some].sum() / whole), float(best / whole)))
        return tuple(np.mean(found, 0).tolist())  # type: ignore[return-value]

    def important(self, share: float) -> float:
        """Share of the tokens attended to that are among the `share` of all tokens with most of the attention of the
        row's heads, summed."""
        if self.columns is None:
            return share
        found = []
        heads = self.weights.unflatten(0, (len(self.columns), -1)).sum(1)
        for own, columns in zip(heads, self.columns, strict=True):
            best = torch.zeros(len(own), dtype=torch.bool)
            best[own.topk(math.ceil(share * len(own))).indices] = True
            found.append(float(best[columns].float().mean()))
        return float(np.mean(found))


class Watch:
    """While entered, `told` gets a `Look` of every layer and single-query step of `cache` (batch 1, no padding), which
    is filled with a context of `keys` (1, Hk, T, D) by layer: read, not copied. Keys that come later are kept here."""

    def __init__(self, cache: OffloadCache, keys: list[torch.Tensor], told: Callable[[Look], object]) -> None:
        self.cache = cache
        self.keys: list[list[torch.Tensor]] = [[part] for part in keys]
        self.told = told
        self._chosen: list[torch.Tensor] | None = None
        self._wrapped: list[tuple[Any, str]] = []

    def __enter__(self) -> Self:
        for layer in self.cache.offloaded:
            self._wrap(layer, "attend", self._attend(layer, layer.attend))
            if isinstance(layer, SpecLayer):
                self._wrap(layer, "attend_sparsely", self._mixed(layer, layer.attend_sparsely))
            elif isinstance(layer, SelectiveLayer):
                self._wrap(layer, "combine", self._combine(layer, layer.combine))
        return self

    def __exit__(self, *nothing: object) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)  # the instance's: the class's own shows again
        self._wrapped = []

    def _wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        self._wrapped.append((owner, name))

    def _combine(self, layer: SelectiveLayer, combine: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: AttentionCall, choice: Choice, fetched: Fetched, visible: torch.Tensor | None) -> Any:
            self._chosen = attended_columns(layer, choice, fetched)
            return combine(call, choice, fetched, visible)

        return watched

    def _mixed(self, layer: SpecLayer, attend: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: AttentionCall, visible: torch.Tensor | None) -> Any:
            output, history = attend(call, visible), layer.history
            nothing = np.zeros((history.form.num_key_heads, 0), dtype=np.int64)
            tokens = nothing if layer.chosen is None else layer.chosen.tokens[0]
            latest = np.arange(history.length - history.recent.shape[1], history.length)
            columns = [np.concatenate([np.sort(own[own >= 0]), latest]) for own in tokens]
            self._chosen = [torch.from_numpy(own) for own in columns]
            return output

        return watched

    def _attend(self, layer: OffloadLayer, attend: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: AttentionCall) -> Any:
            self._chosen = None
            output = attend(call)
            kept, came = self.keys[layer.layer_idx], call.num_queries - layer.guessed
            kept.append(call.key[:, :, -call.num_queries :][:, :, :came].detach().clone())
            if came == 1:
                weights = attention_weights(call.query[:, :, :1], kept, call.scaling)
                assert weights.shape[1] == layer.length, "the context's keys are not those of the cache"
                self.told(Look(layer.layer_idx, weights, self._chosen))
            return output

        return watched


def attention_weights(query: torch.Tensor, keys: list[torch.Tensor], scaling: float) -> torch.Tensor:
    """Softmax (H, T), float32, of one query (1, H, 1, D) over successive keys (1, Hk, ·, D), all of them."""
    grouped = query[0, :, 0].detach().float().unflatten(0, (keys[0].shape[1], -1))
    scores = torch.cat([grouped @ part[0].float().transpose(-1, -2) for part in keys], -1)
    return (scores.flatten(0, 1) * scaling).softmax(-1)


def attended_columns(layer: SelectiveLayer, choice: Choice, fetched: Fetched) -> list[torch.Tensor]:
    """For each row, or each key head that chooses for itself: positions fetched for a choice, ascending, then the
    tail's."""
    history, places = layer.history, fetched.of_chosen(layer.history.positions(choice.units))
    there = places >= 0 if fetched.valid is None else fetched.valid & (places >= 0)
    latest = np.arange(history.length - history.recent.shape[1], history.length)
    return [
        torch.from_numpy(np.concatenate([np.sort(own[some]), latest])) for own, some in zip(places, there, strict=True)
    ]
