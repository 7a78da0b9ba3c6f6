"""A prompt in pieces: all of it once, in order, and no piece of one token at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_offload_cache.core.filling import prefill
from hf_offload_cache.errors import ConfigError


@pytest.mark.parametrize(
    ("tokens", "chunk", "wanted"),
    [
        (10, 4, [4, 4, 2]), (9, 4, [4, 3, 2]), (8, 4, [4, 4]), (5, 4, [3, 2]), (1, 4, [1]), (0, 4, []),
        (3, 1, [1, 1, 1]), (3, 2, [2, 1]), (4, 3, [2, 2]),
    ],
)  # fmt: skip
def test_pieces(tokens: int, chunk: int, wanted: list[int]) -> None:
    given: list[torch.Tensor] = []
    told: list[int] = []

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> None:
            assert kwargs == {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            given.append(input_ids)

    ids, cache = torch.arange(tokens)[None], DynamicCache()
    prefill(Model(), ids, cache, chunk, told.append)  # type: ignore[arg-type]
    assert [part.shape[1] for part in given] == wanted
    assert torch.equal(torch.cat([ids[:, :0], *given], 1), ids)
    assert told == [sum(wanted[: count + 1]) for count in range(len(wanted))]


def test_a_chunk_is_a_token_at_least() -> None:
    with pytest.raises(ConfigError, match="prefill chunk must be at least 1 token, got 0"):
        prefill(None, torch.zeros(1, 2, dtype=torch.long), DynamicCache(), 0)  # type: ignore[arg-type]
