"""What a user may set of `AbstractTreeCache`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..config import SelectiveConfig
from ..errors import ConfigError


@dataclass(frozen=True)
class AbstractTreeConfig(SelectiveConfig):
    """The fields that all caches have, and those of chunks and of what is looked into. Sizes in tokens a sequence and
    layer."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectiveConfig.stored_format, "chunk_size", "abstracts")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectiveConfig.kept_on_open, "abstracts")

    num_selected: int | None = 400  # type: ignore[assignment]
    """Tokens attended beyond sinks and latest ones. None: `selected_share` of those that are held."""
    selected_share: float = 0.1
    """Of the tokens held, those that are attended to where `num_selected` is None."""
    chunk_size: int | None = None
    """Tokens a chunk, a power of two: what has an abstract, and is a record on disk. None: 64."""
    abstracts: str | None = None
    """Where the abstracts of chunks are: "memory", a 64th of keys and values at chunks of 64; "disk", from where they
    are read for every query. None: in memory, or where `for_budget` finds that they fit."""
    num_opened: int | None = None
    """Tokens of the chunks that a step brings and looks into, among which it finds those that it attends to. None: two
    and a half times as many as it attends to."""

    def __post_init__(self) -> None:
        if self.chunk_size is None:
            object.__setattr__(self, "chunk_size", 64 if self.group_size is None else self.group_size)
        self._at_least("chunk_size", 2)
        self._at_most("chunk_size", 1024)
        assert self.chunk_size is not None
        if self.chunk_size & (self.chunk_size - 1):
            nearest = 1 << self.chunk_size.bit_length() - 1
            raise ConfigError(
                f"chunk_size must be a power of two, since chunks are split in halves, got {self.chunk_size}: use "
                f"chunk_size={nearest}"
            )
        if self.group_size not in (None, self.chunk_size):
            raise ConfigError(
                f"group_size must be chunk_size ({self.chunk_size}), since a chunk is a record, got {self.group_size}: "
                f"leave it out"
            )
        object.__setattr__(self, "group_size", self.chunk_size)
        if self.abstracts is None:
            object.__setattr__(self, "abstracts", "memory")
        super().__post_init__()

    def _check_selection(self) -> None:
        share = self.selected_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"selected_share must be a number above 0, at most 1, got {share!r}: use 0.1")
        self._one_of("abstracts", ("memory", "disk"))
        if self.num_selected is not None:
            super()._check_selection()
        if self.num_opened is not None:
            self._at_least("num_opened", self.num_selected or 1)

    def attended(self, held: int) -> int:
        return math.ceil(self.selected_share * held) if self.num_selected is None else self.num_selected

    def brought(self, held: int) -> int:
        wanted = self.attended(held)
        return wanted * 5 // 2 if self.num_opened is None else max(wanted, self.num_opened)
