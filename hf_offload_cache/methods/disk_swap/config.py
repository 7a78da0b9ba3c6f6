"""The fields of `DiskSwapCache`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...config import SelectiveConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class DiskSwapConfig(SelectiveConfig):
    """KVSwap's fields (paper sections 3.2 to 3.4)."""

    stored_format: ClassVar[tuple[str, ...]] = (
        *SelectiveConfig.stored_format, "summary_bytes", "rank", "summary_dtype",
        "adapter",
    )  # fmt: skip
    of_a_run: ClassVar[tuple[str, ...]] = (*SelectiveConfig.of_a_run, "adapter")
    kept_on_open: ClassVar[tuple[str, ...]] = (
        *SelectiveConfig.kept_on_open, "summary_bytes", "rank", "summary_dtype",
    )  # fmt: skip
    not_beside_exact: ClassVar[tuple[str, ...]] = ("adapter",)

    summary_bytes: int | None = None
    """Bytes a token and layer of the compact keys, where they are coded. None: a sixteenth of a key in 16 bits, from 8
    to 128."""
    rank: int | None = None
    """Components of a compact key that is truncated, as in the paper. None: a quarter of the joined key width, from 16
    to 160."""
    summary_dtype: str | None = None
    """"coded": compact keys whose components have 8, 4, 2 or no bits, as the prompt says; "int8", "bfloat16",
    "float32": truncated ones of that type. None: coded, or "int8" where `rank` or an `adapter` is given."""
    adapter: str | None = None
    """Path of a calibrated adapter (safetensors). None: from the prompt's own keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            self._at_least("rank", 1)
        self._one_of("summary_dtype", (None, "coded", "int8", "bfloat16", "float32"))
        if self.summary_bytes is not None:
            self._at_least("summary_bytes", 4)
            if self.summaries != "coded":
                raise ConfigError(
                    f"summary_bytes is for coded compact keys, got {self.summary_bytes!r} beside {self.summaries} ones:"
                    " leave it out, or leave out rank, adapter and summary_dtype"
                )
        if self.summary_dtype == "coded" and (self.rank is not None or self.adapter is not None):
            raise ConfigError(
                'summary_dtype="coded" finds its own components, got a rank or an adapter beside it: leave them out, '
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
        """What `summary_dtype` comes to."""
        if self.summary_dtype is not None:
            return self.summary_dtype
        return "int8" if self.rank is not None or self.adapter is not None else "coded"
