"""Adapters from sample text (KVSwap, section 3.2: "collected during offline parameter tuning")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....model.fingerprint import fingerprint
from ....model.place import inner_model
from ....tuning.fill import ObservedCache, observed
from ....tuning.sample import text_ids
from ..adapter import Adapter
from ..coding import principal_directions, query_moment, roots_of, scaled_directions


class KeyMoments:
    """Second moments of keys, layer by layer, which give an adapter of any rank. Host memory."""

    def __init__(self) -> None:
        self.by_layer: dict[int, torch.Tensor] = {}
        self.of_queries: dict[int, torch.Tensor] = {}

    def add(self, layer_idx: int, keys: torch.Tensor, queries: torch.Tensor | None = None) -> None:
        """Add keys (B, Hk, T, D) of one layer, and their latest queries (B, H, n, D)."""
        if queries is not None:
            seen = query_moment(queries, keys.shape[1]).cpu()
            self.of_queries[layer_idx] = self.of_queries.get(layer_idx, 0) + seen
        flat = keys.detach().transpose(1, 2).flatten(0, 1).flatten(1).float()
        nothing = torch.zeros(flat.shape[1], flat.shape[1], dtype=torch.float32, device="cpu")
        moment = self.by_layer.setdefault(layer_idx, nothing)
        moment += (flat.t() @ flat).cpu()

    def projections(self, rank: int | None) -> dict[int, torch.Tensor]:
        """(Hk D, rank) by layer, most energy first, of scores if queries were added; None: half the width."""
        projections = {}
        for index, moment in self.by_layer.items():
            columns = min(rank or max(1, moment.shape[0] // 2), moment.shape[0])
            queries = self.of_queries.get(index)
            if queries is None:
                projections[index] = principal_directions(moment, columns)
            else:
                projections[index] = scaled_directions(moment, roots_of(queries), columns)
        return projections

    def energy(self, ranks: list[int]) -> torch.Tensor:
        """(layers, ranks), float64: the share of each layer's energy in the first columns."""
        shares = []
        for moment in self.by_layer.values():
            values = torch.linalg.eigvalsh(moment.double()).flip(-1).clamp_min(0)
            kept = values.cumsum(0) / values.sum()
            shares.append(torch.stack([kept[min(rank, len(kept)) - 1] for rank in ranks]))
        return torch.stack(shares)


def calibrate(model: Any, texts: Iterable[Any], tokenizer: Any = None, rank: int | None = None) -> Adapter:
    """An adapter from the right singular vectors of the keys that `model` computes for `texts`, layer by layer, in the
    metric of their queries: the best approximation of scores at any rank. The paper uses keys only.

    Args:
        model: a PreTrainedModel; runs forward on its own device, one text at a time.
        texts: token ids (T,) or (B, T) as tensors, or strings (then `tokenizer` is needed).
        rank: columns to keep; None: half the joined key width, so that a later `rank` can cut.

    Writes nothing; `Adapter.save(path)` does. Holds the keys of one text in memory.
    """
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}: use rank=1 or None")
    inner = inner_model(model)
    moments = KeyMoments()
    for text in texts:
        ids = text_ids(text, tokenizer)
        with torch.inference_mode(), ObservedCache(inner, exact=True, engine="memory") as cache:
            inner(input_ids=ids.reshape(-1, ids.shape[-1]).to(inner.device), past_key_values=cache)
            for layer in cache.offloaded:
                moments.add(layer.layer_idx, layer.whole()[0], observed(layer))
    if not moments.by_layer:
        raise ValueError("texts must hold at least one text, got none")
    return Adapter(moments.projections(rank), fingerprint(inner))
