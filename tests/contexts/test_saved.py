"""A context that was saved and opened, or forked, goes on as if nothing had happened."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    NEW,
    PAD,
    PROMPT,
    SMALL,
    Decoded,
    assert_exact,
    build,
    config_of,
    fresh,
    generate,
    padding,
    prompt,
    tiny,
)
from pairwise import combinations
from saved_contexts import rewrite_values
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_offload_cache import (
    AbstractTreeCache,
    ClusterCache,
    DiskSwapCache,
    DiskSwapConfig,
    OffloadCache,
    calibrate,
    verify,
)
from hf_offload_cache.contexts import read_manifest
from hf_offload_cache.errors import (
    BudgetError,
    CacheClosedError,
    ConfigError,
    ContextError,
    ContextMismatchError,
    CorruptRecordError,
    EncryptionKeyError,
    PromptError,
    StoreError,
)
from hf_offload_cache.model import Geometry
from hf_offload_cache.stores import Store
from hf_offload_cache.testing import FaultyStore

Between = Callable[[Any, Path], Any]

SPARSE = {**SMALL, "num_selected": 32, "reuse_capacity": 16, "rank": 8, "block_tokens": 64}
"""With these, an eighteenth of `LONG` tokens is attended to."""


def _open(cache: OffloadCache, folder: Path, **fields: Any) -> OffloadCache:
    cache.save(folder / "context")
    model = cache.model
    cache.close()
    return type(cache).open(folder / "context", model, **fields)


def _reopened(cache: Any, folder: Path) -> Any:
    return copy.deepcopy(cache) if isinstance(cache, DynamicCache) else _open(cache, folder)


def _forked(cache: Any, folder: Path) -> Any:
    return copy.deepcopy(cache)


def _saved_twice(cache: Any, folder: Path) -> Any:
    """A context of a context, after a turn in between."""
    if isinstance(cache, DynamicCache):
        return cache
    first = _open(cache, folder)
    first.fork().close()
    (folder / "second").mkdir()
    return _open(first, folder / "second")


def _saved_and_used_on(cache: Any, folder: Path) -> Any:
    if not isinstance(cache, DynamicCache):
        cache.save(folder / "context")
    return cache


LONG = 620
"""Tokens of a prompt from which a sparse cache selects: more than the 512 that an adapter is made of."""


@functools.cache
def long_model() -> Any:
    """A tiny Llama with positions for `LONG`."""
    config = config_of("llama")
    config.max_position_embeddings = 2048
    return build(LlamaForCausalLM, config)


def ids_of(model: Any, rows: int = 1) -> torch.Tensor:
    """A prompt: `LONG` for the model that has the positions."""
    return prompt(model, rows, LONG if model.config.max_position_embeddings == 2048 else PROMPT)


WAYS: dict[str, Between] = {
    "reopened": _reopened,
    "forked": _forked,
    "saved, used on": _saved_and_used_on,
    "saved twice": _saved_twice,
}


def _greedy(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    first = generate(model, cache, ids_of(model, 2), max_new_tokens=NEW // 2)
    ids = torch.cat([first.tokens, prompt(model, 2, 9, seed=8)], 1)
    return generate(model, between(cache), ids)


def _greedy_one_token(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    with torch.no_grad():
        model(ids_of(model)[:, :-1], past_key_values=cache)
    return generate(model, between(cache), ids_of(model))


def _sample(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    with torch.no_grad():
        model(ids_of(model, 2)[:, :-3], past_key_values=cache)
    cache = between(cache)
    torch.manual_seed(3)
    return generate(model, cache, ids_of(model, 2), do_sample=True, top_k=0, temperature=1.2)


def _padded(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    mask = padding(3, ids_of(model).shape[1])
    ids = ids_of(model, 3).masked_fill(mask == 0, PAD)
    first = generate(model, cache, ids, attention_mask=mask, max_new_tokens=6)
    cache = between(cache)
    more = prompt(model, 3, 5, seed=9)
    if isinstance(cache, OffloadCache):  # what a new process would do: it has nothing but the cache
        held, mask = cache.input_ids, cache.attention_mask
        ids, mask = torch.cat([held, first.tokens[:, -1:], more], 1), torch.cat([mask, torch.ones(3, 6).long()], 1)
    else:
        ids, mask = torch.cat([first.tokens, more], 1), torch.cat([mask, torch.ones(3, 11).long()], 1)
    return generate(model, cache, ids, attention_mask=mask)


def _beams(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    """Prefilled once, then repeated."""
    with torch.no_grad():
        model(ids_of(model, 2)[:, :-1], past_key_values=cache)
    cache = between(cache)
    cache.batch_repeat_interleave(3)
    return generate(model, cache, ids_of(model, 2), num_beams=3)


def _cropped(model: Any, cache: Cache, between: Callable[[Any], Any]) -> Decoded:
    with torch.no_grad():
        model(ids_of(model), past_key_values=cache)
    cache = between(cache)
    cache.crop(-23)
    with torch.no_grad():
        model(prompt(model, 1, 14, seed=5), past_key_values=cache)
    ids = torch.cat([ids_of(model)[:, :-23], prompt(model, 1, 15, seed=5)], 1)
    ids[:, -1] = 17
    return generate(model, cache, ids)


CASES = {
    case.__name__: case for case in (_greedy, _greedy_one_token, _sample, _padded, _beams, _cropped)
}


@pytest.mark.parametrize(("case", "way"), combinations(list(CASES), list(WAYS), times=2))
def test_exact_goes_on_as_dynamic_cache(case: str, way: str, tmp_path: Path) -> None:
    model = tiny("llama")
    expected = CASES[case](model, DynamicCache(config=model.config), lambda cache: WAYS[way](cache, tmp_path))
    made: list[Any] = []

    def between(cache: Any) -> Any:
        made.append(cache)
        made.append(WAYS[way](cache, tmp_path))
        return made[-1]

    with OffloadCache(model, **SMALL) as cache:
        assert_exact(expected, CASES[case](model, cache, between))
    made[-1].close()


@pytest.mark.parametrize(
    ("name", "case", "exact"),
    combinations(
        ["gemma3", "gpt_oss", "mistral_sliding", "deepseek_v2", "opt", "qwen3"], ["_greedy", "_sample", "_padded"],
        {"bitwise": "bitwise", "exact": True}, times=2,
    ),
)  # fmt: skip
def test_models_with_other_layers(name: str, case: str, exact: bool | str, tmp_path: Path) -> None:
    """Sliding windows, latent keys, attention that is not ours: all come back."""
    model = tiny(name)
    expected = CASES[case](model, DynamicCache(config=model.config), lambda cache: cache)
    opened: list[Any] = []

    def between(cache: Any) -> Any:
        opened.append(_open(cache, tmp_path))
        opened.append(opened[0].fork())
        return opened[-1]

    with DiskSwapCache(model, exact=exact, **SMALL) as cache:
        assert_exact(expected, CASES[case](model, cache, between), bitwise=exact == "bitwise")
    for cache in opened:
        cache.close()


@pytest.mark.parametrize(("case", "way"), combinations(list(CASES), ["reopened", "forked", "saved twice"], times=2))
def test_sparse_goes_on_as_it_would_have(case: str, way: str, tmp_path: Path) -> None:
    """The same selections, to the last bit of the logits: nothing was fitted anew."""
    model = long_model()
    with DiskSwapCache(model, **SPARSE) as cache:
        expected = CASES[case](model, cache, lambda cache: cache)
        assert cache.report().selected_fraction is not None and cache.report().selected_fraction < 0.9
    made: list[Any] = []

    def between(cache: Any) -> Any:
        made.append(WAYS[way](cache, tmp_path))
        return made[-1]

    with DiskSwapCache(model, **SPARSE) as cache:
        result = CASES[case](model, cache, between)
    assert_exact(expected, result, bitwise=True)
    assert made[-1].report().selected_fraction < 0.9
    made[-1].close()


def _prefilled(model: Any, rows: int = 1, cls: type[OffloadCache] = DiskSwapCache, **fields: Any) -> Any:
    cache = cls(model, **{**(SPARSE if cls is DiskSwapCache else SMALL), **fields})
    with torch.no_grad():
        model(ids_of(model, rows)[:, :-1], past_key_values=cache)
    return cache


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of the long model, which no test changes."""
    folder = tmp_path_factory.mktemp("saved") / "context"
    with _prefilled(long_model()) as cache:
        cache.save(folder)
    return folder


def test_opening_reads_no_keys_and_values(saved: Path) -> None:
    model = long_model()
    with DiskSwapCache.open(saved, model) as cache:
        assert cache.report().bytes_read == 0 and cache.report().tokens == LONG - 1
        generate(model, cache, ids_of(model), max_new_tokens=1)
        stored = sum(store.capacity * store.record_bytes for store in cache.storage.stores)
        assert 0 < cache.report().bytes_read < stored / 2


def test_forks_do_not_see_each_other() -> None:
    """Each goes its own way, over group edges; then the first one, of which nothing was copied."""
    model = long_model()
    with _prefilled(model) as cache:
        forks = [cache.fork() for _ in range(3)]
        forks += [forks[0].fork()]
        turns = [torch.cat([ids_of(model), prompt(model, 1, 12 + seed, seed=seed)], 1) for seed in range(5)]
        alone = []
        for turn in turns:
            with _prefilled(model) as other:
                alone.append(generate(model, other, turn))
        for turn, expected, each in zip(turns, alone, [*forks, cache], strict=True):
            assert_exact(expected, generate(model, each, turn), bitwise=True)
        for each in forks:
            each.close()


def test_what_is_cropped_and_refilled_in_one_fork_stays_in_the_other() -> None:
    """Compact keys are shared in memory until one changes; so are records."""
    model = long_model()
    with _prefilled(model) as cache, cache.fork() as twin:
        for each, seed in ((cache, 1), (twin, 2)):
            each.crop(-30)
            with torch.no_grad():
                model(prompt(model, 1, 40, seed=seed), past_key_values=each)
        for each, seed in ((cache, 1), (twin, 2)):
            ids = torch.cat([ids_of(model)[:, :-31], prompt(model, 1, 40, seed=seed), ids_of(model)[:, -1:]], 1)
            with _prefilled(model) as other:
                other.crop(-30)
                with torch.no_grad():
                    model(prompt(model, 1, 40, seed=seed), past_key_values=other)
                assert_exact(generate(model, other, ids), generate(model, each, ids), bitwise=True)


def test_a_cache_beside_its_forks_holds_no_buffers() -> None:
    """What prefilling in pieces streamed through is given back, and made again where it is wanted."""
    model, ids = long_model(), ids_of(long_model())
    with DiskSwapCache(model, **SPARSE) as cache, torch.no_grad():
        for part in ids.split(310, 1):
            model(part, past_key_values=cache)
        assert cache.report().memory_by_owner["stream buffers"] > 0
        with cache.fork() as twin:
            assert "stream buffers" not in cache.report().memory_by_owner
            more = prompt(model, 1, 5, seed=3)
            found, expected = (model(more, past_key_values=one).logits for one in (cache, twin))
            assert torch.equal(found, expected)


def test_forks_share_the_disk(tmp_path: Path) -> None:
    model = long_model()
    with _prefilled(model) as cache:
        cache.storage.prefetcher.flush()
        before = cache.disk_bytes
        assert before == cache.own_disk_bytes > 0
        forks = [cache.fork() for _ in range(8)]
        cache.batch_repeat_interleave(4)
        assert [each.own_disk_bytes for each in (cache, *forks)] == [0] * 9
        assert {each.disk_bytes for each in (cache, *forks)} == {before}
        generate(model, forks[0], ids_of(model))
        assert forks[0].own_disk_bytes > 0 and forks[0].disk_bytes == before + forks[0].own_disk_bytes
        assert [each.own_disk_bytes for each in (cache, *forks[1:])] == [0] * 8
        for fork in forks:
            fork.close()


# --- what is refused -----------------------------------------------------------------------------------------------


def test_another_model_is_refused(tmp_path: Path) -> None:
    """And a place within another context. All fields are saved but those of a machine or a run."""
    model, other = tiny("llama"), fresh("llama", seed=1)
    with _prefilled(model) as cache:
        cache.save(tmp_path / "context")
        with pytest.raises(ContextError, match="lies in another"):
            cache.save(tmp_path / "context" / "inner")
        names = {field.name for field in dataclasses.fields(cache.config)} - set(DiskSwapConfig.of_a_run)
    with pytest.raises(CacheClosedError):
        cache.save(tmp_path / "other")
    assert set(read_manifest(tmp_path / "context").config) == names
    with pytest.raises(ContextMismatchError, match="weights"):
        DiskSwapCache.open(tmp_path / "context", other)
    with pytest.raises(ContextMismatchError, match=r"model_type.*llama.*qwen2|model_type.*qwen2.*llama"):
        DiskSwapCache.open(tmp_path / "context", tiny("qwen2"))
    with pytest.raises(ContextMismatchError, match="DiskSwapCache"):
        OffloadCache.open(tmp_path / "context", model)


@pytest.mark.parametrize(("field", "value"), [("group_size", 8), ("rank", 4), ("summary_dtype", "float32")])
def test_fields_that_the_format_fixes(field: str, value: Any, saved: Path) -> None:
    model = long_model()
    with pytest.raises(ConfigError, match=f"{field} is fixed in a saved context"):
        DiskSwapCache.open(saved, model, **{field: value})


@pytest.mark.parametrize("own", [False, True])
def test_an_adapter_is_refused_by_name(own: bool, tmp_path: Path) -> None:
    """What is stored was made with another one, or with none."""
    model, adapter, context = long_model(), str(tmp_path / "adapter"), tmp_path / "context"
    calibrate(model, [prompt(model, 1, 560, seed=3)], rank=8).save(adapter)
    with _prefilled(model, adapter=adapter if own else None) as cache:
        cache.save(context)
        before = generate(model, cache, ids_of(model))
    with pytest.raises(ConfigError, match="adapter is fixed in a saved context"):
        DiskSwapCache.open(context, model, adapter=adapter)
    with DiskSwapCache.open(context, model, adapter=None) as cache:
        assert_exact(before, generate(model, cache, ids_of(model)), bitwise=True)


def test_fields_of_a_run_apply(saved: Path) -> None:
    model = long_model()
    fields: dict[str, Any] = {"num_selected": 20, "num_recent": 4, "reuse_capacity": 0, "engine": "mapped"}
    fields["group_size"] = 4  # as it is stored
    with DiskSwapCache.open(saved, model, **fields) as cache:
        assert {name: getattr(cache.config, name) for name in fields} == fields
        first = generate(model, cache, ids_of(model))
    with _prefilled(model, **fields) as cache:
        assert first.tokens.shape == generate(model, cache, ids_of(model)).tokens.shape
    with DiskSwapCache.open(saved, model, exact=True) as cache:
        expected = generate(model, DynamicCache(config=model.config), ids_of(model))
        assert_exact(expected, generate(model, cache, ids_of(model)))


def test_an_exact_context_has_nothing_to_select_by(tmp_path: Path) -> None:
    model = tiny("llama")
    with DiskSwapCache(model, exact=True, **SMALL) as cache:
        generate(model, cache, ids_of(model), max_new_tokens=1)
        cache.save(tmp_path / "context")
    with pytest.raises(ConfigError, match="exact"):
        DiskSwapCache.open(tmp_path / "context", model, exact=False)
    with DiskSwapCache.open(tmp_path / "context", model) as cache:
        assert cache.config.exact is True


def test_nothing_to_save(tmp_path: Path) -> None:
    """A fork of nothing is a new cache."""
    model = tiny("llama")
    with DiskSwapCache(model, exact=True, **SMALL) as cache:
        with pytest.raises(ValueError, match="nothing to save"):
            cache.save(tmp_path / "context")
        with copy.deepcopy(cache) as twin:
            expected = generate(model, DynamicCache(config=model.config), ids_of(model))
            assert_exact(expected, generate(model, twin, ids_of(model)))
        assert cache.tokens == 0
    assert list(tmp_path.iterdir()) == []


def test_a_mask_that_shows_padding_is_refused(tmp_path: Path) -> None:
    model, mask = long_model(), padding(2, LONG)
    ids = ids_of(model, 2).masked_fill(mask == 0, PAD)
    with DiskSwapCache(model, **SPARSE) as cache:
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
        cache.save(tmp_path / "context")
    with DiskSwapCache.open(tmp_path / "context", model) as cache:
        assert torch.equal(cache.attention_mask, mask) and torch.equal(cache.input_ids, ids)
        new = torch.full((2, 1), 9)
        with pytest.raises(PromptError, match="attention_mask is missing"):
            model(new, past_key_values=cache)
        with pytest.raises(PromptError, match="shows token 0 of sequence 1"):
            model(new, attention_mask=torch.ones(2, LONG + 1), past_key_values=cache)
        with torch.no_grad():
            model(new, attention_mask=torch.cat([mask, new.clamp(max=1)], 1), past_key_values=cache)
        assert cache.report().tokens == LONG + 1


def test_a_budget_on_opening(saved: Path) -> None:
    model = long_model()
    with pytest.raises(BudgetError, match="memory"):
        DiskSwapCache.open(saved, model, memory=20_000, max_context=700)
    with DiskSwapCache.open(saved, model, memory="2MiB", max_context=700) as cache:
        generate(model, cache, ids_of(model))
        report = cache.report()
        assert report.memory_budget == 2 * 2**20 and report.peak_memory_bytes <= report.memory_budget
        assert (cache.config.rank, cache.config.group_size, cache.config.max_context) == (8, 4, 700)


def test_encrypted(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    model, right, wrong = long_model(), tmp_path / "key", tmp_path / "other"
    right.write_bytes(bytes(range(32)))
    wrong.write_text("00" * 32)
    with _prefilled(model) as cache:
        expected = generate(model, cache, ids_of(model))
        plain = cache.input_ids.numpy().tobytes()
    with _prefilled(model, encryption_key=right) as cache:
        cache.save(tmp_path / "context")
    for path in (tmp_path / "context").iterdir():
        assert plain[:64] not in path.read_bytes()
    with pytest.raises(EncryptionKeyError, match="encrypted"):
        DiskSwapCache.open(tmp_path / "context", model)
    with pytest.raises(EncryptionKeyError, match="not the one"):
        DiskSwapCache.open(tmp_path / "context", model, encryption_key=wrong)
    with DiskSwapCache.open(tmp_path / "context", model, encryption_key=lambda: bytes(range(32))) as cache:
        assert_exact(expected, generate(model, cache, ids_of(model)), bitwise=True)


def test_parts_of_two_encrypted_contexts_cannot_be_mixed(tmp_path: Path) -> None:
    """Whoever has not the key may write anything, digests included, and gets an error."""
    pytest.importorskip("cryptography")
    model, texts = tiny("llama"), (ids_of(tiny("llama")), prompt(tiny("llama"), 1, PROMPT, seed=3))
    for name, ids in zip("ab", texts, strict=True):
        with OffloadCache(model, encryption_key=lambda: bytes(32), **SMALL) as cache:
            generate(model, cache, ids, max_new_tokens=1)
            cache.save(tmp_path / name)
    one, other = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    layers = (one.layers[0], other.layers[1], *one.layers[2:])
    mixed = one.model_copy(update={"layers": layers})
    for name in other.layers[1].state.file, *(part.file for part in other.layers[1].parts):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    (tmp_path / "a" / "manifest.json").write_bytes(mixed.to_bytes())
    with pytest.raises(CorruptRecordError, match="cache"):
        OffloadCache.open(tmp_path / "a", model, encryption_key=lambda: bytes(32))
    (tmp_path / "a" / "manifest.json").write_bytes(one.to_bytes())
    OffloadCache.open(tmp_path / "a", model, encryption_key=lambda: bytes(32)).close()


def test_adapters_that_changed_since(tmp_path: Path) -> None:
    """What is held was made with the adapter; it cannot be saved as if it had not been."""
    peft = pytest.importorskip("peft")
    model = fresh("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    with OffloadCache(wrapped, **SMALL) as cache:
        expected = generate(wrapped, cache, ids_of(model))
        cache.save(tmp_path / "context")
        with wrapped.disable_adapter(), pytest.raises(ContextMismatchError, match=r"adapters[.]disabled"):
            cache.save(tmp_path / "other")
        turn = torch.cat([expected.tokens, ids_of(model)], 1)
        following = generate(wrapped, cache, turn)
    with wrapped.disable_adapter(), pytest.raises(ContextMismatchError, match=r"adapters[.]disabled"):
        OffloadCache.open(tmp_path / "context", wrapped)
    with OffloadCache.open(tmp_path / "context", wrapped) as cache:
        assert_exact(following, generate(wrapped, cache, turn))


def test_a_mask_may_hide_more_and_padding_may_go() -> None:
    model, mask = tiny("llama"), padding(2)
    ids = prompt(model, 2).masked_fill(mask == 0, PAD)
    reference = DynamicCache(config=model.config)
    with OffloadCache(model, **SMALL) as cache, torch.no_grad():
        for each in (cache, reference):
            model(ids, attention_mask=mask, past_key_values=each)
        more = torch.cat([mask, torch.ones(2, 3).long()], 1)
        more[:, 20:30] = 0
        results = [
            model(prompt(model, 2, 3), attention_mask=more, past_key_values=each).logits for each in (cache, reference)
        ]
        assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].std()
        for each in (cache, reference):
            each.batch_select_indices(torch.tensor([0]))
        assert bool(cache.attention_mask.all())
        results = [model(prompt(model, 1, 3), past_key_values=each).logits for each in (cache, reference)]
        assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].std()


def test_what_could_not_be_written_is_never_saved(tmp_path: Path) -> None:
    """However often it is tried; nor forked. After `reset` the cache is as new."""
    model = tiny("llama")
    with OffloadCache(model, **SMALL) as cache, torch.no_grad():
        make, full = cache.storage.open_store, ["layer 1"]

        def open_store(record_bytes: int, name: str) -> Store:
            store = make(record_bytes, name)
            if name in full:
                cache.storage.stores[-1] = store = FaultyStore(store, "write", 1, errno.ENOSPC)
            return store

        cache.storage.open_store = open_store
        model(ids_of(model), past_key_values=cache)
        for _ in range(2):
            for use in (cache.fork, lambda: cache.save(tmp_path / "context")):
                with pytest.raises(StoreError, match=r"layer 1|could not be written"):
                    use()
        assert list(tmp_path.iterdir()) == []
        full.clear()
        cache.reset()
        model(ids_of(model), past_key_values=cache)
        cache.save(tmp_path / "context")
    assert verify(tmp_path / "context").whole


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trace", "victim"), ("verify", False), ("encryption_key", "victim"), ("max_context", 2**40), ("memory", 1),
        ("io_timeout", 1e-9), ("num_recent", 2**30), ("adapter", "victim"), ("group_size", 0), ("nonsense", 1),
    ],
)  # fmt: skip
def test_the_manifest_decides_nothing_that_is_the_users(field: str, value: Any, tmp_path: Path) -> None:
    model, victim = tiny("llama"), tmp_path / "victim"
    victim.write_text("mine")
    with _prefilled(model) as cache:
        cache.save(tmp_path / "context")
    there = read_manifest(tmp_path / "context")
    config = {**there.config, field: str(victim) if value == "victim" else value}
    forged = there.model_copy(update={"config": config})
    (tmp_path / "context" / "manifest.json").write_bytes(forged.to_bytes())
    with pytest.raises(ContextError, match=field):
        DiskSwapCache.open(tmp_path / "context", model)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("cls", [DiskSwapCache, ClusterCache, AbstractTreeCache])
def test_a_context_from_before_a_field_was_added(cls: Any, tmp_path: Path) -> None:
    """It answers as it did, also for a budget; a field that no version was without is missed."""
    model, folder = tiny("llama"), tmp_path / "context"
    with cls(model) as cache, torch.no_grad():
        model(ids_of(model), past_key_values=cache)
        cache.save(folder)
        expected = model(ids_of(model)[:, :1], past_key_values=cache).logits
    assert "entry_bits" in cls.config_class.added_later

    def without(*names: str) -> None:
        def drop(values: dict[str, Any]) -> None:
            for name in names:
                del values["config"][name]

        rewrite_values(folder, drop)

    def under_earlier_names(values: dict[str, Any]) -> None:
        for earlier, name in cls.config_class.renamed.items():
            values["config"][earlier] = values["config"].pop(name)

    without(*cls.config_class.added_later)
    rewrite_values(folder, under_earlier_names)
    for fields in ({}, {"memory": "100MiB"}):
        with cls.open(folder, model, **fields) as cache, torch.no_grad():
            assert cache.config.entry_bits is None
            found = model(ids_of(model)[:, :1], past_key_values=cache).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # the order of sums in float32
    without("num_sinks")
    with pytest.raises(ContextError, match="it has no field 'num_sinks'"):
        cls.open(folder, model)


def test_a_budget_leaves_what_fits_as_it_was(tmp_path: Path) -> None:
    model = long_model()
    fields = {**SPARSE, "rank": None, "summary_dtype": "int8", "num_sinks": 8, "num_selected": 48}
    with _prefilled(model, **fields) as cache:
        cache.save(tmp_path / "context")
        stored = cache.offloaded[0].predictor.fitted.keys.adapter.shape[-1]
    with DiskSwapCache.open(tmp_path / "context", model, memory="100MiB", max_context=700) as cache:
        assert (cache.config.num_sinks, cache.config.num_selected, cache.config.rank) == (8, 48, None)
    least = "6/11"
    with DiskSwapCache.open(tmp_path / "context", model, memory=least, max_context=700, engine="direct") as cache:
        assert cache.config.num_sinks == 8 and cache.config.rank in (None, stored)
        generate(model, cache, ids_of(model), max_new_tokens=40)
        assert cache.report().peak_memory_bytes <= cache.report().memory_budget


def test_a_budget_without_room_for_candidates_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    model, context = long_model(), tmp_path / "context"
    fields = {**SPARSE, "num_selected": 300, "look_ahead": False, "write_queue": "64KiB"}
    with _prefilled(model, **fields) as cache:
        cache.save(context)
        saved = dataclasses.asdict(cache.config)
    limits = {"max_context": 700, "max_batch": 1, "engine": "direct"}
    least, more = (
        DiskSwapCache.plan(
            Geometry.of(model), DiskSwapConfig.load(None, {**saved, **limits, "candidates": some}), 700, 1
        ).peak_bytes
        for some in (False, True)
    )
    assert least < more
    for memory, some in ((least, False), (more - 1, False), (more, True)):
        with DiskSwapCache.open(context, model, memory=memory, max_context=700, engine="direct") as cache:
            assert cache.config.candidates is some
            own = dataclasses.asdict(cache.config)
            assert {name for name in own if own[name] != saved[name]} <= {*limits, "memory", "candidates"}


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    with OffloadCache(model, path="scratch", **SMALL) as cache:
        generate(model, cache, ids_of(model), max_new_tokens=1)
        with cache.fork() as twin:
            monkeypatch.chdir("/")
            generate(model, twin, torch.cat([ids_of(model), ids_of(model)], 1), max_new_tokens=1)


def test_a_context_that_others_may_read_is_copied_not_linked(tmp_path: Path) -> None:
    model = tiny("llama")
    with _prefilled(model) as cache:
        cache.save(tmp_path / "context")
    for path in (tmp_path / "context").iterdir():
        path.chmod(0o666)
    with DiskSwapCache.open(tmp_path / "context", model) as cache:
        cache.save(tmp_path / "second")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "second").iterdir()} == {0o600}


def test_a_sync_that_fails_leaves_the_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with _prefilled(model, cls=OffloadCache) as cache:
        expected = generate(model, DynamicCache(config=model.config), ids_of(model))
        if not cache.storage.description.endswith("O_DIRECT"):
            pytest.skip("writes go through the page cache here, and are doubtful after that")
        with monkeypatch.context() as patch:

            def full(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "fsync", full)
            with pytest.raises(StoreError):
                cache.save(tmp_path / "context")
        assert list(tmp_path.iterdir()) == []
        assert_exact(expected, generate(model, cache, ids_of(model)))
