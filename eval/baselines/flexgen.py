"""FlexGen: every layer's whole history comes back from the disk in every step."""

from __future__ import annotations

from typing import Any

from hf_offload_cache import DiskSwapCache


class FlexGenCache(DiskSwapCache):
    """Sheng et al. 2023 ("FlexGen"); KVSwap, section 4.2: "the full KV cache is restored layer by layer into memory for
    full attention computation". The next block is read while this one is copied. Not bound by the memory that the
    others have: one layer is in memory at a time, which the account does not count."""

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {"exact": "bitwise", **fields}
        super().__init__(model, path, config, **fields)
