"""The text that is measured on: bundled, or the user's, cut into stretches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_offload_cache.errors import ConfigError
from hf_offload_cache.tuning import bundled_text, sample_ids, windows


def by_word(text: str, verbose: bool) -> dict[str, Any]:
    return {"input_ids": [len(word) for word in text.split()]}


def test_the_bundled_text_is_prose_and_the_same_each_time() -> None:
    text = bundled_text()
    paragraphs = text.split("\n\n")
    assert text == bundled_text()
    assert len(text.split()) > 10_000
    assert all(paragraph.endswith(".") and len(paragraph.split()) >= 20 for paragraph in paragraphs)
    assert len(set(paragraphs)) == len(paragraphs)


def test_strings_and_ids() -> None:
    found = sample_ids(["a bcd", torch.tensor([[5, 6]]), [7]], by_word)
    assert [ids.tolist() for ids in found] == [[1, 3], [5, 6], [7]]
    assert [ids.tolist() for ids in sample_ids("one text", by_word)] == [[3, 4]]
    assert len(sample_ids(None, by_word)[0]) > 10_000


@pytest.mark.parametrize("texts", [None, "text", [[1], "text"]])
def test_strings_need_a_tokenizer(texts: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer must be given"):
        sample_ids(texts, None)


def test_stretches_are_spread_and_within_one_text() -> None:
    texts = [torch.arange(100), torch.arange(1000, 1005), torch.arange(2000, 2050)]
    found = windows(texts, 4, 5, 20)
    assert [len(ids) for ids in found] == [20] * 4
    assert all(ids.tolist() == list(range(int(ids[0]), int(ids[0]) + 20)) for ids in found)
    assert [int(ids[0]) for ids in found] == [0, 28, 56, 2003]  # 81 places in the first, 31 in the third


def test_short_texts_overlap_and_are_shorter() -> None:
    found = windows([torch.arange(10)], 3, 4, 20)
    assert [ids.tolist() for ids in found] == [list(range(10))] * 3


def test_too_short() -> None:
    with pytest.raises(ConfigError, match="one must have at least 11 tokens, the longest has 10"):
        windows([torch.arange(10), torch.arange(3)], 1, 11, 20)
    with pytest.raises(ConfigError, match="the longest has 0"):
        windows([], 1, 1, 2)
