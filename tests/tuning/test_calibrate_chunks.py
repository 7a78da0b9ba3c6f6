"""Chunk sizes of each layer, from sample text."""

from __future__ import annotations

import pytest
from harness import generate, prompt
from long_llama import long_model

from hf_offload_cache import AbstractTreeCache, calibrate_chunks

LENGTH = 700


def test_dense_layers_get_smaller_chunks() -> None:
    """They open as many chunks as they attend to, a half: splitting first costs as much. The others open few."""
    model = long_model()
    texts = [prompt(model, 1, LENGTH), prompt(model, 2, LENGTH)[1]]
    found = calibrate_chunks(model, texts, num_selected=30, dense_layers=2)
    assert found.sizes == (16, 16, 64) and found.tokens == LENGTH
    assert found.density == pytest.approx((0.5, 0.5, 30 / LENGTH), abs=1e-3)
    for layer, (left_open, opened) in enumerate(zip(found.left_open, found.opened, strict=True)):
        assert all(0 < opened[size] <= left_open[size] <= 1 for size in (64, 32, 16))
        assert opened[16] == pytest.approx(0.5 if layer < 2 else 120 / LENGTH, abs=0.06)
    # bounds alone leave open as many chunks as tokens are wanted, where there are so many
    assert found.left_open[2][64] == 1 and found.left_open[2][16] == pytest.approx(30 / 40)  # of 640 tokens
    table = str(found).splitlines()
    assert len(table) == 2 + 3 and table[-1].endswith(" 64") and table[2].endswith(" 16")


def test_the_sizes_are_those_of_the_layers() -> None:
    model = long_model()
    sizes = calibrate_chunks(model, [prompt(model, 1, LENGTH)], least=8, num_selected=40, dense_layers=2).sizes
    with AbstractTreeCache(model, engine="memory", chunk_size=sizes, num_selected=40, num_recent=8) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=3)
        assert tuple(layer.history.form.group_size for layer in cache.offloaded) == sizes == (8, 8, 64)


def test_texts_that_say_nothing_are_refused() -> None:
    model = long_model()
    with pytest.raises(ValueError, match="pass longer texts"):
        calibrate_chunks(model, [prompt(model, 1, 60)])
    with pytest.raises(ValueError, match="least must be one of 64, 32, 16, 8, got 128"):
        calibrate_chunks(model, [prompt(model, 1, LENGTH)], least=128)
