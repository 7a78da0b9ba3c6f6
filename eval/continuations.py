"""Scores of continuations, where each context is prefilled once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

Scored = tuple[float, bool]
"""Log probability of a continuation, and whether each of its tokens is the most probable one."""
Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a context, one at least, and of a continuation."""
_LEAST_SHARED = 256
"""Tokens from which on it pays to fork what contexts have in common."""


class Logits(Protocol):
    """Runs ids behind what a cache holds; log probabilities (t, vocabulary), those `wanted`, or the last alone."""

    def __call__(self, ids: Sequence[int], cache: Any, *, wanted: bool) -> torch.Tensor: ...


class Continuations:
    """In the thread that runs the model.

    Args:
        make: a cache for so many tokens.
        exact: a cache attends to everything: a continuation goes through the model in one piece. Else token by token,
            as it is generated, since no cache selects for several tokens at once.
    """

    def __init__(self, make: Callable[[int], Any], logits: Logits, *, exact: bool) -> None:
        self._make, self._logits, self._exact = make, logits, exact

    def scored(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Scored]]:
        """Place in `asked`, and score, in the order in which they are done."""
        places = defaultdict[tuple[int, ...], list[int]](list)
        for place, (context, _) in enumerate(asked):
            places[context].append(place)
        for contexts, shared in runs(sorted(places)):
            longest = max(len(context) + len(asked[place][1]) for context in contexts for place in places[context])
            with self._make(longest) as base:
                self._prefill(contexts[0][:shared], base)
                for context in contexts:
                    with _own(base, alone=len(contexts) == 1) as own:
                        self._prefill(context[shared:-1], own)
                        for place in places[context]:
                            with _own(own, alone=len(places[context]) == 1) as each:
                                yield place, self._score(context[-1], asked[place][1], each)

    def _prefill(self, ids: Sequence[int], cache: Any) -> None:
        if ids:
            self._logits(ids, cache, wanted=False)

    def _score(self, last: int, continuation: Sequence[int], cache: Any) -> Scored:
        """Of a continuation behind a context's last token, which the cache does not hold yet."""
        given = (last, *continuation[:-1])
        if self._exact:
            logits = self._logits(given, cache, wanted=True)
        else:
            logits = torch.cat([self._logits([one], cache, wanted=True) for one in given])
        tokens = torch.tensor(continuation, device=logits.device)
        found = logits.gather(1, tokens[:, None])
        return float(found.sum()), bool((logits.argmax(-1) == tokens).all())


def _own(cache: Any, *, alone: bool) -> AbstractContextManager[Any]:
    """A fork that is closed on leaving; where nobody else needs the cache, the cache itself."""
    found: AbstractContextManager[Any] = nullcontext(cache) if alone else cache.fork()
    return found


def runs(contexts: Sequence[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Neighbours of sorted contexts that begin alike, and how many tokens all of them do, each less its last token."""
    first = 0
    while first < len(contexts):
        own, stop = contexts[first], first + 1
        shared = len(own) - 1
        while stop < len(contexts):
            both = min(shared, len(contexts[stop]) - 1, _common(own, contexts[stop]))
            if both < max(_LEAST_SHARED, len(contexts[stop]) // 2):
                break
            shared, stop = both, stop + 1
        yield list(contexts[first:stop]), shared
        first = stop


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
