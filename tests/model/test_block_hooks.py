"""The hooks of decoder blocks: on a model only while some cache on it wants to be told of blocks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import SMALL, fresh, prompt, unchanged
from walk import tiny_model

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import Pace
from hf_offload_cache.model import Attachable, Seam, attach, decoder_blocks, release
from hf_offload_cache.model import seam as seams

FIELDS: dict[str, Any] = {**SMALL, "num_selected": 16, "engine": "memory"}
KINDS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "bitwise": {"exact": "bitwise"},
    "no look-ahead": {"look_ahead": False},
    "look-ahead": {"look_ahead": True},
    "either": {"look_ahead": None},
}
WATCH = {"look-ahead", "either"}
"""Those that want to be told of blocks before the first step."""


def cache_of(model: Any, kind: str, **fields: Any) -> DiskSwapCache:
    return DiskSwapCache(model, **{**FIELDS, **KINDS[kind], **fields})


def hooked(model: Any) -> bool:
    """Whether the hooks of blocks are on: all of them, each once, or none."""
    found = []
    for _, block, attention in decoder_blocks(model):
        hooks = [*block._forward_pre_hooks.values(), *attention._forward_pre_hooks.values()]
        hooks += attention._forward_hooks.values()
        found.append([hook.verb for hook in hooks if isinstance(hook, Seam)])
    assert found and all(one == found[0] for one in found)
    assert found[0] in ([], ["enter_block", "enter_attention", "leave_attention"])
    return bool(found[0])


def step(model: Any, cache: Any, tokens: int = 1, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(model, 1, tokens, seed), past_key_values=cache).logits


@pytest.mark.parametrize("kind", KINDS)
def test_only_where_they_are_wanted(kind: str) -> None:
    model = fresh("llama")
    with unchanged(model), cache_of(model, kind) as cache:
        assert hooked(model) is cache.watches_blocks is (kind in WATCH)
        step(model, cache, 40)
        step(model, cache)
        assert hooked(model) is (kind in WATCH)


def test_a_timeline_wants_them(tmp_path: Path) -> None:
    model = fresh("llama")
    with unchanged(model), cache_of(model, "exact", trace=str(tmp_path / "trace.json")) as cache:
        assert hooked(model)
        step(model, cache, 40)
        assert hooked(model)
        cache.timeline.on = False
        step(model, cache)
        assert not hooked(model)


def test_a_linear_state_wants_them() -> None:
    model = tiny_model(transformers.Lfm2MoeConfig)
    with unchanged(model), cache_of(model, "exact") as cache:
        assert cache.has_linear_state and hooked(model)
        step(model, cache, 20)
        step(model, cache)
        assert hooked(model)


@pytest.mark.parametrize("how", ["close", "forget", "detach"])
def test_they_go_with_the_last_that_wants_them(how: str) -> None:
    model = fresh("llama")
    with unchanged(model):
        exact = cache_of(model, "exact")
        assert not hooked(model)
        caches = [cache_of(model, "look-ahead"), cache_of(model, "either")]
        assert hooked(model)
        last = cache_of(model, "no look-ahead")
        caches.pop(0).close()
        assert hooked(model)
        step(model, last, 40)
        assert hooked(model)
        if how == "close":
            caches.pop().close()
        elif how == "forget":
            caches.clear()
            gc.collect()
        else:
            attach.detach(model)
        assert not hooked(model)
        again = cache_of(model, "look-ahead")
        assert hooked(model)
        for cache in (again, last, exact):
            cache.close()


def test_on_and_off_with_the_pace() -> None:
    """They are on while the look-ahead is tried, and afterwards if it won; it guesses whenever they are on."""
    model = fresh("llama")
    fields = {"num_selected": 512}
    with unchanged(model), cache_of(model, "either", **fields) as cache, cache_of(model, "exact") as exact:
        step(model, cache, 40)
        step(model, exact, 40)
        seen = []
        cache._pace.CLEAR = Pace.TRIAL  # nothing is decided before all has been tried
        for seed in range(2 * Pace.TRIAL + 3):
            torch.testing.assert_close(step(model, cache, 1, seed), step(model, exact, 1, seed), rtol=0, atol=1e-4)
            seen.append(hooked(model))
            if seed == 2 * Pace.TRIAL - 1:
                cache._pace._chosen = True
        assert seen == Pace.TRIAL // 2 * [True, False, False, True] + [True] * 3
        assert {index for index, sight in cache.look_ahead.sights.items() if sight.recipe} == {0, 1, 2}
        assert cache.storage.account.by_owner["look-ahead"] == 0
        cache._pace._chosen = False
        step(model, cache, 5)
        assert not hooked(model)


def test_a_cache_that_is_off_leaves_them_to_others() -> None:
    """Two that let the pace decide, at different points of it."""
    model = fresh("llama")
    with unchanged(model), cache_of(model, "either") as first, cache_of(model, "either") as second:
        step(model, first, 40)
        step(model, second, 40)
        first._pace._chosen = False
        step(model, first)
        assert hooked(model) and not first.watches_blocks
        second._pace._chosen = False
        step(model, second)
        assert not hooked(model)
        first._pace._chosen = True
        step(model, first)
        assert hooked(model) and not second.watches_blocks


def test_copies_of_a_watched_model() -> None:
    model = fresh("llama")
    with cache_of(model, "look-ahead") as cache:
        twin = copy.deepcopy(model)
        assert hooked(twin)
        with cache_of(twin, "exact") as own:
            assert not hooked(twin) and hooked(model)
            step(twin, own, 40)
        assert not hooked(twin)
        step(model, cache, 40)
    assert not hooked(model)


def test_a_model_within_another() -> None:
    """A forward of the decoder alone changes the hooks of the model that the cache is on."""
    model = fresh("llama")
    with unchanged(model), cache_of(model, "either") as cache, cache_of(model.model, "exact"):
        step(model, cache, 40)
        cache._pace._chosen = False
        with torch.no_grad():
            model.model(prompt(model, 1, 1), past_key_values=cache)
        assert not hooked(model)


def test_what_cannot_be_put_on_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception between two hooks: the construction raises it, and the model, and caches on it, are as before."""
    model = fresh("llama")
    put: Callable[..., None] = seams._hook

    def interrupted(verb: str, layer_idx: int, *args: Any) -> None:
        if (verb, layer_idx) == ("leave_attention", 1):
            raise KeyboardInterrupt
        put(verb, layer_idx, *args)

    with unchanged(model), cache_of(model, "exact") as cache:
        step(model, cache, 40)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(seams, "_hook", interrupted)
            cache_of(model, "look-ahead")
        assert not hooked(model)
        step(model, cache)


class Told(Attachable):
    """Has all verbs, and does nothing."""


def test_a_cache_that_was_counted_out_says_nothing() -> None:
    model = fresh("llama")
    told = Told()
    told.watches_blocks = False
    with unchanged(model), cache_of(model, "exact"):
        release(model, attach.attach(model, told))
        told.watches_blocks = True
        attach.watch_blocks(model, told)
        assert not hooked(model)


@pytest.mark.parametrize("verb", ["enter_block", "enter_attention", "leave_attention"])
def test_a_call_between_two_lines_of_another_thread(verb: str) -> None:
    """torch notes after the hook itself that it wants names: a forward between the two calls it without them."""
    hidden = torch.ones(1, 1, 4)
    assert Seam(verb, 0)(torch.nn.Identity(), (hidden,)) is None
    assert Seam(verb, 0)(torch.nn.Identity(), (hidden,), hidden) is None


@pytest.mark.slow
def test_nothing_is_compiled_anew() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, plain = fresh("llama"), fresh("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    fields = {"num_selected": 512}
    with cache_of(model, "either", **fields) as cache, cache_of(plain, "exact") as exact:
        step(model, cache, 40)
        step(plain, exact, 40)
        frames: list[dict[str, int]] = []
        for seed in range(3 * Pace.TRIAL):
            if seed == 2 * Pace.TRIAL:
                cache._pace._chosen = True
            torch.testing.assert_close(step(model, cache, 1, seed), step(plain, exact, 1, seed), rtol=0, atol=1e-4)
            frames.append(dict(counters["frames"]))
        assert hooked(model)
        assert frames[4]["ok"] > 0
        assert frames[4] == frames[-1]
    torch._dynamo.reset()
