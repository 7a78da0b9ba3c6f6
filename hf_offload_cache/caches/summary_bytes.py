"""What bytes of compact keys are worth against slots, by what was measured: how a budget is divided, and when it is too
small."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from ..memory.fit import LOST_BY
from ..predictors.coding import default_summary_bytes, most_bytes
from ..predictors.low_rank_keys import default_rank
from .disk_swap_config import DiskSwapConfig

LOST = (
    (0.0, 1.0), (0.031, 0.6), (0.042, 0.4), (0.0625, 0.12), (0.083, 0.1), (0.104, 0.04), (0.125, 0.001), (0.188, 0.0),
)  # fmt: skip
"""Bytes of a code over the elements of a joined key -> facts lost of those that the full cache finds: SmolLM2-135M,
prompts of 4,000 and 7,000 tokens, 400 of them selected, 16 to 79 facts a value; but for those that were lost with the
most bytes too, and smoothed where more bytes lost more. Another model has another curve."""
HITS = ((0.0, 0.0), (0.28, 0.29), (0.52, 0.49), (0.76, 0.66), (1.0, 0.80), (1.5, 0.87), (2.0, 0.89), (4.0, 0.92))
"""Slots over the units of one selection -> hit rate: the same model, on text."""
RETRIEVES = 0.1
"""Bytes over elements below which facts get lost: worth a warning."""
RETRIEVES_TRUNCATED = 0.2
"""The same, of truncated keys."""
_SPEED = 0.1
"""What a hit rate of 1 is worth, in facts: a step without any takes about half as long again."""
QUEUE_HALVED = 0.004
"""What a write queue of half the size costs, in facts: a prefill waits for the disk more often."""
_SHARES = (1 / 4, 1 / 6, 1 / 8, 5 / 48, 1 / 12, 1 / 16, 5 / 96, 1 / 24, 1 / 32)
"""Bytes over elements that are tried."""


def sizes_to_try(key_width: int) -> list[int]:
    """Bytes of a code that are worth trying, ascending."""
    most = most_bytes(key_width)
    return sorted({max(4, min(most, round(share * key_width))) for share in _SHARES})


def worth(summary_bytes: int, key_width: int, slots: float, selected: float) -> float:
    """How good a cache with codes of so many bytes and slots for so many tokens is, to be compared."""
    return _SPEED * _at(slots / max(1, selected), HITS) - _at(summary_bytes / key_width, LOST)


def shortfalls(config: DiskSwapConfig, key_width: int, given: Iterable[str]) -> list[str]:
    """What of `config` loses facts, for keys of `key_width` elements: compact keys that are too short; but not a rank
    that the user chose, which is `given`."""
    chosen, found = set(given), []
    if config.summaries == "coded":
        name, most = "compact keys", most_bytes(key_width)
        nbytes = min(config.summary_bytes or default_summary_bytes(key_width), most)
        needed = min(math.ceil(RETRIEVES * key_width), most)
    else:
        name = f"compact keys truncated to a rank, in {config.summaries},"
        itemsize, usual_rank = getattr(torch, config.summaries).itemsize, default_rank(key_width)
        nbytes = (config.rank or usual_rank) * itemsize
        needed = min(math.ceil(RETRIEVES_TRUNCATED * key_width), usual_rank * itemsize)
    if nbytes < needed and (config.summaries == "coded" or not chosen & {"rank", "adapter"}):
        found.append(
            f"{name} of {nbytes} bytes a token lose facts that the full cache finds; with {needed} hardly any was lost "
            f"{LOST_BY}"
        )
    return found


def _at(place: float, curve: tuple[tuple[float, float], ...]) -> float:
    places, values = np.array(curve).T
    return float(np.interp(place, places, values))
