"""What transformers' own layers hold is taken out and put back whole, or refused with nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_offload_cache.contexts import capture_kept, restore_kept, select_kept_rows
from hf_offload_cache.errors import ContextError


def filled() -> DynamicSlidingWindowLayer:
    layer = DynamicSlidingWindowLayer(sliding_window=8)
    layer.update(torch.randn(2, 1, 12, 4), torch.randn(2, 1, 12, 4))
    return layer


def fresh() -> DynamicSlidingWindowLayer:
    return DynamicSlidingWindowLayer(sliding_window=8)


def test_a_window_comes_back_as_a_copy() -> None:
    layer, other = filled(), fresh()
    restore_kept(other, capture_kept(layer), "layer 3", rows=2)
    assert torch.equal(other.keys, layer.keys) and other.keys.data_ptr() != layer.keys.data_ptr()
    assert other.get_seq_length() == layer.get_seq_length() == 12
    more = torch.randn(2, 1, 1, 4)
    assert all(torch.equal(*pair) for pair in zip(layer.update(more, more), other.update(more, more), strict=True))


def test_rows_of_what_lies_deeper_are_selected_in_a_copy() -> None:
    layer: Any = filled()
    layer.books = {"of": [{"sums": torch.arange(2.0)}]}
    rows = torch.tensor([1, 0])
    for _ in range(2):  # the layer is as it was
        changed = select_kept_rows(layer, rows, 2, "reorder_cache", rows)
        assert changed["books"]["of"][0]["sums"].tolist() == [1, 0]
        assert torch.equal(changed["keys"], layer.keys[rows])


def test_a_linear_state_comes_back() -> None:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.randn(2, 6, 4))
    other = LinearAttentionLayer()
    restore_kept(other, capture_kept(layer), "layer 0", rows=2)
    assert torch.equal(other.conv_states[0], layer.conv_states[0])


def test_a_layer_of_a_models_own_comes_back() -> None:
    """It counts what it holds, and has nothing in its window after the prompt."""
    module = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    made = module.UnlimitedOcrDynamicReferenceSlidingWindowLayer
    layer, other = made(sliding_window=8), made(sliding_window=8)
    layer.update(torch.randn(2, 1, 12, 4), torch.randn(2, 1, 12, 4))
    restore_kept(other, capture_kept(layer), "layer 0", rows=2)
    more = torch.randn(2, 1, 1, 4)
    assert all(torch.equal(*pair) for pair in zip(layer.update(more, more), other.update(more, more), strict=True))
    for rows in (None, 2):
        with pytest.raises(ContextError, match="prefill_length is -1"):
            restore_kept(made(sliding_window=8), {**capture_kept(layer), "prefill_length": -1}, "layer 0", rows=rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": None}, "its keys are None"),
        ({"values": torch.zeros(2, 1, 7, 4, dtype=torch.int64)}, "its values are"),
        ({"keys": torch.zeros(3, 1, 7, 4)}, "keys is"),
        ({"sliding_window": "8"}, "sliding_window is '8'"),
        ({"cumulative_length": -1}, "cumulative_length is -1"),
        ({"nonsense": 1}, "nonsense is 1"),
        ({"update": None}, "'update', which such a layer does not have"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_such_layer_is_refused(change: dict[str, Any], message: str) -> None:
    other = fresh()
    before = dict(vars(other))
    with pytest.raises(ContextError, match=f"layer 3.*({message})"):
        restore_kept(other, {**capture_kept(filled()), **change}, "layer 3", rows=2)
    assert vars(other) == before
    tree = capture_kept(filled())
    del tree["keys"]
    with pytest.raises(ContextError, match=r"layer 3.*entries are missing: \['keys'\]"):
        restore_kept(other, tree, "layer 3")
