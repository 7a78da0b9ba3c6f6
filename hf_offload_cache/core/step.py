"""One forward of the whole model, as all layers see it: made once, at its beginning, and passed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..model.masks import seen_before, shown

MOST_CANDIDATES = 32
"""Queries of a candidate verification (assisted decoding, prompt lookup) that are selected for."""


def kept_logits(kwargs: dict[str, Any]) -> int | None:
    """Number of latest tokens for which a forward with these arguments returns logits; None: all, or unknown.
    `generate` takes back fewer tokens than these."""
    asked = kwargs.get("logits_to_keep")
    return asked if type(asked) is int and asked > 0 else None


@dataclass
class Step:
    """Valid until the step has ended. Made by the cache; a layer that is driven without a model makes its own."""

    sequences: int
    history: int
    """Tokens a sequence that were held before it."""
    tokens: int
    """Tokens a sequence that it adds: queries a sequence."""
    selects: bool
    """A sparse method attends to its choice; else to everything."""
    started: float | None = None
    """`time.perf_counter()` at its beginning, for steps that count as decoding; None: it is none."""
    ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    """Of the tokens it adds, which are none: bool (B, tokens) in host memory; None: no padding."""
    lengths: list[int] = field(default_factory=list)
    """What each layer that has a length held before it."""
    guessed: int = 0
    """Of the tokens that the model is given, how many at the end are guesses: attended to, and kept by no layer. They
    are not among `tokens`."""
    entered: bool = False
    """A decoder block was entered."""
    _masks: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = field(default_factory=list)
    _streamed: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = field(default_factory=list)

    @classmethod
    def alone(cls, sequences: int, history: int, tokens: int) -> Step:
        """Of a layer that is driven by itself."""
        return cls(sequences, history, tokens, selects=tokens == 1 and history > 0)

    @property
    def decodes(self) -> bool:
        """It counts as a step of decoding."""
        return self.started is not None

    @property
    def seen(self) -> torch.Tensor | None:
        """What `visible` last gave, in this step."""
        return self._masks[-1][1] if self._masks else None

    def visible(self, mask: Any) -> torch.Tensor | None:
        """What the last query sees of the T columns of a mask (·, 1, q, T): bool (·, T), None: all of them.

        Looked at once a step for each mask that the model made: models hand one mask to all layers of a kind, and
        eager attention makes one that hides nothing.
        """
        return None if mask is None else self._look(mask)[0]

    def changes(self, mask: Any) -> bool:
        """Whether a mask hides something of the last query, or has a bias for it: else attention is as well without."""
        return mask is not None and self._look(mask)[1]

    def streamed(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `stream_attention` is to be given as its mask and `seen` in the place of a mask that has a row for each
        query: see `masks.seen_before`. Looked at once a step for each mask."""
        for known, *found in self._streamed:
            if known is mask:
                return found[0], found[1]
        own: torch.Tensor | None = mask
        seen: torch.Tensor | None = None
        if (alike := seen_before(mask)) is not None:
            seen, causal = alike
            if causal:
                own, seen = None, None if bool(seen.all()) else seen
        self._streamed.append((mask, own, seen))
        return own, seen

    def _look(self, mask: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        for known, seen, changes in self._masks:
            if known is mask:
                return seen, changes
        last = mask[:, 0, -1]
        seen = shown(last)
        hides = not bool(seen.all())
        found = seen if hides else None, hides or (last.dtype != torch.bool and bool(last.any()))
        self._masks.append((mask, *found))
        return found
