"""Fetch for the next step only the top-k of the speculative token's attention (SpeCache, section 3.3)."""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.methods.spec import SpecCache, SpecLayer


class GuessAloneLayer(SpecLayer):
    """A layer of `GuessAloneCache`."""

    def shares_of(self, shares: list[torch.Tensor]) -> torch.Tensor:
        return shares[-1]

    def wanted_of(self, shares: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        assert self.predictor is not None
        return self.predictor.most(shares, visible, self.config.chosen)


class GuessAloneCache(SpecCache):
    """`SpecCache` that selects by the guess only. Resident entries get no extra weight."""

    layer_class: ClassVar[type[OffloadLayer]] = GuessAloneLayer
