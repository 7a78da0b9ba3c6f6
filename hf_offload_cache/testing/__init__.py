"""Tools to test stores with, ours and third parties': a conformance suite and wrappers that misbehave on purpose.

Importing this needs no pytest; running `StoreTests` or `FreezableStoreTests` does.
"""

from .freezable_store_tests import FreezableStoreTests
from .sample_records import RECORD_BYTES, file_maps, fill, open_descriptors, pattern, read
from .store_tests import StoreTests
from .throttled import DeviceClock, ThrottledStore
from .wrappers import FaultyStore, LatencyStore, WrapperStore

__all__ = [
    "RECORD_BYTES",
    "DeviceClock",
    "FaultyStore",
    "FreezableStoreTests",
    "LatencyStore",
    "StoreTests",
    "ThrottledStore",
    "WrapperStore",
    "file_maps",
    "fill",
    "open_descriptors",
    "pattern",
    "read",
]
