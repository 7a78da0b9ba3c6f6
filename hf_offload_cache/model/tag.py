"""How attention finds the layer that it is over: a tag that rides on the keys and values that `update` returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TAG = "_hf_offload_cache_tag"
"""The attribute of a tensor that holds its `Tag`. A tensor made of a tagged one has none: then nothing is replaced."""


@dataclass(eq=False)
class Tag:
    """One `update` of one layer; the keys and the values that it returned carry the same tag."""

    layer: Any
    """The layer, whose `attend` is called."""
    whole: bool
    """The tensors are the layer's whole history, not only what the step added."""
