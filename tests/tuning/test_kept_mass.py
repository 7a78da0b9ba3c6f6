"""What coded keys keep of the attention mass, by their bytes."""

from __future__ import annotations

import numpy as np
import torch

from hf_offload_cache.methods.disk_swap import DiskSwapConfig
from hf_offload_cache.methods.disk_swap.tuning import CompressionTable, kept_mass

SETTINGS = DiskSwapConfig(num_selected=64, num_recent=8, num_sinks=4)


def states(tokens: int = 1200, peaked: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (1, 2, T, 16) and the latest queries (1, 6, 32, 16), alike."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0] * (3 * 0.9 ** torch.arange(32))
    keys = (torch.randn(tokens, 32, generator=generator) @ mixed.T).view(1, tokens, 2, 16).transpose(1, 2)
    return keys, peaked * torch.randn(1, 6, 32, 16, generator=generator)


def test_more_bytes_keep_more_and_many_keep_nearly_all() -> None:
    keys, queries = states()
    kept = kept_mass(keys, queries, 0.5, [32, 16, 8, 4], SETTINGS, 4)
    assert kept == sorted(kept, reverse=True)
    assert 0.97 < kept[0] <= 1
    assert kept[3] < kept[0] - 0.02


def test_what_is_always_attended_to_counts() -> None:
    keys, queries = states()
    wanted = 5 * torch.nn.functional.normalize(torch.ones(16), dim=0)
    keys[:, :, -40:] = queries[:] = wanted
    own = DiskSwapConfig(num_selected=64, num_recent=64, num_sinks=4)
    assert kept_mass(keys, queries, 1.0, [4], own, 4)[0] > 0.999


def test_a_text_without_a_choice_keeps_all() -> None:
    keys, queries = states(80)
    assert kept_mass(keys, queries, 0.5, [8, 4], SETTINGS, 4) == [1.0, 1.0]


def test_the_least_size_that_is_enough() -> None:
    table = CompressionTable(384, 1, [48, 24, 16, 8], [1.0, 0.997, 0.99, 0.9], [0.99, 0.98, 0.9, 0.7])
    assert [table.enough(share) for share in (1.0, 0.995, 0.98, 0.5)] == [48, 24, 16, 8]
    assert table.up_to(24) == CompressionTable(384, 1, [24, 16, 8], [0.997, 0.99, 0.9], [0.98, 0.9, 0.7])
    assert np.isclose(table.up_to(24).sigma(24), 16)
