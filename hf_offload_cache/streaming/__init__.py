"""The network: contexts that were prepared elsewhere, loaded where that is cheap and computed where that is."""

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
    from .computing_speed import ComputingSpeed as ComputingSpeed
    from .computing_speed import CostNetwork as CostNetwork
    from .computing_speed import LayerCells as LayerCells
    from .computing_speed import LayerCosts as LayerCosts
    from .context_server import ContextServer as ContextServer
    from .loader import Loader as Loader
    from .plan import Cell as Cell
    from .plan import Costs as Costs
    from .plan import Line as Line
    from .plan import Plan as Plan
    from .plan import bound as bound
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
    from .teacher import Teacher as Teacher
    from .transport import HttpTransport as HttpTransport
    from .transport import fetch as fetch

_HOME = {
    "ActiveBlocks": "sparse_prefill",
    "BLOCK": "sparse_prefill",
    "Cell": "plan",
    "Cells": "cells",
    "ChunkShape": "codec",
    "ComputingSpeed": "computing_speed",
    "ContextServer": "context_server",
    "CostNetwork": "computing_speed",
    "Costs": "plan",
    "GROUP": "codec",
    "HttpTransport": "transport",
    "LEVELS": "codec",
    "LayerCells": "computing_speed",
    "LayerCosts": "computing_speed",
    "Line": "plan",
    "Loader": "loader",
    "NAME": "stream_manifest",
    "Plan": "plan",
    "SparsePrefill": "sparse_prefill",
    "State": "cells",
    "StreamManifest": "stream_manifest",
    "StreamObject": "stream_manifest",
    "Teacher": "teacher",
    "attend_blocks": "sparse_prefill",
    "binding": "stream_manifest",
    "bound": "plan",
    "digest": "stream_manifest",
    "encode": "codec",
    "fetch": "transport",
    "line_of": "answers",
    "measure_active_blocks": "sparse_prefill",
    "meet": "plan",
    "staircase": "plan",
    "unpack": "codec",
    "unpacked_bytes": "codec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
