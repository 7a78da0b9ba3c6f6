"""A complete cache method: pages of 16 tokens, scored by the minimum and the maximum of their keys.

The idea is Quest's (Tang et al. 2024, section 3): for each component of a key, a page keeps the minimum and the maximum
over its tokens. No key in the page can score higher against a query than the sum, over components, of the larger of
query times minimum and query times maximum; pages with the highest bounds are read from the disk and attended to.

    cache = PageCache(model)
    model.generate(**inputs, past_key_values=cache)

    hf-offload-cache generate --cache examples.own_method:PageCache ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_offload_cache.core import SelectiveCache, SelectiveConfig, SelectiveLayer, SummaryPredictor


@dataclass(frozen=True)
class PageConfig(SelectiveConfig):
    """The fields that all caches have; a record on the disk is a page."""

    group_size: int | None = 16


class PagePredictor(SummaryPredictor):
    """Summaries (rows, pages, 2, Hk, D): minimum and maximum of each key head's keys, in the type of the keys."""

    def summarise(self, keys):
        return torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4)

    def importance(self, query, summaries):
        """The share of each page if its tokens scored as high as they can, (rows, pages), summed over heads."""
        grouped = query.states.unflatten(1, (self.form.num_key_heads, -1)).to(summaries.dtype)
        shares = []
        for states, pages in zip(grouped, summaries, strict=True):
            least, most = pages.permute(1, 2, 3, 0)  # (Hk, D, pages)
            bound = (states.clamp(min=0) @ most + states.clamp(max=0) @ least).float()  # (Hk, H / Hk, pages)
            shares.append((bound * query.scaling).softmax(-1).sum((0, 1)))
        return torch.stack(shares)


class PageLayer(SelectiveLayer):
    """A layer that reads the pages with the highest bounds."""

    predictor_class = PagePredictor


class PageCache(SelectiveCache):
    """Prefill is exact; a step of decoding attends to the first tokens, the latest ones, and the best pages."""

    config_class = PageConfig
    layer_class = PageLayer
