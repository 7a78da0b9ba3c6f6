"""How a record's replica in 4 bits lies on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.int4 import Int4Layout
from ..stores.base import DEVICE_BLOCK
from .record_format import RecordFormat

_GROUPS = (64, 32)
"""Elements a group: fewer where they take no more of the disk."""


@dataclass(frozen=True)
class ReplicaFormat:
    """One replica a record of a `RecordFormat` (LeoAM, section 4.4: INT4, group-wise), padded to the device's block.
    A group is of one token, and of its keys or its values alone."""

    layout: Int4Layout
    record_bytes: int

    @classmethod
    def of(cls, form: RecordFormat) -> ReplicaFormat | None:
        """None where a replica is no smaller than the record, so that none pays."""
        best: ReplicaFormat | None = None
        for group in _GROUPS:
            entry = Int4Layout.of(group, form.key_width, form.entry_width - form.key_width)
            if entry is not None:
                layout = Int4Layout(form.payload_width, entry.group)
                size = -(-layout.nbytes // DEVICE_BLOCK) * DEVICE_BLOCK
                if size <= (form.record_bytes - 1 if best is None else best.record_bytes):
                    best = cls(layout, size)
        return best
