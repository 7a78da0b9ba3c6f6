"""The conformance suite of predictors."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Generator, Iterator
from typing import cast

import numpy as np
import torch

from ..fetch.choice import Choice, Extents
from ..history.base import Sealed
from ..history.records import RecordFormat
from ..memory.account import MemoryAccount
from ..memory.dry_run import DryRun
from ..predictors.base import Predictor, Query

_LATEST = 64
"""Tokens that may be in a tail, in addition to the sealed ones."""
BUDGET = 9
"""Units per row that the tests ask for."""


class PredictorTests:
    """Tests for every predictor of units in the order of the sequence, with rows of one sequence each.

    Subclass it as `class TestMyPredictor(PredictorTests)` and implement `make_predictor`.

    Attributes:
        form: 2 key heads of 8 and units of 4 tokens, unless the predictor needs another.
        num_heads: query heads.
        num_sinks: first tokens that are always selected, as `make_predictor` tells the predictor.
        tokens: sealed tokens that suffice to fit the predictor, complete units.
        takes_padding: rows may have padding.
    """

    form = RecordFormat(2, 8, 2, 4, torch.float32, 4)
    num_heads = 4
    num_sinks = 6
    tokens = 600
    takes_padding = True

    @abstractmethod
    def make_predictor(self, rows: int, account: MemoryAccount) -> Predictor:
        """A new predictor."""


    def keys(self, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
        """Keys (rows, Hk, tokens, Dk), mostly of low rank, as real ones."""
        generator = torch.Generator().manual_seed(seed)
        low = torch.randn(rows, self.form.num_key_heads, tokens, 3, generator=generator)
        basis = torch.randn(3, self.form.key_dim, generator=torch.Generator().manual_seed(99))
        noise = torch.randn(*low.shape[:3], self.form.key_dim, generator=generator)
        return (low @ basis + 0.1 * noise).to(self.form.dtype)

    def query(self, rows: int, keys: torch.Tensor, visible: torch.Tensor | None = None, seed: int = 1) -> Query:
        """A query; `keys` are all sealed ones, and the latest of them also stand for the tail."""
        states = torch.randn(rows, self.num_heads, self.form.key_dim, generator=torch.Generator().manual_seed(seed))
        return Query(states.to(self.form.dtype), self.form.key_dim**-0.5, visible, lambda: keys[:, :, -8:])

    def learn(
        self, predictor: Predictor, keys: torch.Tensor, start: int = 0, visible: torch.Tensor | None = None,
        queries: int = 40,
    ) -> list[int]:  # fmt: skip
        """Pass the tokens from `start` on to the predictor as sealed by a call of so many `queries`; if there are none,
        the prompt ends. Returns an entry for each time that it reads stored keys."""
        asked: list[int] = []
        whole, latest = keys.clone(), keys.clone()

        def stored() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            asked.append(keys.shape[2])
            yield from ((part, part) for part in whole.split(101, 2))

        units, both = keys.shape[2] // self.form.group_size, []
        if start < keys.shape[2]:
            both = [(part, part) for part in latest[:, :, start:].split([3, keys.shape[2] - start - 3], 2)]
        sealed = Sealed(units, keys.shape[2], [pair for pair in both if pair[0].shape[2]], stored)
        if not both:
            predictor.end_prompt(sealed)
            return asked
        shape = (len(keys), self.num_heads, queries, self.form.key_dim)
        states = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        predictor.learn(sealed, states.to(self.form.dtype), visible)
        whole.fill_(torch.nan)  # the predictor may keep neither
        latest.fill_(torch.nan)
        return asked

    def chosen(self, predictor: Predictor, query: Query, budget: int = BUDGET, guess: bool = False) -> np.ndarray:
        """The selected units, checked: ascending, and within the budget."""
        decision = predictor.select(query, budget, guess)
        if not isinstance(decision, Choice):
            decision = self._looked(decision)
        units = decision.units
        assert units.dtype == np.int64 and len(units) == len(query.states) and units.shape[1] <= budget
        there = units >= 0
        assert (there[:, :-1] >= there[:, 1:]).all() and ((np.diff(units) > 0) | ~there[:, 1:]).all()
        return units

    def _looked(self, decision: Generator[Extents | Choice, torch.Tensor, Choice]) -> Choice:
        """Its choice after it has read what it asks for, here zeros."""
        try:
            asked = next(decision)
            while True:
                form = self.form
                if isinstance(asked, Choice):
                    sent = torch.zeros(*asked.units.shape, form.group_size, form.entry_width, dtype=form.dtype)
                else:
                    sent = torch.zeros(*asked.records.shape, form.payload_width, dtype=form.payload_dtype)
                asked = decision.send(sent)
        except StopIteration as end:
            return cast(Choice, end.value)

    def fitted_predictor(self, rows: int, account: MemoryAccount | None = None) -> tuple[Predictor, torch.Tensor]:
        predictor, keys = self.make_predictor(rows, account or MemoryAccount()), self.keys(rows, self.tokens)
        self.learn(predictor, keys)
        return predictor, keys

    def test_it_is_ready_when_it_has_learned(self) -> None:
        """For exactly the sealed units; a first piece needs no reading back."""
        predictor, keys = self.make_predictor(2, MemoryAccount()), self.keys(2, self.tokens + 32)
        assert not predictor.ready(self.tokens // self.form.group_size)
        assert self.learn(predictor, keys[:, :, : self.tokens]) == []
        for tokens in (self.tokens + 4, self.tokens + 32):
            units = tokens // self.form.group_size
            assert not predictor.ready(units)
            self.learn(predictor, keys[:, :, :tokens], start=tokens - (4 if tokens == self.tokens + 4 else 28))
            assert predictor.ready(units)

    def test_what_was_missed_is_learned_later(self) -> None:
        """From stored keys: then it chooses as if it had missed nothing."""
        predictor, keys = self.fitted_predictor(2)
        more = torch.cat([keys, self.keys(2, 40, seed=2)], 2)
        assert self.learn(predictor, more, start=self.tokens + 20) and predictor.ready(more.shape[2] // 4)
        fresh = self.make_predictor(2, MemoryAccount())
        self.learn(fresh, more)
        query = self.query(2, more)
        assert np.array_equal(self.chosen(predictor, query), self.chosen(fresh, query))

    def test_a_prompt_in_pieces(self) -> None:
        """When it ends, the predictor is ready, within its plan; a second end changes nothing."""
        for rows in (1, 3):
            account = MemoryAccount()
            predictor, keys = self.make_predictor(rows, account), self.keys(rows, self.tokens)
            pieces = [self.tokens // 2 // 4 * 4, self.tokens * 3 // 4 // 4 * 4, self.tokens]
            for start, stop in itertools.pairwise([0, *pieces]):
                self.learn(predictor, keys[:, :, :stop], start)
            self.learn(predictor, keys, self.tokens)
            assert predictor.ready(self.tokens // self.form.group_size)
            assert self.learn(predictor, keys, self.tokens) == []
            self.chosen(predictor, self.query(rows, keys))
            assert 0 < account.peak + predictor.tables_nbytes <= self._most_planned(rows)

    def test_choices(self) -> None:
        """Within bounds and budget, with the sinks, also for a guess; and they depend on the query."""
        predictor, keys = self.fitted_predictor(3)
        count, sinks = self.tokens // self.form.group_size, -(-self.num_sinks // self.form.group_size)
        seen = set()
        for seed in range(4):
            query = self.query(3, keys, seed=seed)
            for guess in (False, True):
                units = self.chosen(predictor, query, guess=guess)
                assert units.max() < count
                if not guess:
                    assert (units[:, :sinks] == np.arange(sinks)).all()
                    seen.add(units.tobytes())
        assert len(seen) == 4
        assert self.chosen(predictor, self.query(3, keys), budget=count).shape == (3, count)

    def test_padding_is_never_chosen(self) -> None:
        """No units of padding only; the sinks are at the row's first token."""
        if not self.takes_padding:
            return
        keys = self.keys(2, self.tokens)
        visible = torch.ones(2, self.tokens + 8, dtype=torch.bool)
        visible[1, : 4 * 50 + 1] = False
        predictor = self.make_predictor(2, MemoryAccount())
        self.learn(predictor, keys, visible=visible)
        units = self.chosen(predictor, self.query(2, keys, visible))
        sinks = np.unique(np.arange(4 * 50 + 1, 4 * 50 + 1 + self.num_sinks) // self.form.group_size)
        assert units[1].min() == 50 and set(sinks) <= set(units[1].tolist()) and units[0].min() == 0

    def test_truncate(self) -> None:
        """As if it had never seen the later units; it continues from there."""
        predictor, keys = self.fitted_predictor(2)
        left, units = keys[:, :, : self.tokens - 80], (self.tokens - 80) // self.form.group_size
        predictor.truncate(units)
        assert predictor.ready(units) and not predictor.ready(self.tokens // self.form.group_size)
        assert self.chosen(predictor, self.query(2, left)).max() < units
        again = torch.cat([left, self.keys(2, 40, seed=6)], 2)
        assert self.learn(predictor, again, start=left.shape[2]) == []
        assert predictor.ready(units + 10)

    def test_select_rows(self) -> None:
        """Row i chooses as row `rows[i]` did, and then continues separately."""
        predictor, keys = self.fitted_predictor(3)
        before = self.chosen(predictor, self.query(3, keys))
        rows = [2, 0, 0, 1]
        predictor.select_rows(torch.tensor(rows))
        query = self.query(3, keys)
        moved = Query(query.states[rows], query.scaling, None, lambda: keys[rows][:, :, -8:])
        assert np.array_equal(self.chosen(predictor, moved), before[rows])
        more = torch.cat([keys[rows], self.keys(4, 16, seed=7)], 2)
        assert self.learn(predictor, more, start=self.tokens) == [] and predictor.ready(more.shape[2] // 4)

    def test_captured_and_restored(self) -> None:
        """The twin chooses the same at once; neither sees what the other one is given later."""
        predictor, keys = self.fitted_predictor(2)
        tree = predictor.capture()
        twin = self.make_predictor(2, MemoryAccount())
        twin.restore({**tree, "units": self.tokens // self.form.group_size})
        assert twin.ready(self.tokens // self.form.group_size)
        query = self.query(2, keys)
        before = self.chosen(predictor, query)
        assert np.array_equal(self.chosen(twin, query), before)
        for one, seed in ((predictor, 8), (twin, 9), (predictor, 10)):
            one.truncate((self.tokens - 40) // self.form.group_size)
            self.learn(one, torch.cat([keys[:, :, :-40], self.keys(2, 40, seed)], 2), start=self.tokens - 40)
        found = [self.chosen(one, query) for one in (predictor, twin)]
        for units, seed in zip(found, (10, 9), strict=True):
            fresh = self.make_predictor(2, MemoryAccount())
            fresh.restore({**self.make_and_learn(keys).capture(), "units": self.tokens // self.form.group_size})
            fresh.truncate((self.tokens - 40) // self.form.group_size)
            self.learn(fresh, torch.cat([keys[:, :, :-40], self.keys(2, 40, seed)], 2), start=self.tokens - 40)
            assert np.array_equal(units, self.chosen(fresh, query))

    def test_fitted_state_stands_in_for_queries(self) -> None:
        """Keys without queries are ranked as with the queries that the prior was fitted to."""
        predictor, keys = self.fitted_predictor(2)
        state, twin = predictor.fitted_state(), self.make_predictor(2, MemoryAccount())
        if state is not None:
            twin.restore({**state, "units": 0})
        self.learn(twin, keys, queries=0)
        assert twin.ready(self.tokens // self.form.group_size)
        query = self.query(2, keys)
        assert np.array_equal(self.chosen(twin, query), self.chosen(predictor, query))

    def make_and_learn(self, keys: torch.Tensor) -> Predictor:
        predictor = self.make_predictor(len(keys), MemoryAccount())
        self.learn(predictor, keys)
        return predictor

    def _most_planned(self, rows: int) -> int:
        """Bytes that a dry run of a predictor of `rows` rows declares, in the pass that takes more."""
        run, units = DryRun(), self.tokens // self.form.group_size
        self.make_predictor(rows, run).rehearse(run, self.tokens + _LATEST, self.num_heads, units)
        plan = run.plan(0)
        passes = (plan.own.prefill, plan.shared.prefill), (plan.own.decode, plan.shared.decode)
        return max(sum(own.values()) + sum(shared.values()) for own, shared in passes)

    def test_no_more_is_held_than_planned(self) -> None:
        """At its peak, while it is fitted, chooses and moves rows; and `close` frees everything."""
        for rows in (1, 3):
            account = MemoryAccount()
            predictor, keys = self.fitted_predictor(rows, account)
            self.chosen(predictor, self.query(rows, keys))
            predictor.select_rows(torch.arange(rows).flip(0))
            assert 0 < account.peak + predictor.tables_nbytes <= self._most_planned(rows)
            predictor.close()
            assert all(held == 0 for owner, held in account.by_owner.items() if owner != "scores")
            self.learn(predictor, self.keys(rows, self.tokens))
            assert predictor.ready(self.tokens // self.form.group_size)
