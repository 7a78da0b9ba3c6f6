"""InfiniGen* and InfiniGen*+ru: kept dimensions as InfiniGen's, one choice and one record a token for all heads."""

from __future__ import annotations

from typing import Any

import torch

from .infinigen import kept_dimensions
from .selective import SelectiveCache, SelectiveLayer


class GroupedInfiniGenLayer(SelectiveLayer):
    """KVSwap, section 4.2: "InfiniGen* adds head aggregation from our prediction strategy"; "InfiniGen*+ru further
    incorporates our KV reuse strategy", which here is `reuse_capacity`."""

    def directions(self, moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
        return kept_dimensions(magnitude, rank)


class GroupedInfiniGenCache(SelectiveCache):
    """InfiniGen*; with `reuse_capacity` above 0, InfiniGen*+ru."""

    layer_class = GroupedInfiniGenLayer

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {"group_size": 1, "reuse_capacity": 0, **fields}
        super().__init__(model, path, config, **fields)
