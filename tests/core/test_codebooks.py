"""Models whose ids are no (B, T) run as with `DynamicCache`: MusicGen's (B codebooks, T), CSM's (B, T, codebooks)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from codebooks import NAMES, Coded, coded
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache import (
    AbstractTreeCache,
    ClusterCache,
    ContextLibrary,
    DiskSwapCache,
    SpecCache,
    offload,
    offload_all,
    publish_context,
)
from hf_offload_cache.errors import BudgetError, ConfigError, PromptError
from hf_offload_cache.registry import CACHES

LENGTH = 40
SPARSE: dict[Any, dict[str, Any]] = {  # all that is held is selected: what a dynamic cache gives
    DiskSwapCache: {"num_selected": 1000, "num_recent": 8},
    ClusterCache: {"num_selected": 1000, "num_recent": 8},
    AbstractTreeCache: {"num_selected": 1000, "num_recent": 8},
    SpecCache: {"num_selected": 1000, "num_recent": 8, "quant_group": 32, "group_size": 4, "block_tokens": 64},
}


def skip_if_caches_are_wrong(own: Coded, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """transformers 5.17 generates other tokens with MusicGen Melody when it is given a `DynamicCache`."""
    if not torch.equal(own.generate(ids, DynamicCache(config=own.model.config)), expected):
        pytest.skip("in this version of transformers the model is wrong with any cache that it is given")


@pytest.mark.parametrize(("name", "cache_class", "exact"), combinations(NAMES, SPARSE.keys(), (True, False), times=2))
def test_two_sequences_are_generated_as_with_a_dynamic_cache(name: str, cache_class: Any, exact: bool) -> None:
    own = coded(name)
    ids = own.prompt(2, LENGTH)
    plain = DynamicCache(config=own.model.config)
    expected = own.generate(ids, plain)
    with cache_class(own.model, **({"exact": True} if exact else SPARSE[cache_class])) as cache:
        found = own.generate(ids, cache)
        assert torch.equal(found, expected)
        assert cache.sequences == 2 and cache.tokens == plain.get_seq_length()  # MusicGen gives it the last id alone
        assert cache.input_ids.shape == (2, cache.tokens) and (cache.input_ids == -1).all()
        assert (cache.attention_mask == 1).all()


@pytest.mark.parametrize(("name", "cache"), combinations(NAMES, CACHES.keys()))
def test_requests_are_offloaded(name: str, cache: str, tmp_path: Path) -> None:
    own = coded(name)
    ids = own.prompt(2, LENGTH)
    expected = own.generate(ids)
    skip_if_caches_are_wrong(own, ids, expected)
    with offload(own.model, cache, exact=True, path=tmp_path) as done:
        assert torch.equal(own.generate(ids), expected)
    assert done.requests == 1 and done.requests_left_plain == 0
    assert done.report is not None and done.report.tokens > 0
    assert "generate" not in vars(own.model)


@pytest.mark.parametrize("name", NAMES)
def test_offload_all_sees_what_generates_in_a_loop_of_its_own(name: str) -> None:
    """CSM's goes through transformers' method. MusicGen's does not, and the warning says what to do."""
    own = coded(name)
    with offload_all(exact=True, engine="memory") as done, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.generate(own.prompt(1, LENGTH))
    told = [str(one.message) for one in caught if "keeps its own cache" in str(one.message)]
    if name == "csm":
        assert not told and (done.requests, done.requests_left_plain) == (1, 0)
    else:
        assert "a loop of its own" in told[0] and "offload(model) gives that loop another" in told[0]
        assert (done.requests, done.requests_left_plain) == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_counts_sequences_and_no_rows_of_ids(name: str, tmp_path: Path) -> None:
    own = coded(name)
    ids = own.prompt(2, LENGTH)
    expected = own.generate(ids)
    skip_if_caches_are_wrong(own, ids, expected)
    with offload(own.model, "disk-swap", memory="4MiB", exact=True, path=tmp_path) as done:
        assert torch.equal(own.generate(ids), expected)
    assert done.requests == 1
    with DiskSwapCache(own.model, max_batch=2, max_context=LENGTH + 12, exact=True, path=tmp_path) as cache:
        assert torch.equal(own.generate(ids, cache), expected)
    with DiskSwapCache(own.model, max_batch=1, exact=True, path=tmp_path) as cache:
        with pytest.raises(BudgetError, match="max_batch is 1 and this step would make it 2 sequences"):
            own.generate(ids, cache)
        assert torch.equal(own.generate(own.prompt(1, LENGTH), cache), own.generate(own.prompt(1, LENGTH)))


@pytest.mark.parametrize("name", ["musicgen", "musicgen_melody"])
def test_guidance_is_a_second_half_of_the_batch(name: str, tmp_path: Path) -> None:
    own = coded(name)
    ids = own.prompt(1, LENGTH)
    expected = own.generate(ids, DynamicCache(config=own.model.config), guidance_scale=3.0)
    with DiskSwapCache(own.model, exact=True, path=tmp_path) as cache:
        assert torch.equal(own.generate(ids, cache, guidance_scale=3.0), expected)
        assert cache.sequences == 2
    with offload(own.model, "disk-swap", memory="4MiB", exact=True, path=tmp_path) as done:
        assert torch.equal(own.generate(ids, guidance_scale=3.0), expected)
    assert done.requests == 1


@pytest.mark.parametrize(("name", "cache_class"), combinations(NAMES, SPARSE.keys()))
def test_contexts_go_on_as_they_were(name: str, cache_class: Any, tmp_path: Path) -> None:
    """Forked, saved and opened, and with other sequences: by the model's own forward."""
    own = coded(name)
    model, ids = own.model, own.prompt(2, LENGTH)
    codes = torch.randint(3, 50, (2 * own.rows, 3)) if own.rows > 1 else torch.randint(3, 50, (2, 3, 4))

    def step(cache: Any, at: int, rows: slice = slice(None)) -> torch.Tensor:
        given = codes.unflatten(0, (2, -1))[rows].flatten(0, 1)[:, at : at + 1]
        with torch.no_grad():
            return model(given, past_key_values=cache).logits[:, -1]  # type: ignore[no-any-return]

    with cache_class(model, exact=True, path=tmp_path) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        step(cache, 0)
        cache.save(tmp_path / "context")
        with cache.fork() as twin, cache_class.open(tmp_path / "context", model, path=tmp_path) as opened:
            expected, latest = step(cache, 1), step(cache, 2)
            for one in (twin, opened):
                assert torch.equal(step(one, 1), expected)
                one.batch_select_indices(torch.tensor([1]))
                assert one.sequences == 1
                alone = step(one, 2, slice(1, 2))
                torch.testing.assert_close(alone, latest[len(alone) :])
        with pytest.raises(PromptError, match="holds 2 sequences and the model was given 1"):
            step(cache, 1, slice(0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_what_finds_contexts_by_ids_refuses_codes(name: str, tmp_path: Path) -> None:
    own = coded(name)
    with DiskSwapCache(own.model, exact=True, path=tmp_path) as cache:
        own.generate(own.prompt(1, LENGTH), cache)
        with pytest.raises(ValueError, match="token ids cannot find it"):
            ContextLibrary(tmp_path / "library", max_bytes="1GB").save(cache)
        cache.save(tmp_path / "context")
    with DiskSwapCache.open(tmp_path / "context", own.model) as opened:
        assert opened.tokens > 0
        with pytest.raises(ConfigError, match="such a context cannot be published or streamed"):
            publish_context(opened, tmp_path / "published")
