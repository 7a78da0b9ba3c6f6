"""The configuration of `SpecCache`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ...config import SelectiveConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class SpecConfig(SelectiveConfig):
    """The fields of SpeCache, in addition to those of every selective cache. A step attends to every token;
    `num_selected`, `num_sinks` and `num_recent` count those in full precision."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectiveConfig.stored_format, "bits", "quant_group")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectiveConfig.kept_on_open, "bits", "quant_group")

    num_selected: int = 64
    """The k of top-k: tokens a key head attends to in full precision, besides the first and latest ones. 0: nothing is
    fetched, and the first tokens are read from the copy, too."""
    num_recent: int = 64
    """Latest tokens, in memory in full precision; in addition, up to `quant_group` tokens wait to be quantised."""
    group_size: int | None = None
    """Tokens a record. None: 4, or `quant_group` with `engine="memory"`. That engine reads a saved context into host
    memory when it is opened, and then copies only the selected entries of a record."""
    reuse_capacity: int = 0
    """Tokens whose records stay in memory after a read. Entries that are selected again stay in any case."""
    look_ahead: bool | None = False
    """Always False, because the speculative token predicts the reads. True raises `ConfigError`."""
    bits: int = 2
    """Bits of an element of the copy: 1, 2 or 4."""
    quant_group: int = 64
    """Elements that share a scale and a zero point: 32 or 64."""
    speculative: bool = True
    """Decode a guess of the next token with each token. The next step's tokens are the top-k by the sum of the guess's
    attention, the token's, and the token's shifted by one; resident entries are weighted x4. False: select by the
    token's own attention, fetch, and attend again."""
    top_up: bool | str = False
    """In addition to a guess, fetch within the step the top-k that the guess missed. This stops after the first steps
    if such reads take longer than the rest of a step. "always": it never stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("bits", (1, 2, 4))
        self._one_of("quant_group", (32, 64))
        self._one_of("speculative", (True, False))
        self._one_of("top_up", (True, False, "always"))
        if self.group_size is None:
            whole_groups = min(self.quant_group, 1 << self.least_block.bit_length() - 1)  # blocks read complete groups
            object.__setattr__(self, "group_size", whole_groups if self.engine == "memory" else 4)
        if self.group_size is not None and self.quant_group % self.group_size:
            raise ConfigError(
                f"group_size must divide quant_group ({self.quant_group}), got {self.group_size}: use group_size=4"
            )
        if self.look_ahead:
            raise ConfigError(
                f"look_ahead must be False in a {type(self).__name__}, got {self.look_ahead}: leave it out, because "
                "the speculative token predicts the reads"
            )
        object.__setattr__(self, "look_ahead", False)

    def _check_selection(self) -> None:
        self._at_least("num_selected", 0)

    @property
    def leave_together(self) -> int:
        return self.quant_group

    @property
    def records_apart(self) -> bool:
        return self.engine == "memory"

    @cached_property
    def chosen(self) -> int:
        """Entries a key head in full precision, besides the latest ones: top-k and sinks."""
        return self.num_selected and self.num_selected + self.num_sinks
