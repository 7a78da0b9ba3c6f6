"""What `verify` says about a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["damaged", "missing", "marked", "foreign", "exposed"]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a context.

    Attributes:
        kind: "damaged": not what was written. "missing": no longer there. "marked": a read through a library found
            damage, which may be undone since. "foreign": of no context, or not of this one. "exposed": others may read
            it.
        file: its name in the context; "." the directory itself.
        part: what it belongs to: "manifest", "cache", "layer 3"; empty for what belongs to nothing.
        records: numbers of the layer's records that are damaged, as errors of reads name them; all that are,
            or the first million of a file that cannot be checked at all.
        problem: what is wrong, in words.
    """

    kind: Kind
    file: str
    part: str
    problem: str
    records: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` read, and what it found; in the order of the manifest, then of the names."""

    path: str
    findings: tuple[Finding, ...]
    files: int
    """Files that were read."""
    records: int
    """Records that were checked."""
    bytes: int
    """Bytes that were read."""

    @property
    def whole(self) -> bool:
        """Everything that was written is there and unchanged; it may still be marked, exposed, or have company."""
        return not any(finding.kind in ("damaged", "missing") for finding in self.findings)
