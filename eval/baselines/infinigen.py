"""InfiniGen on disk: tokens chosen by a few kept dimensions of their keys, head by head or for all heads."""

from __future__ import annotations

import torch

from .selective import BaselineCache, BaselineLayer


def kept_dimensions(moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
    """Projections (P, W, rank) that keep the `rank` dimensions of largest magnitude (P, W), in order of position."""
    kept = magnitude.topk(rank, 1)[1].sort(1)[0]
    return torch.nn.functional.one_hot(kept, magnitude.shape[1]).transpose(1, 2).float().contiguous()


class GroupedInfiniGenLayer(BaselineLayer):
    """KVSwap, section 4.2: "InfiniGen* adds head aggregation from our prediction strategy"; "InfiniGen*+ru further
    incorporates our KV reuse strategy", which here is `reuse_capacity`. One record is one token, for all heads."""

    directions = staticmethod(kept_dimensions)


class InfiniGenLayer(GroupedInfiniGenLayer):
    """Lee et al. 2024 ("InfiniGen", sections 4.2 and 4.3): partial keys made of the dimensions with the largest sums of
    absolute values; KVSwap, sections 3.3 ("Compared with prior prediction method") and 4.2.

    The paper sums over queries and keys after it has turned the weights by an offline decomposition (its "skewing").
    Here the prompt's keys decide, since a cache sees no weights. Partial keys are in the summary's type, 8 bits, where
    the paper has 16: that favours the baseline. One record is one token of one key head, rounded up to the device's
    block.
    """

    heads_apart = True


class InfiniGenCache(BaselineCache):
    """InfiniGen on disk, without reuse."""

    layer_class = InfiniGenLayer


class GroupedInfiniGenCache(BaselineCache):
    """InfiniGen*; with `reuse_capacity` above 0, InfiniGen*+ru."""

    layer_class = GroupedInfiniGenLayer
