"""Models whose keys depend on the length of a forward: a prompt goes whole, and turns go on as with `DynamicCache`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, assert_exact, generate, prompt
from pairwise import combinations
from rope_models import KINDS, long_rope
from transformers import DynamicCache, GenerationConfig

from hf_offload_cache import (
    AbstractTreeCache,
    ClusterCache,
    ContextLibrary,
    DiskSwapCache,
    SpecCache,
    offload,
    publish_context,
    stream_context,
)  # fmt: skip
from hf_offload_cache.errors import ConfigError, UnsupportedModelError
from hf_offload_cache.tuning import Contender, follow_in_turns

ORIGINAL = 200
FIELDS: dict[str, Any] = {**SMALL, "exact": True, "engine": "memory"}
CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)


def turns(model: Any, cache: Any, lengths: tuple[int, ...], between: Any = lambda cache: cache) -> Any:
    """Two turns that reach so many tokens, as in one conversation."""
    ids = prompt(model, 1, lengths[0])
    first = generate(model, cache, ids, max_new_tokens=4)
    cache = between(cache)
    ids = torch.cat([first.tokens, prompt(model, 1, lengths[1] - first.tokens.shape[1], seed=8)], 1)
    found = generate(model, cache, ids, max_new_tokens=4)
    getattr(cache, "close", lambda: None)()
    return found


@pytest.mark.parametrize(("kind", "lengths"), combinations(KINDS.keys(), ((100, 150), (150, 260), (240, 300))))
def test_a_saved_context_goes_on_beyond_the_original_positions(
    kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    expected = turns(model := KINDS[kind](ORIGINAL), DynamicCache(config=model.config), lengths)

    def reopened(cache: Any) -> Any:
        cache.save(tmp_path / "context")
        cache.close()
        return DiskSwapCache.open(tmp_path / "context", model)

    model = KINDS[kind](ORIGINAL)
    assert_exact(expected, turns(model, DiskSwapCache(model, **FIELDS), lengths, reopened))


@pytest.mark.parametrize("cls", CACHES)
def test_a_longer_conversation_changes_nothing_of_another(cls: Any) -> None:
    """ "dynamic" remembers on the model how long the longest text was."""
    model = KINDS["dynamic"](ORIGINAL)
    expected = turns(model, DynamicCache(config=model.config), (220, 260))
    model = KINDS["dynamic"](ORIGINAL)
    with cls(model, **{**FIELDS, "group_size": None} if cls is ClusterCache else FIELDS) as longer:

        def meanwhile(cache: Any) -> Any:
            generate(model, longer, prompt(model, 1, 900), max_new_tokens=2)
            return cache

        assert_exact(expected, turns(model, cls(model, exact=True, engine="memory"), (220, 260), meanwhile))
    assert model.model.rotary_emb.max_seq_len_cached == ORIGINAL


def test_a_context_opens_as_saved_where_longer_texts_ran(tmp_path: Path) -> None:
    model, used = KINDS["dynamic"](ORIGINAL), KINDS["dynamic"](ORIGINAL)
    expected = turns(model, DynamicCache(config=model.config), (100, 260))
    generate(used, DynamicCache(config=used.config), prompt(used, 1, 900), max_new_tokens=2)
    model = KINDS["dynamic"](ORIGINAL)
    ids = prompt(model, 1, 100)
    with DiskSwapCache(model, **FIELDS) as cache:
        first = generate(model, cache, ids, max_new_tokens=4)
        cache.save(tmp_path / "context")
    ids = torch.cat([first.tokens, prompt(model, 1, 260 - first.tokens.shape[1], seed=8)], 1)
    with DiskSwapCache.open(tmp_path / "context", used) as cache:
        assert_exact(expected, generate(used, cache, ids, max_new_tokens=4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_size_is_refused_with_a_reason(kind: str) -> None:
    model = KINDS[kind](ORIGINAL)
    wanted = rf"prefill_chunk_size=64 is not possible .*\({kind}\).* longer than 200 tokens, and this one has 300"
    ids, config = prompt(model, 1, 300), GenerationConfig(prefill_chunk_size=64, max_new_tokens=2)
    with DiskSwapCache(model, **FIELDS) as cache:
        with pytest.raises(ConfigError, match=wanted):
            model.generate(ids, past_key_values=cache, prefill_chunk_size=64, max_new_tokens=2)
        with pytest.raises(ConfigError, match=wanted):
            model.generate(ids, past_key_values=cache, generation_config=config)
        short = prompt(model, 1, 150)
        expected = generate(model, DynamicCache(config=model.config), short, max_new_tokens=2)
        assert_exact(expected, generate(model, cache, short, max_new_tokens=2, prefill_chunk_size=64))
    with offload(model, **FIELDS), pytest.raises(ConfigError, match=wanted):
        model.generate(ids, prefill_chunk_size=64, max_new_tokens=2)


def test_left_padding_does_not_count() -> None:
    """Positions decide, and padding has none."""
    model = long_rope(ORIGINAL)
    ids, mask = prompt(model, 1, 230), torch.ones(1, 230, dtype=torch.long)
    ids[:, :60] = mask[:, :60] = 0
    options = {"attention_mask": mask, "max_new_tokens": 2, "prefill_chunk_size": 64}
    expected = generate(model, DynamicCache(config=model.config), ids, **options)
    with DiskSwapCache(model, **FIELDS) as cache:
        assert_exact(expected, generate(model, cache, ids, **options))


def test_a_library_gives_no_context_of_other_keys(tmp_path: Path) -> None:
    model, library = long_rope(ORIGINAL), ContextLibrary(tmp_path / "library")
    ids = prompt(model, 1, 300)
    with DiskSwapCache(model, path=tmp_path, exact=True, group_size=4, num_recent=8) as cache:
        model(ids[:, :150], past_key_values=cache)
        library.save(cache)
    assert library.find(ids[:, :190], model).matched == 150
    assert library.find(ids, model) is None


def test_streaming_holds_nothing_of_a_prompt_that_goes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that ends before the original positions, and a prompt that goes on beyond them."""
    model = long_rope(ORIGINAL)
    ids = prompt(model, 1, 300)
    with DiskSwapCache(model, path=tmp_path, exact=True, group_size=4, num_recent=8) as cache:
        model(ids[:, :128], past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match="longrope"):
            publish_context(cache, tmp_path / "published", chunk_tokens=64)
        with monkeypatch.context() as patch:  # as somebody else's version may have done
            patch.setattr("hf_offload_cache.core.filling.length_dependent", lambda model: None)
            publish_context(cache, tmp_path / "published", chunk_tokens=64)
    for length in (160, 300):
        part = ids[:, :length]
        expected = generate(model, DynamicCache(config=model.config), part, max_new_tokens=4)
        with stream_context(tmp_path / "published", model, part, path=tmp_path, **FIELDS) as cache:
            assert cache.stream_report.tokens == cache.get_seq_length() == (128 if length == 160 else 0)
            assert_exact(expected, generate(model, cache, part, max_new_tokens=4))


def test_tuning_follows_what_one_forward_leaves() -> None:
    """Caches that are compared are prefilled with more tokens than a piece has."""
    model = long_rope(1100)
    ids, whole = prompt(model, 1, 1304), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :1300], past_key_values=whole)
        steps = [model(token, past_key_values=whole).logits[0, -1] for token in ids[:, 1300:].split(1, 1)]
    contenders = {
        "dynamic": Contender(model, lambda: contextlib.nullcontext(DynamicCache(config=model.config))),
        "ours": Contender(model, lambda: DiskSwapCache(model, **FIELDS)),
    }
    for logits, _ in follow_in_turns(contenders, ids, 4).values():
        torch.testing.assert_close(logits, torch.stack(steps), rtol=0, atol=1e-3)
