"""The memory of layers that are not offloaded: sliding windows, linear states, indexers' keys."""

from __future__ import annotations

from typing import Any

from ..contexts.open import capture_kept
from ..memory.storages import without_views
from .layer import OffloadLayer
from .step import MOST_CANDIDATES

_LINEAR = ("conv_states", "recurrent_states")


def kept_state(layer: Any) -> dict[str, Any]:
    """State that `layer` keeps in memory besides the offloaded entries: its own attributes, not copies."""
    return capture_kept(layer, _LINEAR if isinstance(layer, OffloadLayer) else None)


def settle(layer: Any, most_cropped: int | None = None) -> None:
    """Copy the state of `layer` to its own memory, so that it keeps nothing of the tensors it was sliced from. One
    extra token is the exception: a token that is added to a full window leaves it there.

    While the layer records its past, of which a `crop` takes back a part, it keeps everything that it recorded. If the
    crop takes back `most_cropped` tokens at most, it keeps that many beyond its needs. Candidates are left as they are,
    because copying a window at each verification would free only memory that the plan already counts.
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
    """Raise `RuntimeError` if a window is to go back by `count` tokens and no longer has the tokens before them: with
    the remaining ones it would attend to fewer tokens than the model does."""
    window = getattr(layer, "sliding_window", None)
    if not (window and count and getattr(layer, "record_past", False) and layer.is_initialized):
        return
    held, length = layer.keys.shape[-2], layer.get_seq_length()
    if held < min(length, window - 1 + count):
        raise RuntimeError(
            f"the cache was to take back {count} tokens; its layers with a sliding window of {window} keep what "
            f"{max(0, held - window + 1)} take: call crop once after each forward, or reset() the cache"
        )
