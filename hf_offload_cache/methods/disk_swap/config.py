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
        *SelectiveConfig.kept_on_open, "summary_bytes", "rank", "summary_dtype", "selection", "target_mass",
        "steps_per_selection",
    )  # fmt: skip
    not_beside_exact: ClassVar[tuple[str, ...]] = ("selection", "adapter")

    summary_bytes: int | None = None
    """Bytes a token and layer of the compact keys, where they are coded. None: a sixteenth of a key in 16 bits, from 8
    to 128."""
    rank: int | None = None
    """Components of a compact key that is truncated, as in the paper. None: a quarter of the joined key width, from 16
    to 160."""
    summary_dtype: str | None = None
    """"coded": compact keys whose components have 8, 4, 2 or no bits, as the prompt says; "int8", "bfloat16",
    "float32": truncated ones of that type. None: coded, or "int8" where `rank` or an `adapter` is given, or
    `selection` is "paper"."""
    selection: str = "default"
    """"default": by each group's best token, heads normalised before they are summed; prefetch by look-ahead, corrected
    with the true query.
    "paper": raw sum over heads, the previous layer's input as the query, no correction. "random": a floor to
    compare with."""
    adapter: str | None = None
    """Path of a calibrated adapter (safetensors). None: from the prompt's own keys."""
    layer_budgets: str | tuple[int, ...] = "uniform"
    """How `num_selected` and `reuse_capacity`, which are means over the layers, are spread: "uniform"; "measured": by
    how dense each layer's attention is to the prompt's last queries; or tokens for each offloaded layer."""
    target_mass: float | None = None
    """Share of the estimated attention mass at which a step stops to select, below its layer's budget. None: never."""

    steps_per_selection: int = 1
    """The most steps that attend to one choice of groups: a layer whose query has hardly moved goes on with what it
    chose, and one that has sealed a group chooses anew. 1: every step has its own, as in the paper; with 8 a step took
    a tenth to a fifth less time, and some facts are lost that are found with 1. Only with `selection="default"`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("steps_per_selection", 1)
        if self.rank is not None:
            self._at_least("rank", 1)
        self._one_of("summary_dtype", (None, "coded", "int8", "bfloat16", "float32"))
        self._one_of("selection", ("default", "paper", "random"))
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
        if isinstance(self.layer_budgets, list):  # as JSON gives it
            object.__setattr__(self, "layer_budgets", tuple(self.layer_budgets))
        if isinstance(self.layer_budgets, tuple):
            if not all(isinstance(tokens, int) and tokens >= 1 for tokens in self.layer_budgets):
                raise ConfigError(f"layer_budgets must be whole numbers of at least 1, got {self.layer_budgets!r}")
        else:
            self._one_of("layer_budgets", ("measured", "uniform"))
        mass = self.target_mass
        if mass is not None and not (isinstance(mass, int | float) and 0 < mass <= 1):
            raise ConfigError(f"target_mass must be above 0 and at most 1, got {mass!r}: use 0.95, or None")
        if self.selection == "paper" and self.look_ahead is False:
            raise ConfigError('selection="paper" selects by look-ahead only, got look_ahead=False: leave it out')
        if self.adapter is not None and not isinstance(self.adapter, str | Path):
            raise ConfigError(f"adapter must be a path or None, got {type(self.adapter).__name__}")
        if self.exact and (self.adapter is not None or self.selection != "default"):
            raise ConfigError(
                f"exact={self.exact!r} attends to everything, so adapter and selection have no effect: "
                "leave them out, or use exact=False"
            )

    @property
    def summaries(self) -> str:
        """What `summary_dtype` comes to."""
        if self.summary_dtype is not None:
            return self.summary_dtype
        truncated = self.rank is not None or self.adapter is not None or self.selection == "paper"
        return "int8" if truncated else "coded"

    @property
    def measures_budgets(self) -> bool:
        """Layers' budgets are measured with a prompt's latest queries."""
        return self.layer_budgets == "measured" and self.selection == "default" and not self.exact
