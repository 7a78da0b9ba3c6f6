"""Fields of a `SpecCache` on a tiny model."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"num_recent": 8, "quant_group": 32, "group_size": 4, "block_tokens": 64}
ALL: dict[str, Any] = {**SMALL, "num_selected": 1000}
"""Everything is replaced by what was stored: what `DynamicCache` gives."""
