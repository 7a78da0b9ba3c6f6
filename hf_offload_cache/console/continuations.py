"""Scores of continuations, where each context is prefilled once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple

import torch

Scored = tuple[float, bool]
"""Log probability of a continuation, and whether each of its tokens is the most probable one."""
Tokens = tuple[int, ...]
Asked = tuple[Tokens, Tokens]
"""Ids of a context, one at least, and of a continuation."""
_LEAST_SHARED = 256
"""Tokens from which on it pays to fork what contexts have in common."""


class Needed(NamedTuple):
    """The size that a cache is made for."""

    tokens: int
    """Length of the longest sequence."""
    rows: int
    """The most sequences at a time."""
    requests: int
    """Continuations that are scored through it and its forks."""


Logits = Callable[[torch.Tensor, Any, int], torch.Tensor]
"""Runs ids (B, t) behind what a cache holds; log probabilities (B, wanted, vocabulary) after the last of them."""


class Continuations:
    """Scores in the thread that runs the model.

    A context goes through the model once, at batch 1; its continuations are scored through forks of what it left, up to
    `batch` at once. If one row has all of them and texts are scored `whole`, it goes with the context, in one forward.
    Contexts with the same beginning share it only if no score depends on the pieces of a text.

    Args:
        make: a cache for texts that begin with these ids, of which it may hold a part already; closed on leaving.
        share: contexts that begin the same share what they have in common.
        whole: whether what comes of a text does not depend on the pieces in which it goes through the model into this
            cache: a continuation goes in one. Else token by token, as it is generated.
        batch: the most continuations at a time.
        apart: whether a text of so many tokens has other keys in pieces than in one forward: it shares nothing.
    """

    def __init__(
        self, make: Callable[[Needed, Tokens], AbstractContextManager[Any]], logits: Logits, *, share: bool,
        whole: Callable[[Any], bool], batch: int = 1, apart: Callable[[int], bool] = lambda tokens: False,
    ) -> None:  # fmt: skip
        self._apart = apart
        self._make, self._logits, self._share, self._whole, self._batch = make, logits, share, whole, batch

    def scored(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Scored]]:
        """Place in `asked`, and score, in the order in which they are done."""
        places = defaultdict[Tokens, list[int]](list)
        for place, (context, continuation) in enumerate(asked):
            if self._apart(len(context) + len(continuation)):
                yield from self._alone(place, asked)
            else:
                places[context].append(place)
        batches = {context: self._batches(context, own, asked) for context, own in places.items()}
        alone = (([context], 0) for context in sorted(places))
        for contexts, shared in runs(sorted(places)) if self._share else alone:
            each = [place for context in contexts for place in places[context]]
            needed = Needed(
                max(sum(map(len, asked[place])) for place in each),
                max(len(rows) for context in contexts for rows in batches[context]),
                len(each),
            )
            begin = contexts[0][: shared if len(contexts) > 1 else -1]
            with self._make(needed, begin) as base:
                whole, held = self._whole(base), base.get_seq_length()
                self._prefill(begin[held:shared], base)
                for context in contexts:
                    every, before = batches[context], context[max(held, shared) : -1]
                    with _own(base, alone=len(contexts) == 1) as own:
                        if not whole or len(every) > 1 or len(every[0]) > 1:
                            self._prefill(before, own)
                            before = ()
                        for rows in every:
                            with _own(own, alone=len(every) == 1) as cache:
                                yield from self._scores(before, rows, asked, cache, whole=whole, held=len(context) > 1)

    def _alone(self, place: int, asked: Sequence[Asked]) -> Iterator[tuple[int, Scored]]:
        """One continuation, with its context in one forward if texts go whole."""
        context, continuation = asked[place]
        rows, before = {(context[-1], *continuation[:-1]): [place]}, context[:-1]
        with self._make(Needed(len(context) + len(continuation), 1, 1), ()) as cache:
            if not (whole := self._whole(cache)):
                self._prefill(before, cache)
                before = ()
            yield from self._scores(before, rows, asked, cache, whole=whole, held=False)

    def _batches(self, context: Tokens, places: list[int], asked: Sequence[Asked]) -> list[dict[Tokens, list[int]]]:
        """By what is given to the model behind a context but its last token, the places that are scored by it: all
        whose continuations differ in their last token alone. Those of one length together, since a batch is as long as
        its longest."""
        rows = defaultdict[Tokens, list[int]](list)
        for place in places:
            rows[(context[-1], *asked[place][1][:-1])].append(place)
        ordered = sorted(rows, key=lambda given: (len(given), given))
        return [
            {given: rows[given] for given in ordered[start : start + self._batch]}
            for start in range(0, len(ordered), self._batch)
        ]

    def _prefill(self, ids: Tokens, cache: Any) -> None:
        if ids:
            self._logits(_padded([ids]), cache, 1)

    def _scores(
        self, before: Tokens, rows: dict[Tokens, list[int]], asked: Sequence[Asked], cache: Any, *, whole: bool,
        held: bool,
    ) -> Iterator[tuple[int, Scored]]:  # fmt: skip
        """Score the continuations of `rows`. `held`: the cache holds earlier tokens, in one row. `before`: tokens to
        run in front of the only row. Shorter rows are padded with tokens that nobody asks for."""
        if len(rows) > 1 and held:
            rows_of_forks = torch.zeros(len(rows), dtype=torch.long, device="cpu")
            cache.reorder_cache(rows_of_forks)  # the only way that layers with a state have
        places = [place for own in rows.values() for place in own]
        row_of = torch.tensor([row for row, own in enumerate(rows.values()) for _ in own], device="cpu")
        ids, targets = _padded([(*before, *row) for row in rows]), _padded([asked[place][1] for place in places])
        found, best = [], []
        for start, piece in enumerate([ids] if whole else ids.split(1, 1)):
            wanted = piece.shape[1] - len(before)
            logits = self._logits(piece, cache, wanted)
            own, following = row_of.to(logits.device), targets[:, start : start + wanted].to(logits.device)
            found.append(logits[own[:, None], torch.arange(wanted, device=logits.device), following])
            best.append(logits.argmax(-1)[own] == following)
        every, most = torch.cat(found, 1).cpu(), torch.cat(best, 1).cpu()
        for place, own, probable in zip(places, every, most, strict=True):
            count = len(asked[place][1])
            yield place, (float(own[:count].sum()), bool(probable[:count].all()))


def _padded(rows: Sequence[Tokens]) -> torch.Tensor:
    """(B, t) of rows; the last token of a shorter one again and again."""
    longest = max(map(len, rows))
    return torch.tensor([(*row, *row[-1:] * (longest - len(row))) for row in rows], device="cpu")


def _own(cache: Any, *, alone: bool) -> AbstractContextManager[Any]:
    """A fork that is closed on leaving; where nobody else needs the cache, the cache itself."""
    if alone:
        return nullcontext(cache)
    twin = copy.deepcopy(cache)
    return closing(twin) if hasattr(twin, "close") else nullcontext(twin)


def runs(contexts: Sequence[Tokens]) -> Iterator[tuple[list[Tokens], int]]:
    """Neighbouring sorted contexts that begin with the same tokens, and the number of these, without the last token of
    each. A context without such neighbours comes with 0."""
    first = 0
    while first < len(contexts):
        own, stop = contexts[first], first + 1
        shared = len(own) - 1
        while stop < len(contexts):
            both = min(shared, len(contexts[stop]) - 1, _common(own, contexts[stop]))
            if both < max(_LEAST_SHARED, len(contexts[stop]) // 2):
                break
            shared, stop = both, stop + 1
        yield list(contexts[first:stop]), shared if stop > first + 1 else 0
        first = stop


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
