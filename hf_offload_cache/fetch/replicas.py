"""What a fetcher needs of records' smaller replicas."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ..stores.base import Store
from .byte_rows import ByteRows


class Replicas(Protocol):
    """Some records of a history once more, in fewer bytes and less exact."""

    store: Store
    record_bytes: int

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The replica (int64 ids in `store`) of each record, -1: it has none."""

    @property
    def records(self) -> np.ndarray:
        """The records that have one, ascending."""

    def unpack(self, replicas: torch.Tensor, rows: np.ndarray, into: ByteRows, target: np.ndarray) -> None:
        """Payloads of replica `rows[i]` of `replicas` (n, record_bytes) uint8 into row `target[i]` of `into`, on the
        device of both."""

    def forget(self, records: np.ndarray) -> None:
        """These records have none any more."""
