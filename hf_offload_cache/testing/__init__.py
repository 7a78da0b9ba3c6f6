"""Tools to test stores with, ours and third parties': a conformance suite and wrappers that misbehave on purpose.

Importing this needs no pytest; running `StoreTests` does.
"""

from .conformance import StoreTests
from .sample_records import RECORD_BYTES, file_maps, fill, open_descriptors, pattern, read
from .throttled import DeviceClock, ThrottledStore
from .wrappers import FaultyStore, LatencyStore, WrapperStore

__all__ = [
    "RECORD_BYTES",
    "DeviceClock",
    "FaultyStore",
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
