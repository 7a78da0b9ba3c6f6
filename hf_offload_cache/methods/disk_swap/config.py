"""The configuration of `DiskSwapCache`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...config import EntryBitsConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class DiskSwapConfig(EntryBitsConfig):
    """The fields of KVSwap (sections 3.2 to 3.4), in addition to those of every selective cache."""

    stored_format: ClassVar[tuple[str, ...]] = (
        *EntryBitsConfig.stored_format, "heads_apart", "summary_bytes", "rank", "summary_dtype", "adapter",
    )  # fmt: skip
    added_later: ClassVar[tuple[str, ...]] = (*EntryBitsConfig.added_later, "heads_apart")
    of_a_run: ClassVar[tuple[str, ...]] = (*EntryBitsConfig.of_a_run, "adapter")
    kept_on_open: ClassVar[tuple[str, ...]] = (
        *EntryBitsConfig.kept_on_open, "heads_apart", "summary_bytes", "rank", "summary_dtype",
    )  # fmt: skip
    not_with_exact: ClassVar[tuple[str, ...]] = ("adapter",)
    sets_memory: ClassVar[tuple[str, ...]] = (*EntryBitsConfig.sets_memory, "adapter")

    heads_apart: bool = False
    """Each key head has its own records, and attends to its own choice of groups. The reads of a step are multiplied by
    the number of key heads, and each has 4 KiB or more. False: one choice serves all heads, as in the paper."""
    summary_bytes: int | None = None
    """Bytes of a coded compact key, for each token and layer. None: a sixteenth of a key in 16 bits, from 8 to 128."""
    rank: int | None = None
    """Components r of a compact key that is truncated, as in section 3.2. None: a quarter of the joined key width, from
    16 to 160."""
    summary_dtype: str | None = None
    """"coded": each component of a compact key gets 8, 4, 2 or no bits, fitted to the prompt. "int8", "bfloat16" or
    "float32": truncated keys of that type. None: "coded", or "int8" if `rank` or `adapter` is given."""
    remainder: bool = True
    """Estimate what the best groups that a step does not select would add to its attention, from their compact keys.
    False: they are dropped, as in the paper."""
    adapter: str | None = None
    """Path of a calibrated adapter (safetensors). None: the adapter is fitted to the prompt's keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("heads_apart", (True, False))
        self._one_of("remainder", (True, False))
        if self.rank is not None:
            self._at_least("rank", 1)
        self._one_of("summary_dtype", (None, "coded", "int8", "bfloat16", "float32"))
        if self.summary_bytes is not None:
            self._at_least("summary_bytes", 4)
            if self.summaries != "coded":
                raise ConfigError(
                    f"summary_bytes needs coded compact keys, got {self.summary_bytes!r} with {self.summaries} ones: "
                    "leave it out, or leave out rank, adapter and summary_dtype"
                )
        if self.summary_dtype == "coded" and (self.rank is not None or self.adapter is not None):
            raise ConfigError(
                'summary_dtype="coded" fits its own components, but a rank or an adapter was given: leave them out, '
                "or use summary_bytes"
            )
        if self.adapter is not None and not isinstance(self.adapter, str | Path):
            raise ConfigError(f"adapter must be a path or None, got {type(self.adapter).__name__}")
        if self.exact and self.adapter is not None:
            raise ConfigError(
                f"exact={self.exact!r} attends to all tokens, so adapter has no effect: leave it out, or use "
                "exact=False"
            )

    @property
    def summaries(self) -> str:
        """`summary_dtype`, with its default resolved."""
        if self.summary_dtype is not None:
            return self.summary_dtype
        return "int8" if self.rank is not None or self.adapter is not None else "coded"
