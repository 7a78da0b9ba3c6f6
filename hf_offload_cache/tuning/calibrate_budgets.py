"""Layer budgets from sample text, for those who would rather not have them measured on every prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..caches.disk_swap import DiskSwapCache, DiskSwapLayer
from ..model.inner_model import inner_model
from ..predictors.layer_budgets import MOST, spread


def calibrate_budgets(
    model: Any, texts: Iterable[Any], tokenizer: Any = None, num_selected: int = 400, **fields: Any
) -> tuple[int, ...]:
    """`layer_budgets` for a `DiskSwapCache`: tokens for each offloaded layer, `num_selected` on the mean.

    Args:
        model: a PreTrainedModel; runs forward on its own device, one text at a time.
        texts: token ids (T,) or (B, T) as tensors, or strings (then `tokenizer` is needed). As long as the contexts
            that the budgets are for: what a layer needs grows with them.
        num_selected: of the cache that the budgets are for.
        **fields: further fields of that cache which change what is selected from, e.g. group_size, rank, adapter.

    Raises `ValueError` where no text is long enough to choose from. Nothing is written.
    """
    inner = inner_model(model)
    curves: list[np.ndarray] = []
    group = 1
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer is needed when texts are strings; pass it, or token ids")
            text = tokenizer(text, return_tensors="pt").input_ids
        ids = torch.as_tensor(text)
        settings = {"engine": "memory", **fields, "num_selected": num_selected, "layer_budgets": "measured"}
        with torch.inference_mode(), DiskSwapCache(inner, **settings) as cache:
            inner(input_ids=ids.reshape(-1, ids.shape[-1]).to(inner.device), past_key_values=cache, logits_to_keep=1)
            layers = [layer for layer in cache.offloaded if isinstance(layer, DiskSwapLayer)]
            group = max(layer.history.form.group_size for layer in layers)
            found = [layer.density(MOST * -(-num_selected // group)) for layer in layers]
        known = [curve for curve in found if curve is not None]
        if len(known) == len(found):
            curves.append(np.stack(known))
    if not curves:
        raise ValueError(
            f"texts must hold at least one text of which num_selected={num_selected} tokens are a choice: "
            "give longer ones, several times num_selected"
        )
    return tuple(int(groups) * group for groups in spread(np.mean(curves, 0), -(-num_selected // group)))
