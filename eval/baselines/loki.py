"""Loki on disk: tokens chosen head by head, by the leading principal components of each head's keys."""

from __future__ import annotations

import torch

from .per_head import PerHeadCache, PerHeadLayer


def leading_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors (P, W, rank) of each second moment (P, W, W), most energy first."""
    return torch.linalg.eigh(moment.float())[1][..., -rank:].flip(-1).contiguous()


class LokiLayer(PerHeadLayer):
    """Singhania et al. 2024 ("Loki", section 4): keys turned to their principal components, of which the first rank
    the tokens; as KVSwap's section 4.2 has it, inside InfiniGen's way of loading. The components come of the prompt's
    own keys after the rotary embedding, where the paper calibrates them beforehand."""

    def directions(self, moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
        return leading_directions(moment, rank)


class LokiCache(PerHeadCache):
    """Loki on disk, without reuse."""

    layer_class = LokiLayer
