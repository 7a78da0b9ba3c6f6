"""Steps and changes that break off, modes and models that mix: a cache is right afterwards, or says that it is not."""

from __future__ import annotations

import contextlib
import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_cache import Gathers
from harness import Decoded, assert_exact, build, compare, fingerprint, generate, prompt, since, unchanged
from layered_models import glm5_next, layered
from long_models import EXACT, LENGTH, dynamic, follow, long_fresh, long_tiny, singles, sparse, step
from pairwise import combinations
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM, PreTrainedConfig

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.fetch import Prefetcher

SLOW = pytest.mark.slow
ALL: dict[str, Any] = {"num_selected": 2048, "reuse_capacity": 60}


def assert_heals(model: Any, cache: DiskSwapCache, rows: int = 2, **fields: Any) -> None:
    """After `reset` the cache gives what a new one gives."""
    cache.reset()
    ids = prompt(model, rows, LENGTH)
    healed = generate(model, cache, ids, max_new_tokens=6)
    with sparse(model, **fields) as new:
        assert_exact(generate(model, new, ids, max_new_tokens=6), healed)


@contextlib.contextmanager
def writes_fail(cache: DiskSwapCache, layer_idx: int, error: type[StoreError], times: int = 1) -> Iterator[list[Any]]:
    """The next `times` writes handed to the prefetcher for that layer raise; yields what was refused."""
    store, refused, write = cache.layers[layer_idx].history.store, [], Prefetcher.write

    def failing(prefetcher: Prefetcher, target: Any, ids: Any, records: torch.Tensor, *more: Any) -> None:
        if target is store and len(refused) < times:
            refused.append(ids)
            raise error(errno.ENOSPC, "layer 0: write was made to fail")
        write(prefetcher, target, ids, records, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefetcher, "write", failing)
        yield refused


@contextlib.contextmanager
def reads_fail(cache: DiskSwapCache, layer_idx: int) -> Iterator[list[Any]]:
    """All reads of that layer's store fail; yields what was refused."""
    cache.storage.prefetcher.flush()
    store, refused = cache.layers[layer_idx].history.store, []

    def failing(ids: Any, out: torch.Tensor) -> None:
        refused.append(ids)
        raise StoreError(errno.EIO, f"layer {layer_idx}: read was made to fail")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", failing)
        yield refused


# ---------------------------------------------------------------------------------------------- failing writes


@pytest.mark.parametrize(
    ("rows", "error", "reuse", "fields"),
    combinations(
        ([0, 0, 0], [2, 0, 0], [0, 1, 2]),
        {error.__name__: error for error in (StoreFullError, StoreError)},
        (0, 60),
        {"sparse": {}, "exact": EXACT, "direct": {"engine": "direct"}},
    ),
)
def test_a_write_that_fails_in_the_first_layer(
    rows: list[int],
    error: type[StoreError],
    reuse: int,
    fields: dict[str, Any],
    tmp_path: Path,
    checked_gathers: Gathers,
) -> None:
    """The step gave nothing and took nothing in: the same step again, and all that follow, are as without the error."""
    model = long_tiny("llama")
    fields = {"reuse_capacity": reuse, "path": tmp_path, **fields}
    tokens = singles(model, 3, 12)
    ids = prompt(model, 3, LENGTH)
    with sparse(model, **fields) as cache, sparse(model, **fields) as twin:
        for held in (cache, twin):
            step(model, held, ids)
            follow(model, held, tokens[:3])
            held.reorder_cache(torch.tensor(rows))
        expected = follow(model, twin, tokens[3:])
        results, failures = [], 0
        with writes_fail(cache, 0, error, 2) as refused:
            for token in tokens[3:]:
                for _ in range(3):
                    length = cache.get_seq_length()
                    try:
                        results.append(step(model, cache, token)[:, 0])
                        break
                    except error:
                        failures += 1
                        assert [layer.length for layer in cache.offloaded] == [length] * 3
        assert failures == len(refused) == 2
        assert_exact(expected, Decoded(torch.cat(tokens[3:], 1), torch.stack(results)))
        if not fields.get("exact"):
            assert len(checked_gathers) >= 2 * 3 * 12
        cache.crop(-30)
        twin.crop(-30)
        assert_exact(*(follow(model, held, singles(model, 3, 9, 5)) for held in (twin, cache)))


@pytest.mark.parametrize(("layer_idx", "fields"), combinations((1, 2), {"sparse": {}, "exact": EXACT}))
def test_a_write_that_fails_in_a_later_layer(layer_idx: int, fields: dict[str, Any]) -> None:
    """The first layers have taken the token in: they give it back, and all goes on where it was before the step."""
    model = long_tiny("llama")
    tokens = singles(model, 2, 20)
    with sparse(model, **fields) as cache, sparse(model, **fields) as twin:
        for held in (cache, twin):
            step(model, held, prompt(model, 2, LENGTH))
        expected = follow(model, twin, tokens)
        with writes_fail(cache, layer_idx, StoreFullError) as refused, pytest.raises(StoreFullError):
            follow(model, cache, tokens)
        assert len(refused) == 1
        taken = cache.input_ids.shape[1] - LENGTH
        assert 0 < taken < 8
        assert [layer.length for layer in cache.offloaded] == [LENGTH + taken] * 3
        result = follow(model, cache, tokens[taken:])
        assert_exact(Decoded(expected.tokens, expected.logits[taken:]), Decoded(expected.tokens, result.logits))
        assert [layer.length for layer in cache.offloaded] == [LENGTH + 20] * 3


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "fork", "save"])
def test_changes_after_a_step_that_failed_are_made_of_what_was_before_it(change: str, tmp_path: Path) -> None:
    model = long_tiny("llama")
    tokens = singles(model, 2, 8)
    with sparse(model, **EXACT) as cache:
        step(model, cache, prompt(model, 2, LENGTH))
        with writes_fail(cache, 1, StoreFullError), pytest.raises(StoreFullError):
            follow(model, cache, tokens)
        before = cache.input_ids.shape[1]
        assert {layer.length for layer in cache.offloaded} == {before}
        changes: dict[str, Any] = {
            "crop": lambda: cache.crop(-3),
            "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
            "repeat": lambda: cache.batch_repeat_interleave(2),
            "select": lambda: cache.batch_select_indices(torch.tensor([1])),
            "fork": lambda: cache.fork().close(),
            "save": lambda: cache.save(tmp_path / "context"),
        }
        changes[change]()
        assert {layer.length for layer in cache.offloaded} == {before - 3 if change == "crop" else before}


def test_a_window_that_moved_on_does_not_go_back() -> None:
    model = long_tiny("gemma3")
    with sparse(model, **EXACT) as cache:
        step(model, cache, prompt(model, 2, 60))
        with writes_fail(cache, 3, StoreFullError) as refused, pytest.raises(StoreFullError):
            follow(model, cache, singles(model, 2, 8))
        assert len(refused) == 1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="reset"):
                step(model, cache, singles(model, 2, 1)[0])
        with pytest.raises(RuntimeError, match="reset"):
            cache.crop(-1)
        cache.reset()
        step(model, cache, prompt(model, 2, 60))


# ---------------------------------------------------------------------------------------------- before any layer


@pytest.mark.parametrize(
    ("name", "fields"),
    combinations(("llama", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1"), {"exact": EXACT, "all": ALL}),
)
def test_a_step_that_fails_before_the_first_layer(name: str, fields: dict[str, Any]) -> None:
    """A token that does not exist, before and after the prompt: everything that follows is as with `DynamicCache`. If
    the cache is closed then, it takes no other forward."""
    model = long_tiny(name)
    bad = torch.full((2, 1), 10**6)
    ids, tokens = prompt(model, 2, 90), singles(model, 2, 12)
    plain = dynamic(model)
    expected = [step(model, plain, ids), *(step(model, plain, token) for token in tokens)]
    with unchanged(model), sparse(model, **fields) as cache:
        results = []
        for number, part in enumerate([ids, *tokens]):
            if number in (0, 1, 2, 7):
                for wrong in (bad, bad.repeat(1, 3)):
                    with pytest.raises(IndexError):
                        step(model, cache, wrong)
                assert cache.get_seq_length() == (89 + number if number else 0)
            results.append(step(model, cache, part))
        assert_exact(*(Decoded(ids, torch.cat(logits)) for logits in (expected, results)))
        assert cache.report().tokens == cache.input_ids.shape[1] == 102
    with sparse(model, **fields) as closed:
        with pytest.raises(IndexError):
            step(model, closed, bad)
        closed.close()
        with pytest.raises((RuntimeError, IndexError)):  # as in `test_the_report_after_close`
            step(model, closed, ids)
        assert not +closed.storage.account.by_owner


class Boom(Exception):
    """Raised within a forward."""


@pytest.mark.parametrize(
    ("place", "layer_idx"), combinations(("self_attn", "feed_forward", "write", "layer"), (0, 1, 3))
)
def test_a_step_that_fails_beside_linear_states(place: str, layer_idx: int) -> None:
    """A state that has moved cannot be told from the lengths, nor go back: refused, or right."""
    model = long_tiny("falcon_h1")
    tokens = singles(model, 2, 8)
    plain = dynamic(model)
    with sparse(model, **EXACT) as cache:
        for held in (plain, cache):
            step(model, held, prompt(model, 2, 90))
        expected = follow(model, plain, tokens)

        def explode(*arguments: Any) -> None:
            raise Boom

        done = 0
        if place == "write":
            with writes_fail(cache, layer_idx, StoreFullError), pytest.raises(StoreFullError):
                for token in tokens:
                    step(model, cache, token)
                    done += 1
        else:
            block = model.model.layers[layer_idx]
            module = block if place == "layer" else getattr(block, place)
            handle = module.register_forward_pre_hook(explode)
            with pytest.raises(Boom):
                step(model, cache, tokens[0])
            handle.remove()
        try:
            result = follow(model, cache, tokens[done:])
        except RuntimeError as error:
            assert "reset" in str(error)
        else:
            assert_exact(Decoded(result.tokens, expected.logits[done:]), result)
        cache.reset()
        ids = prompt(model, 2, 90)
        assert_exact(*(generate(model, held, ids, max_new_tokens=5) for held in (dynamic(model), cache)))


@pytest.mark.parametrize("make", [
    lambda: layered("linear"), pytest.param(glm5_next, marks=since("5.23", "there is no such model")),
])  # fmt: skip
def test_a_step_that_fails_in_a_first_layer_without_attention(make: Callable[[], Any]) -> None:
    """Its state has moved, and no layer that tells its length was there. The second model has several streams."""
    model = make()
    ids = prompt(model, 1, 42)
    first = next(part for name, part in model.named_modules() if name.endswith("layers.0.mlp") and "visual" not in name)

    def explode(*arguments: Any) -> None:
        raise Boom

    with torch.no_grad(), DiskSwapCache(model, engine="memory", exact=True) as cache:
        step(model, cache, ids[:, :40])
        handle = first.register_forward_pre_hook(explode)
        with pytest.raises(Boom):
            step(model, cache, ids[:, 40:41])
        handle.remove()
        with pytest.raises(RuntimeError, match="reset"):
            step(model, cache, ids[:, 40:41])


# ---------------------------------------------------------------------------------------------- without a hook


@pytest.mark.parametrize(
    ("fields", "layer_idx", "call"),
    combinations(
        {"sparse": {"reuse_capacity": 0}, "exact": EXACT, "all": ALL},
        (0, 1, 2),
        {"1-inner": (1, "inner"), "1-outer": (1, "outer"), "5-inner": (5, "inner")},
    ),
)
def test_an_error_within_the_inner_model(fields: dict[str, Any], layer_idx: int, call: tuple[int, str]) -> None:
    """`model.model(...)` passes no hook of the whole model: the next forward is refused all the same."""
    tokens, again = call
    model = long_tiny("llama")

    def inner(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.model(ids, past_key_values=cache).last_hidden_state

    with sparse(model, **{**fields, "reuse_capacity": 0}) as cache:
        inner(prompt(model, 2, LENGTH))
        inner(singles(model, 2, 1)[0])
        with reads_fail(cache, layer_idx) as refused, pytest.raises(StoreError):
            inner(prompt(model, 2, tokens, 3))
        assert refused
        for _ in range(2):
            with pytest.raises(RuntimeError, match="reset"):
                if again == "inner":
                    inner(prompt(model, 2, tokens, 3))
                else:
                    step(model, cache, prompt(model, 2, tokens, 3))
        cache.reset()
        plain = dynamic(model)
        if fields.get("exact") or fields.get("num_selected") == ALL["num_selected"]:
            for part in (prompt(model, 2, LENGTH), *singles(model, 2, 3)):
                with torch.no_grad():
                    expected = model.model(part, past_key_values=plain).last_hidden_state
                assert_exact(Decoded(part, expected), Decoded(part, inner(part)))
        assert_heals(model, cache, **{**fields, "reuse_capacity": 0})


# ---------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("engine", "reuse"),
    [
        ("mapped", 60), ("direct", 0),
        *(pytest.param(*one, marks=SLOW) for one in (("mapped", 0), ("direct", 60), ("memory", 0), ("memory", 60))),
    ],
)  # fmt: skip
def test_inference_mode_then_no_grad(engine: str, reuse: int, tmp_path: Path, checked_gathers: Gathers) -> None:
    model = long_tiny("llama")
    ids, results = prompt(model, 2, LENGTH), []
    for first, second in ((False, False), (True, False), (False, True), (True, True)):
        with sparse(model, engine=engine, path=tmp_path, reuse_capacity=reuse) as cache:
            with torch.inference_mode(first):
                step(model, cache, ids[:, :-6])
                follow(model, cache, list(ids[:, -6:-3].split(1, 1)))
            with torch.inference_mode(second):
                out = [generate(model, cache, ids, max_new_tokens=6)]
                cache.reorder_cache(torch.tensor([1, 1]))
                cache.crop(-50)
                out.append(follow(model, cache, singles(model, 2, 3)))
            with torch.inference_mode(first):
                cache.reset()
                step(model, cache, ids)
            with torch.inference_mode(second):
                cache.batch_repeat_interleave(2)
                out.append(follow(model, cache, singles(model, 4, 5)))
            results.append(out)
    for out in results[1:]:
        for expected, got in zip(results[0], out, strict=True):
            assert_exact(expected, got)
    assert len(checked_gathers) == 4 * 3 * (3 + 5 + 3 + 5)


@pytest.mark.parametrize(
    ("fields", "when", "reset"),
    combinations({"sparse": {}, "exact": EXACT}, ("prompt", "decoding", "several"), (True, False)),
)
def test_one_step_in_training_mode(fields: dict[str, Any], when: str, reset: bool, checked_gathers: Gathers) -> None:
    """Dropout of attention is the model's own business in that step; the layers are not written off for it."""
    model = long_fresh("llama", attention_dropout=0.2)
    ids = prompt(model, 2, LENGTH)
    late = {"prompt": ids[:, :0], "decoding": prompt(model, 2, 1, 4), "several": prompt(model, 2, 5, 4)}[when]

    def feed(cache: Any) -> torch.Tensor:
        torch.manual_seed(5)
        try:
            model.train(when == "prompt")
            step(model, cache, ids)
            model.train()
            return step(model, cache, late if when != "prompt" else prompt(model, 2, 1, 4))
        finally:
            model.eval()

    with unchanged(model), sparse(model, **fields) as cache:
        result = feed(cache)
        plain = dynamic(model)
        assert_exact(Decoded(ids, feed(plain)), Decoded(ids, result))
        further = singles(model, 2, 4)
        if reset:
            cache.reset()
            assert_heals(model, cache, **fields)
        else:
            got = follow(model, cache, further)
            if fields:
                assert_exact(follow(model, plain, further), got)
        assert cache.report().layers == {"unknown": 0, "tagged": 3, "full": 0, "kept": 0}
        if not fields:
            assert len(checked_gathers) > 0


# ---------------------------------------------------------------------------------------------- two models


def assert_stock(model: Any) -> None:
    """No config carries a name of ours."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            name = config._attn_implementation_internal
            assert name is None or (type(name) is str and "offload" not in name), name


@pytest.mark.parametrize(
    ("order", "fields"),
    [
        ("first closes last", ALL), ("garbage", {}),
        *(pytest.param(*one, marks=SLOW) for one in (
            ("first closes first", EXACT), ("first closes first", ALL), ("first closes first", {}),
            ("first closes last", EXACT), ("first closes last", {}), ("garbage", EXACT), ("garbage", ALL),
        )),
    ],
)  # fmt: skip
def test_two_models_with_one_config(fields: dict[str, Any], order: str, checked_gathers: Gathers) -> None:
    """Each stays right while the other's cache opens and closes; at the end both are as before."""
    models = [long_fresh("llama")]
    models.append(build(LlamaForCausalLM, models[0].config, seed=3))
    assert models[0].config is models[1].config
    ids = prompt(models[0], 2, LENGTH)

    def expected(model: Any) -> Decoded:
        if fields:
            return generate(model, dynamic(model), ids, max_new_tokens=6)
        alone = long_fresh("llama") if model is models[0] else build(LlamaForCausalLM, long_fresh("llama").config, 3)
        with sparse(alone) as cache:
            return generate(alone, cache, ids, max_new_tokens=6)

    references = [expected(model) for model in models]
    assert not compare(*references).exact
    before = [fingerprint(model) for model in models]
    caches: list[Any] = [sparse(model, **fields) for model in models]

    def check(number: int) -> None:
        assert caches[number].report().layers["full"] == 0
        assert_exact(references[number], generate(models[number], caches[number], ids, max_new_tokens=6))
        assert caches[number].report().layers["tagged"] == 3
        caches[number].reset()

    check(0)
    check(1)
    going, staying = (1, 0) if order == "first closes last" else (0, 1)
    if order == "garbage":
        step(models[going], caches[going], ids)
        gone = weakref.ref(caches[going])
        caches[going] = None
        gc.collect()
        assert gone() is None
    else:
        step(models[going], caches[going], ids)
        caches[going].close()
    check(staying)
    caches[going] = sparse(models[going], **fields)
    check(going)
    check(staying)
    caches[going].close()
    check(staying)
    caches[staying].close()
    assert [fingerprint(model) for model in models] == before
    for model in models:
        assert_stock(model)
        plain = generate(model, dynamic(model), ids, max_new_tokens=6)
        if fields:
            assert_exact(references[models.index(model)], plain, bitwise=True)


@pytest.mark.parametrize(
    ("fields", "close_outer_first", "outer_first"),
    combinations({"exact": EXACT, "all": ALL}, (True, False), (False, True)),
)
def test_a_cache_on_a_model_and_one_on_its_base(
    fields: dict[str, Any], close_outer_first: bool, outer_first: bool, checked_gathers: Gathers
) -> None:
    """The hooks of both lie on the same blocks; each cache gets each verb once, and each closes for itself."""
    model = long_fresh("llama")
    ids, tokens = prompt(model, 2, LENGTH), singles(model, 2, 4)

    def hidden(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            parts = [model.model(part, past_key_values=cache).last_hidden_state[:, -1] for part in (ids, *tokens)]
        return torch.stack(parts)

    expected_hidden = Decoded(ids, hidden(dynamic(model)))
    expected = generate(model, dynamic(model), ids, max_new_tokens=6)
    before = fingerprint(model)
    caches: dict[str, DiskSwapCache] = {}
    for which in ("outer", "inner") if outer_first else ("inner", "outer"):
        caches[which] = sparse(model if which == "outer" else model.model, **fields)

    def check(which: str) -> None:
        cache = caches[which]
        if which == "outer":
            assert_exact(expected, generate(model, cache, ids, max_new_tokens=6))
        else:
            assert_exact(expected_hidden, Decoded(ids, hidden(cache)))
        assert cache.report().layers["tagged"] == 3
        assert cache.report().decode_steps == (5 if which == "outer" else 4)
        cache.reset()

    for which in ("outer", "inner", "outer"):
        check(which)
    first, second = ("outer", "inner") if close_outer_first else ("inner", "outer")
    caches[first].close()
    check(second)
    caches[second].close()
    assert fingerprint(model) == before
    assert_stock(model)
    assert_exact(expected, generate(model, dynamic(model), ids, max_new_tokens=6), bitwise=True)


# ---------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("fields", "name", "rows"),
    combinations({"exact": EXACT, "all": ALL}, ("llama", "gemma3"), ([2, 0], [1], [True, False, True], (2, 2, 1))),
)
def test_rows_given_as_a_list(fields: dict[str, Any], name: str, rows: Any, checked_gathers: Gathers) -> None:
    model = long_tiny(name)
    ids = prompt(model, 3, 90)
    plain = dynamic(model)
    with sparse(model, **fields) as cache:
        for held in (plain, cache):
            step(model, held, ids)
        plain.batch_select_indices(torch.tensor(rows))
        cache.batch_select_indices(rows)
        count = 2 if rows == [True, False, True] else len(rows)
        tokens = singles(model, count, 5)
        assert_exact(follow(model, plain, tokens), follow(model, cache, tokens))
        kept = ids[torch.tensor(rows)]
        more = torch.cat([kept, *tokens, prompt(model, count, 2, 4)], 1)
        assert_exact(*(generate(model, held, more, max_new_tokens=3) for held in (plain, cache)))


@pytest.mark.parametrize(
    ("name", "engine"), combinations(("llama", "gemma3", "deepseek_v2", "falcon_h1"), ("memory", "direct"))
)
@pytest.mark.filterwarnings("ignore:.*cannot be sparse")
def test_the_report_after_close(name: str, engine: str, tmp_path: Path) -> None:
    """The last one; nothing is held."""
    model = long_tiny(name)
    cache = sparse(model, engine=engine, path=tmp_path)
    generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=5)
    cache.storage.prefetcher.flush()
    last = cache.report()
    assert last.tokens == LENGTH + 4
    assert last.decode_steps == 4
    assert last.memory_bytes > 0
    assert last.layers["kept"] == {"gemma3": 2}.get(name, 0)
    cache.close()
    for _ in range(2):
        assert cache.report() == last
        assert cache.memory_bytes == 0
        assert cache.disk_bytes == 0
        assert {owner: held for owner, held in cache.storage.account.by_owner.items() if held} == {}
        cache.close()
    with pytest.raises((RuntimeError, IndexError)):  # IndexError: linear states are looked up first, and gone
        step(model, cache, prompt(model, 2, 1))
    assert str(cache.report()) == str(last)


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("reuse", [{}, {"reuse_capacity": 100_000}], ids=["default reuse", "large reuse"])
def test_more_selected_than_there_is(reuse: dict[str, int], tmp_path: Path, checked_gathers: Gathers) -> None:
    """Buffers are of the size of what is there, not of what might be asked for."""
    model = long_tiny("llama")
    ids = prompt(model, 2, LENGTH)
    fields = {"group_size": 16, "num_recent": 16, "engine": "direct", "path": tmp_path, **reuse}
    with sparse(model, num_selected=100_000, **fields) as cache:
        result = generate(model, cache, ids, max_new_tokens=6)
        report = cache.report()
        assert report.selected_fraction == 1
        assert report.full_kv_bytes == 3 * 2 * (LENGTH + 5) * 2 * 2 * 16 * 4
        assert report.memory_bytes <= 4 * report.full_kv_bytes
        assert report.peak_memory_bytes <= 6 * report.full_kv_bytes
    assert_exact(generate(model, dynamic(model), ids, max_new_tokens=6), result)
    assert len(checked_gathers) == 5 * 3


@pytest.mark.parametrize("how", ["reset", "select", "rebuilt"])
def test_buffers_shrink_with_the_batch(how: str, tmp_path: Path, checked_gathers: Gathers) -> None:
    """Eight rows, then one: no more than twice of what a cache holds that never had eight."""
    model = long_tiny("llama")
    fields = {"engine": "direct", "path": tmp_path, "num_selected": 200, "reuse_capacity": 60}
    tokens = singles(model, 1, 4)
    with sparse(model, **fields) as small:
        step(model, small, prompt(model, 1, LENGTH))
        expected = follow(model, small, tokens)
        alone = dict(small.shared.storage.account.by_owner)
    with sparse(model, **fields) as cache:
        ids = prompt(model, 8, LENGTH)
        ids[:1] = prompt(model, 1, LENGTH)
        step(model, cache, ids)
        if how != "rebuilt":
            follow(model, cache, singles(model, 8, 2, 9))
            assert cache.storage.account.by_owner["staging"] >= 4 * alone["staging"]
        if how == "select":
            cache.crop(-2)
            cache.batch_select_indices(torch.tensor([0]))
        else:
            cache.reset()
            step(model, cache, prompt(model, 1, LENGTH))
        result = follow(model, cache, tokens)
        held = dict(cache.storage.account.by_owner)
        for owner in ("staging", "selection", "reuse slots", "rolling tail"):
            assert 0 < held[owner] <= 2 * alone[owner], owner
        if how == "select":  # compact keys of another adapter: it saw eight rows
            assert result.logits.isfinite().all()
        else:
            assert_exact(expected, result)
    assert len(checked_gathers) > 0


@pytest.mark.parametrize("name", ["deepseek_v2", "llama", "gemma3"])
@pytest.mark.parametrize("fields", [{}, EXACT], ids=["sparse", "exact"])
@pytest.mark.filterwarnings("ignore:.*cannot be sparse")
def test_nothing_of_the_prompt_stays_in_memory(
    fields: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_tiny(name)
    seen: list[StorageWeakRef] = []
    update = OffloadLayer.update

    def watched(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = update(layer, keys, values, *args, **kwargs)
        seen.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (keys, values, *out))
        return out

    monkeypatch.setattr(OffloadLayer, "update", watched)
    with sparse(model, engine="direct", path=tmp_path, **fields) as cache:
        for count, part in enumerate((prompt(model, 2, LENGTH), prompt(model, 2, 300, 4), *singles(model, 2, 3)), 1):
            step(model, cache, part)
            gc.collect()
            assert len(seen) == 4 * count * len(cache.offloaded)
            assert sum(not storage.expired() for storage in seen) == 0
        for layer in cache.offloaded:
            assert layer._sealed is None
        generate(model, cache, torch.cat([prompt(model, 2, LENGTH), prompt(model, 2, 300, 4), *singles(model, 2, 3),
                                          prompt(model, 2, 2, 8)], 1), max_new_tokens=3)  # fmt: skip
        gc.collect()
        assert sum(not storage.expired() for storage in seen) == 0


def test_an_interruption_at_the_very_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have the token, and the ids know of it; nobody got its logits."""
    model = long_tiny("llama")
    tokens = singles(model, 2, 6)
    with sparse(model, **EXACT) as cache, sparse(model, **EXACT) as twin:
        for held in (cache, twin):
            step(model, held, prompt(model, 2, LENGTH))
        expected = follow(model, twin, tokens)

        step(model, cache, tokens[0])
        append = cache.contents.tokens.append
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def append_and_stop(*arguments: Any) -> None:
                append(*arguments)
                raise KeyboardInterrupt

            patch.setattr(cache.contents.tokens, "append", append_and_stop)
            step(model, cache, tokens[1])
        with pytest.raises(RuntimeError, match=f"holds {LENGTH + 1:,} tokens"):
            step(model, cache, tokens[2])
        assert cache.input_ids.shape == (2, LENGTH + 1)
        result = follow(model, cache, tokens[1:])
        assert_exact(Decoded(expected.tokens, expected.logits[1:]), Decoded(expected.tokens, result.logits))
