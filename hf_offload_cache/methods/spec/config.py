"""What a user may set of `SpecCache`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ...config import SelectiveConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class SpecConfig(SelectiveConfig):
    """The fields that all caches have, and those of the low-bit copy. Every token is attended to: what `num_selected`
    and the others count is what comes as it was stored."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectiveConfig.stored_format, "bits", "quant_group")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectiveConfig.kept_on_open, "bits", "quant_group")

    num_selected: int = 64
    """Tokens a key head that are attended to as they were stored, beside the first and the latest ones. 0: nothing is
    fetched, and the first ones are as the copy has them, too."""
    num_recent: int = 64
    """Latest tokens, which are in memory as they were stored; up to `quant_group` more until they are quantised."""
    group_size: int | None = None
    """Tokens a record. None: 4, or with `engine="memory"`, where a saved context is read into host memory when it is
    opened, and of a record no more is taken than is wanted of it, `quant_group`."""
    reuse_capacity: int = 0
    """Tokens of records read before that stay in memory; what is chosen again does so anyhow."""
    look_ahead: bool | None = False
    """Always False: the speculative token looks ahead."""
    bits: int = 2
    """Of an element of the copy: 1, 2 or 4."""
    quant_group: int = 64
    """Elements that share a scale: 32 or 64."""
    speculative: bool = True
    """Run a guess of the next token beside each token, and fetch for the next step what both attend to most, and what
    follows that of the token. False: fetch what the token itself attends to most, and attend again."""
    top_up: bool | str = False
    """Beside a guess: fetch within the step what its token attends to most and the guess did not, where the store is
    fast enough for that to take no longer than the rest of a step, which the first steps show; "always": anywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("bits", (1, 2, 4))
        self._one_of("quant_group", (32, 64))
        self._one_of("speculative", (True, False))
        self._one_of("top_up", (True, False, "always"))
        if self.group_size is None:
            object.__setattr__(self, "group_size", self.quant_group if self.engine == "memory" else 4)
        if self.group_size is not None and self.quant_group % self.group_size:
            raise ConfigError(
                f"group_size must divide quant_group ({self.quant_group}), got {self.group_size}: use group_size=4"
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
        """Entries a key head that are held as they were stored, beside the latest ones."""
        return self.num_selected and self.num_selected + self.num_sinks
