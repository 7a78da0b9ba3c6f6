"""Contexts over a network: a part is streamed and the rest computed, whichever is faster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import line_of as line_of
    from .cells import Cells as Cells
    from .cells import State as State
    from .codec import GROUP as GROUP
    from .codec import LEVELS as LEVELS
    from .codec import ChunkShape as ChunkShape
    from .codec import encode as encode
    from .codec import unpack as unpack
    from .codec import unpacked_bytes as unpacked_bytes
    from .context_server import ContextServer as ContextServer
    from .extras import Extras as Extras
    from .loader import ComputingSpeed as ComputingSpeed
    from .loader import Loader as Loader
    from .plan import Cell as Cell
    from .plan import Costs as Costs
    from .plan import Line as Line
    from .plan import Plan as Plan
    from .plan import meet as meet
    from .plan import staircase as staircase
    from .sparse_prefill import BLOCK as BLOCK
    from .sparse_prefill import ActiveBlocks as ActiveBlocks
    from .sparse_prefill import SparsePrefill as SparsePrefill
    from .sparse_prefill import attend_blocks as attend_blocks
    from .sparse_prefill import measure_active_blocks as measure_active_blocks
    from .stream_manifest import NAME as NAME
    from .stream_manifest import StreamManifest as StreamManifest
    from .stream_manifest import StreamObject as StreamObject
    from .stream_manifest import binding as binding
    from .stream_manifest import digest as digest
    from .transport import fetch as fetch

_NAMES = {
    "answers": ("line_of",),
    "cells": ("Cells", "State"),
    "codec": ("GROUP", "LEVELS", "ChunkShape", "encode", "unpack", "unpacked_bytes"),
    "context_server": ("ContextServer",),
    "extras": ("Extras",),
    "loader": ("ComputingSpeed", "Loader"),
    "plan": ("Cell", "Costs", "Line", "Plan", "meet", "staircase"),
    "sparse_prefill": ("BLOCK", "ActiveBlocks", "SparsePrefill", "attend_blocks", "measure_active_blocks"),
    "stream_manifest": ("NAME", "StreamManifest", "StreamObject", "binding", "digest"),
    "transport": ("fetch",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
