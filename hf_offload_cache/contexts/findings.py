"""What `verify` says about a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["damaged", "missing", "marked", "foreign", "exposed"]


@dataclass(frozen=True)
class Finding:
    """A fault of a context.

    Attributes:
        kind: "damaged": not as it was written. "missing": no longer present. "marked": a read through a library found
            damage, which may be undone since. "foreign": of no context, or not of this one. "exposed": others may read
            it.
        file: its name in the context; "." the directory itself.
        part: the part it belongs to: "manifest", "cache", "layer 3"; empty if it belongs to none.
        records: numbers of the layer's damaged records, as read errors name them; all of them, or the first million of
            a file that cannot be checked at all.
        problem: description of the fault.
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
        """Whether everything that was written is present and unchanged; the context may still be marked, exposed, or
        contain foreign files."""
        return not any(finding.kind in ("damaged", "missing") for finding in self.findings)
