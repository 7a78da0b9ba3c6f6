"""Caches that are fed the same tokens, and whose batches change alike."""

from __future__ import annotations

from typing import Any

import torch
from harness import PAD, padding, prompt


class Driver:
    """Feeds caches random tokens of a padded batch, and keeps the mask along. Row i of a prompt has i * step padded
    positions."""

    def __init__(self, model: Any, *caches: Any, rows: int = 3, length: int, step: int, seed: int = 0) -> None:
        self.model, self.caches, self.seed = model, caches, seed
        self.start(rows, length, step)

    def start(self, rows: int, length: int, step: int) -> None:
        """A prompt in empty caches."""
        self.mask = padding(rows, 0)
        self.feed(length, padding(rows, length, step))

    def feed(self, tokens: int = 1, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        """For each cache, the logits of `tokens` new tokens a row that are not padding by `mask`."""
        rows, self.seed = len(self.mask), self.seed + 1
        new = self.mask.new_ones(rows, tokens) if mask is None else mask
        self.mask = torch.cat([self.mask, new], 1)
        places = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -tokens:]
        ids = prompt(self.model, rows, tokens, self.seed).masked_fill(new == 0, PAD)
        options = {"attention_mask": self.mask} if not bool(self.mask.all()) else {}
        with torch.no_grad():
            logits = [
                self.model(ids, past_key_values=cache, position_ids=places, **options).logits for cache in self.caches
            ]
        assert all(each[:, -1].isfinite().all() for each in logits)
        assert {cache.get_seq_length() for cache in self.caches} == {self.mask.shape[1]}
        return [each[new.bool()] for each in logits]

    def reorder(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        for cache in self.caches:
            cache.reorder_cache(torch.tensor(rows))
        self.mask = self.mask[rows]

    def repeat(self, repeats: int) -> None:
        """Every row `repeats` times."""
        for cache in self.caches:
            cache.batch_repeat_interleave(repeats)
        self.mask = self.mask.repeat_interleave(repeats, 0)

    def select(self, rows: list[int]) -> None:
        """Only those rows stay."""
        for cache in self.caches:
            cache.batch_select_indices(torch.tensor(rows))
        self.mask = self.mask[rows]

    def crop(self, tokens: int) -> None:
        """Take the newest tokens away."""
        for cache in self.caches:
            cache.crop(-tokens)
        self.mask = self.mask[:, : self.mask.shape[1] - tokens]
