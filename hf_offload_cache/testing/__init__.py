"""Tests for stores, histories and predictors of this library and others, and stores that misbehave on purpose.

Importing this needs no pytest; running `StoreTests` or `FreezableStoreTests` does.
"""

from .attention import stream_attention_reference as stream_attention_reference
from .histories import HistoryTests
from .predictors import PredictorTests
from .store_tests import (
    RECORD_BYTES,
    FreezableStoreTests,
    StoreTests,
    file_maps,
    fill,
    open_descriptors,
    pattern,
    read,
)
from .wrappers import DeviceClock, FaultyStore, LatencyStore, ThrottledStore, WrapperStore

__all__ = [
    "RECORD_BYTES",
    "DeviceClock",
    "FaultyStore",
    "FreezableStoreTests",
    "HistoryTests",
    "LatencyStore",
    "PredictorTests",
    "StoreTests",
    "ThrottledStore",
    "WrapperStore",
    "file_maps",
    "fill",
    "open_descriptors",
    "pattern",
    "read",
]
