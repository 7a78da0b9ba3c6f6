"""Adapters from sample text (KVSwap, section 3.2: "collected during offline parameter tuning")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..adapter import Adapter
from ..attach import inner_model
from ..cache import OffloadCache
from ..fingerprint import fingerprint
from ..predictors.low_rank import principal_directions


def calibrate(model: Any, texts: Iterable[Any], tokenizer: Any = None, rank: int | None = None) -> Adapter:
    """The right singular vectors of the keys that `model` makes of `texts`, layer by layer.

    Args:
        model: a PreTrainedModel; runs forward on its own device, one text at a time.
        texts: token ids (T,) or (B, T) as tensors, or strings (then `tokenizer` is needed).
        rank: columns to keep; None: half the joined key width, so that a later `rank` can cut.

    Nothing is written; `Adapter.save(path)` does. Holds the keys of one text in memory.
    """
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}: use rank=1 or None")
    inner = inner_model(model)
    moments: dict[int, torch.Tensor] = {}
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer is needed when texts are strings; pass it, or token ids")
            text = tokenizer(text, return_tensors="pt").input_ids
        ids = torch.as_tensor(text)
        with torch.inference_mode(), OffloadCache(inner, exact=True, engine="memory") as cache:
            inner(input_ids=ids.reshape(-1, ids.shape[-1]).to(inner.device), past_key_values=cache)
            for layer in cache.offloaded:
                flat = layer.history.whole()[0].transpose(1, 2).flatten(0, 1).flatten(1).float()
                moment = moments.setdefault(layer.layer_idx, torch.zeros(flat.shape[1], flat.shape[1]))
                moment += (flat.t() @ flat).cpu()
    if not moments:
        raise ValueError("texts must hold at least one text, got none")
    projections = {
        index: principal_directions(moment, rank or max(1, moment.shape[0] // 2)) for index, moment in moments.items()
    }
    return Adapter(projections, fingerprint(inner))
