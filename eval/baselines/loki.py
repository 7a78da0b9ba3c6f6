"""Loki on disk: tokens chosen head by head, by the leading principal components of each head's keys."""

from __future__ import annotations

import torch

from .selective import BaselineCache, BaselineLayer


def leading_directions(moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors (P, W, rank) of each second moment (P, W, W), most energy first."""
    return torch.linalg.eigh(moment.float())[1][..., -rank:].flip(-1).contiguous()


class LokiLayer(BaselineLayer):
    """Singhania et al. 2024 ("Loki", section 4): keys turned to their principal components, of which the first rank
    the tokens; as KVSwap's section 4.2 has it, inside InfiniGen's way of loading. The components come of the prompt's
    own keys after the rotary embedding, where the paper calibrates them beforehand."""

    heads_apart = True
    directions = staticmethod(leading_directions)


class LokiCache(BaselineCache):
    """Loki on disk, without reuse. One record is one token of one key head, rounded up to the device's block."""

    layer_class = LokiLayer
