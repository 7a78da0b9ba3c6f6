"""Tools to test stores, histories and predictors with, ours and third parties': conformance suites, and wrappers of
stores that misbehave on purpose.

Importing this needs no pytest; running `StoreTests` or `FreezableStoreTests` does.
"""

from .attention import stream_attention_reference as stream_attention_reference
from .freezable_store_tests import FreezableStoreTests
from .histories import HistoryTests
from .predictors import PredictorTests
from .store_tests import RECORD_BYTES, StoreTests, file_maps, fill, open_descriptors, pattern, read
from .throttled import DeviceClock, ThrottledStore
from .wrappers import FaultyStore, LatencyStore, WrapperStore

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
