"""The memory of layers that are not offloaded: sliding windows, linear states, indexers' keys."""

from __future__ import annotations

from typing import Any

from ..contexts.kept_layers import capture_kept
from ..memory.storages import without_views
from .offload_layer import OffloadLayer
from .step import MOST_CANDIDATES

_LINEAR = ("conv_states", "recurrent_states")


def kept_state(layer: Any) -> dict[str, Any]:
    """What `layer` keeps in memory beside what is offloaded: its own attributes, not copies of them."""
    return capture_kept(layer, _LINEAR if isinstance(layer, OffloadLayer) else None)


def settle(layer: Any, most_cropped: int | None = None) -> None:
    """Let `layer` keep its state in memory of its own, and nothing of what that was cut out of, but for one token,
    which a token that comes to a full window leaves there.

    While it records its past, which a `crop` is to take back a part of, it keeps all that it recorded; where that takes
    back `most_cropped` tokens at most, so many beyond what it needs. Candidates are left where they are: to copy a
    window at each of their verifications frees nothing that was not planned.
    """
    recording = getattr(layer, "record_past", False)
    if recording and most_cropped is not None:
        _forget_past(layer, most_cropped)
    state = kept_state(layer)
    for name, value in without_views(state, MOST_CANDIDATES if recording else 1).items():
        if value is not state[name]:
            setattr(layer, name, value)


def _forget_past(layer: Any, most_cropped: int) -> None:
    """Cut off what neither the window nor a crop wants. Of an `OffloadLayer`, which has no window, the states alone."""
    if (window := getattr(layer, "sliding_window", None)) and layer.is_initialized:
        most = window - 1 + most_cropped
        layer.keys, layer.values = layer.keys[:, :, -most:], layer.values[:, :, -most:]
    for place, states in getattr(layer, "conv_states", {}).items():
        if states is not None and (size := layer.conv_kernel_size[place]):
            layer.conv_states[place] = states[..., -(size + most_cropped) :]


def check_recorded(layer: Any, count: int) -> None:
    """Raises `RuntimeError` where a window is to go back by `count` tokens and has not those before them any more: with
    what is left it would attend to fewer tokens than the model does."""
    window = getattr(layer, "sliding_window", None)
    if not (window and count and getattr(layer, "record_past", False) and layer.is_initialized):
        return
    held, length = layer.keys.shape[-2], layer.get_seq_length()
    if held < min(length, window - 1 + count):
        raise RuntimeError(
            f"the cache was to take back {count} tokens; its layers with a sliding window of {window} keep what "
            f"{max(0, held - window + 1)} take: call crop once after each forward, or reset() the cache"
        )
