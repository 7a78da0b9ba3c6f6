"""Devices that a disk here can stand in for, slowed down; where each figure comes from."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from hf_offload_cache.core import OffloadCache
from hf_offload_cache.stores import Store
from hf_offload_cache.testing import DeviceClock, ThrottledStore


@dataclass(frozen=True)
class Profile:
    """A device: bytes a second of large reads, seconds from a request to its first byte, requests under way at once."""

    name: str
    bytes_per_second: float
    seconds_per_request: float
    queue_depth: int


EMMC = Profile("emmc", 250e6, 0.15e-3, 4)
"""250 MB/s, and below 6% of it at 512 bytes: KVSwap, section 2.3 and figure 2 (0.15 ms and depth 4 give 5.4%). At 4 KiB
they give 98 MB/s; InfiniGen*'s 1.7 tokens/s in table 4 (400 tokens of 4 KiB in 32 layers) is 90 MB/s."""

UFS = Profile("ufs", 1e9, 0.1e-3, 8)
"""Assumed: half a UFS 3.1's sequential rate, 0.1 ms, and a depth that gives 4% of it at 512 bytes, below the 6% that
KVSwap's section 2.3 says of all its devices."""

SD = Profile("sd", 90e6, 0.5e-3, 1)
"""Assumed: a UHS-I card (104 MB/s on the bus at most); 0.5 ms one at a time are 2,000 reads a second, between the 1,500
and the 4,000 that the SD Association's application classes A1 and A2 ask for."""

PROFILES: dict[str, Profile | None] = {"own": None, "emmc": EMMC, "ufs": UFS, "sd": SD}
"""Name -> device; "own" is the disk at hand as it is."""


def throttle(cache: OffloadCache, profile: Profile | None) -> None:
    """Have every store that `cache` opens from now on, before the first `update`, read no faster than one device of
    `profile`; None: as it is. Writes are not slowed."""
    if profile is None:
        return
    clock, storage, original = DeviceClock(*astuple(profile)[1:]), cache.storage, cache.storage.open_store

    def open_store(*args: Any, **kwargs: Any) -> Store:
        inner = original(*args, **kwargs)
        store = ThrottledStore(inner, clock)
        storage.stores[storage.stores.index(inner)] = store
        return store

    storage.open_store = open_store  # type: ignore[method-assign]
