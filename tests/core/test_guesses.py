"""What a method guesses: a guess that fails costs no step, and each layer may have one for its next step."""

from __future__ import annotations

import errno
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import Gathers
from harness import generate, prompt
from long_models import long_fresh

from examples.own_method import PageCache, PageLayer, PagePredictor
from hf_offload_cache.errors import StoreError
from hf_offload_cache.fetch import Choice, Extents, Fetcher, SlotTier, Tier
from hf_offload_cache.model import Geometry
from hf_offload_cache.predictors import Query

LENGTH = 700
FIELDS: dict[str, Any] = {"engine": "memory", "num_selected": 64}


class LookingPredictor(PagePredictor):
    """Looks at two records before it decides as it would have without."""

    def select(self, query: Query, budget: int, guess: bool) -> Generator[Extents, torch.Tensor, Choice]:
        decided = super().select(query, budget, guess)

        def looking() -> Generator[Extents, torch.Tensor, Choice]:
            yield Extents(np.array([[0, 1]]))
            return decided

        return looking()


class LookingLayer(PageLayer):
    def make_predictor(self) -> Any:
        made = super().make_predictor()
        made.__class__ = LookingPredictor
        return made


class LookingCache(PageCache):
    layer_class = LookingLayer


def test_a_guess_whose_look_fails_is_dropped(monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers) -> None:
    """The predictor asks to look at records for a guessed query, and that read fails: the step is as without it."""
    model = long_fresh("llama")
    look, prefetch_for = Fetcher.look, LookingLayer.prefetch_for
    guessing, failed = [False], [0]

    def guess(layer: Any, *args: Any) -> None:
        guessing[0] = True
        try:
            prefetch_for(layer, *args)
        finally:
            guessing[0] = False

    def failing(fetcher: Fetcher, *args: Any, **named: Any) -> torch.Tensor:
        if guessing[0]:
            failed[0] += 1
            raise StoreError(errno.EIO, "layer 1: read was made to fail")
        return look(fetcher, *args, **named)

    logits = []
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(LookingLayer, "prefetch_for", guess)
            monkeypatch.setattr(Fetcher, "look", failing)
        with LookingCache(model, look_ahead=True, **FIELDS) as cache, torch.no_grad():
            model(prompt(model, 1, LENGTH), past_key_values=cache)
            logits.append([model(prompt(model, 1, 1, n), past_key_values=cache).logits for n in range(4)])
            assert cache.get_seq_length() == LENGTH + 4
    assert failed[0] > 0
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))


class TwoTiersLayer(PageLayer):
    def make_tiers(self, capacity: int) -> Sequence[Tier]:
        form = self.history.form
        account = self.shared.storage.account
        near, far = ((capacity // 2, form.payload_width, form.dtype, self.history.device, account) for _ in range(2))
        return [SlotTier(*near), SlotTier(*far)]


class TwoTiersCache(PageCache):
    layer_class = TwoTiersLayer


def test_what_a_method_says_of_its_tiers_is_planned(checked_gathers: Gathers) -> None:
    """Two tiers have two tables: planned, and no less than what is held of them."""
    model = long_fresh("llama")
    with TwoTiersCache(model, reuse_capacity=96, **FIELDS) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=6)
        held = cache.storage.account.by_owner["reuse slots"]
        geometry = Geometry.of(model)
        plan, one = (cls.plan(geometry, cache.config, LENGTH + 8, 1) for cls in (TwoTiersCache, PageCache))
    assert 0 < held <= plan.decode["reuse slots"]
    assert plan.decode["tables"] > one.decode["tables"]
