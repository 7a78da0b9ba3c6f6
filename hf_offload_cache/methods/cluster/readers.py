"""Who has read records that a history writes anew."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class Readers(Protocol):
    """What a history tells them, on the thread that runs the model."""

    def stale(self, records: np.ndarray) -> None:
        """These records are about to be written anew: no read of them may be under way. What was read of them stays
        valid where the writing fails."""

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None:
        """Distinct `records` (n,) hold `payloads` (n, payload width), a view that is valid until the call ends; those
        that are `gone` hold nothing."""
