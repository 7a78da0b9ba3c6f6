"""Models that choose by an indexer what they attend to: sparse steps that equal `DynamicCache`'s."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import harness
import numpy as np
import pytest
import torch
import walk
from harness import generate, prompt, since
from layered_models import dense_with_indexers, glm5_next, layered, mistral_large4
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, DiskSwapConfig, SpecCache, offload_cache
from hf_offload_cache.core import Filling, chosen_at_edge
from hf_offload_cache.errors import BudgetError, ConfigError, ContextError
from hf_offload_cache.fetch import Fetcher
from hf_offload_cache.history import PositionHistory
from hf_offload_cache.model import Geometry
from hf_offload_cache.tuning import shape_of
from hf_offload_cache.tuning.which_cache import step_bytes

LATER = since("5.23", "there is no such model, or it takes other fields and positions")
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "mistral_large4": mistral_large4,
    "glm5_next": glm5_next,
    **{
        name: lambda name=name: walk.tiny_model(walk.architectures()[name])  # type: ignore[misc]
        for name in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text")
    },
}
"""All that call `update_indexer`. Older versions of transformers store expanded keys and values instead of latents."""
UNLIKE = ("deepseek_v32", 8), ("glm5_next", 8), ("mistral_large4", 0), ("qwen4_exp_text", None)
"""Of these, and their `indexer_bits`, the ones that the default run takes: the others differ by their rotary
embeddings, gates and windows."""
BLOCKS = "glm5_next", "qwen4_exp_text"
"""Their indexers score blocks of tokens, so that the bits have no effect."""
CHANGED = "dots3_note_text", "glm5_next", "mistral_large4", "qwen4_exp_text"
AHEAD = {"dots3_note_text": 2, "hy_v4": 3, "mistral_large4": 2, "glm5_next": 1, "qwen4_exp_text": 0}
"""Layers whose reads begin early, if not all 4: not behind linear layers and windows, and with several streams, or keys
on the disk alone, only where a layer shares the indexer of the one before."""
LENGTH, NEW, TOPK = 150, 6, 24
SMALL: dict[str, Any] = {"group_size": 4, "num_recent": 8, "block_tokens": 16, "reuse_capacity": 12}
CLOSE = 1e-4
"""Largest difference of a logit, as a share of the largest."""


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize(
    ("cache_class", "chunk"),
    [(DiskSwapCache, None), *((one, 40) for one in (DiskSwapCache, AbstractTreeCache, ClusterCache, SpecCache))],
)
def test_steps_read_what_the_indexer_chose_and_no_more(cache_class: Any, chunk: int | None, tmp_path: Path) -> None:
    """A record of two tokens takes 4 KiB of the disk. A step of another cache would read all records of a layer."""
    model = layered("indexer")
    ids, options = prompt(model, 1, LENGTH), {"prefill_chunk_size": chunk}
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=NEW, **options)
    fields = {"group_size": 2, "num_recent": 4, "reuse_capacity": 0, "engine": "direct", "look_ahead": False}
    with cache_class(model, path=tmp_path, **fields) as cache:
        generate(model, cache, ids, max_new_tokens=1, **options)
        before, layers = cache.report().bytes_read, len(cache.layers)
        cache.reset()
        found = generate(model, cache, ids, max_new_tokens=NEW, **options)
        report = cache.report()
    assert torch.equal(found.tokens, expected.tokens)
    assert_close(found.logits, expected.logits)
    assert report.layers == {"unknown": 0, "tagged": layers, "full": 0, "kept": 0}
    assert report.chosen_by_model == layers and report.chosen_ahead == 0
    assert f"exact, in {layers} layers; {layers} layers read when needed" in str(report)
    read, steps = report.bytes_read - before, (NEW - 1) * layers
    assert 0 < read <= 4096 * steps * TOPK < 4096 * steps * LENGTH // 4
    assert report.selected_fraction is not None and report.selected_fraction <= (TOPK + 1) / LENGTH


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (one not in UNLIKE) + [LATER] * (one[0] in CHANGED))
        for one in itertools.product(ARCHITECTURES, (None, 0, 8))
    ],
)
def test_every_architecture_goes_on_as_with_a_dynamic_cache(name: str, bits: int | None, tmp_path: Path) -> None:
    """A padded batch in pieces, steps, other rows; then in a fork and in an opened context candidates, of which some
    are taken back, a turn, and steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ARCHITECTURES[name]()
    ids, mask = prompt(model, 2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :30] = 0  # at first fewer tokens are there than an indexer chooses
    ids[1, :30] = harness.PAD
    mixed = any("linear" in kind for kind in model.config.get_text_config().layer_types)

    def run(cache: Any, begin: int, *ends: int, rows: Any = slice(None)) -> list[torch.Tensor]:
        found = []
        for end in ends:
            positions = (mask[rows, :end].cumsum(1) - 1).clamp_min(0)[:, begin:]
            given = {"attention_mask": mask[rows, :end], "position_ids": positions, "past_key_values": cache}
            found.append(model(ids[rows, begin:end], logits_to_keep=1, **given).logits)
            begin = end
        return found

    def swap(cache: Any) -> None:
        cache.reorder_cache(torch.tensor([1, 0]))

    def go_on(cache: Any) -> list[torch.Tensor]:
        found = run(cache, 43, 44, rows=[1, 0])
        if not mixed:  # linear states cannot go back
            cache.activate_past_recording()
            found += run(cache, 44, 48, rows=[1, 0])
            cache.crop(-3)
            found += run(cache, 45, 46, rows=[1, 0])
        return found + run(cache, 44 if mixed else 46, 58, 59, 60, rows=[1, 0])

    plain = DynamicCache(config=model.config)
    with torch.no_grad(), warnings.catch_warnings(), contextlib.ExitStack() as closing:
        warnings.simplefilter("ignore")
        expected = run(plain, 0, 20, 40, 41, 42, 43)
        swap(plain)
        later = go_on(plain)
        fields = {**SMALL, "indexer_bits": bits, "look_ahead": True}
        with harness.unchanged(model), DiskSwapCache(model, path=tmp_path, **fields) as cache:
            coded = [layer.num_stores == 2 for layer in cache.layers if hasattr(layer, "indexer")]
            assert coded and all(coded) == any(coded) == (bits is not None and name not in BLOCKS)
            for own, other in zip(run(cache, 0, 20, 40, 41, 42, 43), expected, strict=True):
                assert_close(own, other)
            swap(cache)
            cache.save(tmp_path / "context")
            caches = cache.fork(), DiskSwapCache.open(tmp_path / "context", model, path=tmp_path)
            for one in caches:
                closing.enter_context(one)
                for own, other in zip(go_on(one), later, strict=True):
                    assert_close(own, other)
                report, states = one.report(), one.report().layers
                ahead = AHEAD.get(name, 4)
                assert report.chosen_ahead == ahead or (bits == 0 and 0 < report.chosen_ahead < ahead)
                assert states["tagged"] == sum(layer.is_initialized for layer in one.offloaded) > 0
            assert not any("cannot be sparse" in one for one in cache.report().warnings)
            assert "indexer" in str(Filling.reason_against(cache)) or mixed or states["kept"]
            closing.close()


@pytest.mark.parametrize(
    ("name", "attention"),
    [("deepseek_v32", "sdpa"), ("deepseek_v32", "eager"), pytest.param("hy_v4", "eager", marks=LATER)],
)
@since("5.23", "it stores keys and values instead of latents")
def test_pieces_of_a_long_prompt_make_no_keys_of_its_history(
    name: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a padded batch. They are made if a projection has a bias, because then it is no linear map, or if the budget
    has no room, of which a plan counts no more than there is."""
    model = ARCHITECTURES[name]()
    model.set_attn_implementation(attention)
    topk = model.config.index_topk
    stored, piece = 8 * topk, 40
    ids, mask = prompt(model, 2, stored + piece), torch.ones(2, stored + piece, dtype=torch.long)
    mask[1, :50] = 0
    projections = [module for name, module in model.named_modules() if name.endswith("kv_b_proj")]
    counts: list[int] = []

    def last_piece(cache: Any) -> torch.Tensor:
        counts.clear()
        for begin, end in ((0, stored), (stored, stored + piece)):
            positions = (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, begin:]
            given = {"attention_mask": mask[:, :end], "position_ids": positions, "past_key_values": cache}
            found = model(ids[:, begin:end], **given).logits
        return found[0]

    with torch.no_grad(), contextlib.ExitStack() as closing:
        for one in projections:
            hook = one.register_forward_hook(lambda _, given, __: counts.append(given[0].shape[-2]))
            closing.callback(hook.remove)
        for biased, has_room in ((False, True), (False, False), (True, True)):
            if biased:
                for one in projections:
                    one.bias = torch.nn.Parameter(torch.randn(one.out_features))
            expected = last_piece(DynamicCache(config=model.config))
            with DiskSwapCache(model, path=tmp_path, **SMALL) as cache:
                account, geometry = cache.storage.account, Geometry.of(model)
                monkeypatch.setattr(account, "has_room", lambda *_, has_room=has_room: has_room)
                assert_close(last_piece(cache), expected)
                assert account.by_owner["chosen latents"] == 0
                used = account.peak - account.current
            limits = stored + piece, 2
            plan = cache.plan(geometry, cache.config, *limits)
            assert used <= plan.prefill["chosen latents"] + plan.prefill["stream buffers"] + plan.prefill["packing"]
            memory_limit = plan.prefill_bytes - plan.prefill["chosen latents"] + 5000
            limited = cache.plan(geometry, replace(cache.config, memory=memory_limit), *limits)
            assert (limited.peak_bytes, limited.prefill["chosen latents"]) == (memory_limit, 5000)
            each = sum(counts[len(projections) :]) / len(projections)  # tokens expanded for a layer
            assert (each > piece + stored / 2) == (biased or not has_room) and each >= piece


class Choices(TorchFunctionMode):
    """Keeps what a model's indexers choose within, and the scores (B, q, T) by which they do, by layer and piece.
    `told`: what they choose instead."""

    def __init__(self, model: Any, told: dict[Any, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.made, self.scores, self.told, self.piece = dict[Any, torch.Tensor](), dict[Any, torch.Tensor](), told, 0
        indexers = (layer.self_attn.indexer for layer in model.model.layers)
        self.hooks = [one.register_forward_hook(partial(self.chose, at)) for at, one in enumerate(indexers)]

    def chose(self, layer: int, *called: Any) -> torch.Tensor | None:
        at = layer, self.piece
        self.made[at], self.scores[at] = called[-1].clone(), self.latest
        return None if self.told is None else self.told[at]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.latest = args[0]
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()


def test_logits_agree_where_choices_agree_and_choices_agree_but_for_ties(tmp_path: Path) -> None:
    """Rounding exchanges tokens whose scores are almost the same: on some processors, in the second of these rows.
    Logits agree up to the first token of a row where it does, and everywhere with the same choices."""
    model, ends, rows = dense_with_indexers(), (0, 100, 200, 300, *range(301, 305)), range(4)
    ids = prompt(model, len(rows), ends[-1], 13)

    def run(cache: Any, told: Any = None) -> tuple[torch.Tensor, Choices]:
        logits = []
        with torch.no_grad(), Choices(model, told) as choices:
            for choices.piece, (begin, end) in enumerate(itertools.pairwise(ends)):
                logits.append(model(ids[:, begin:end], past_key_values=cache).logits)
        return torch.cat(logits, 1), choices

    expected, theirs = run(DynamicCache(config=model.config))
    with DiskSwapCache(model, path=tmp_path, **SMALL) as cache:
        assert_close(run(cache, theirs.made)[0], expected)
        cache.reset()
        found, ours = run(cache)
    agreed = dict.fromkeys(rows, ends[-1])
    for at, scores in theirs.scores.items():  # piece by piece, layer by layer
        visible = scores > torch.finfo(scores.dtype).min / 2
        one, other = (torch.zeros_like(visible).scatter_(2, side.made[at].long(), True) for side in (theirs, ours))
        exchanged = (one != other) & visible
        for row, query in exchanged.any(2).nonzero().tolist():
            if (position := ends[at[1]] + query) < agreed[row]:
                agreed[row], known = position, scores[row, query]
                alike = known[exchanged[row, query]]
                assert alike.max() - alike.min() <= CLOSE * known[visible[row, query]].abs().max()
    for row, count in agreed.items():
        assert count >= ends[1]  # the first piece has no history
        assert_close(found[row, :count], expected[row, :count])


@pytest.mark.parametrize(("make", "calls", "bits"), [
    (lambda: layered("indexer"), 0, 8), pytest.param(mistral_large4, 1, None, marks=LATER),
])  # fmt: skip
def test_a_step_that_fails_leaves_the_indexers_as_they_were(
    make: Callable[[], Any], calls: int, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of the second layer's entries fails, when layers have added the step's keys, and their indexers' too; of
    the first model a read of its indexer's exact keys. Of the second model the fifth layer reads the entries, and the
    third stores an indexer's keys alone. Before, prefills of other numbers of sequences fail: nothing is left."""
    model = make()
    ids, plain = prompt(model, 1, 60), DynamicCache(config=model.config)
    with torch.no_grad(), DiskSwapCache(model, path=tmp_path, indexer_bits=bits, **SMALL) as cache:
        for rows in (3, 2):
            with monkeypatch.context() as broken, contextlib.ExitStack() as closing:
                if rows == 3:
                    broken.setattr(PositionHistory, "append", _not_now)
                else:
                    closing.callback(model.lm_head.register_forward_pre_hook(_not_now).remove)
                with pytest.raises(OSError, match="not now"):
                    model(prompt(model, rows, 20), past_key_values=cache)
            with pytest.raises(ValueError, match="nothing to save"):
                cache.save(tmp_path / "context")
            assert "indexer keys" not in +cache.storage.account.by_owner
        for one in (plain, cache):
            model(ids[:, :50], past_key_values=one)
        history = cache.layers[1].history if bits is None else cache.layers[1].indexer.exact
        for step in range(50, 54):
            if step == 52:
                with monkeypatch.context() as broken, pytest.raises(OSError, match="no such record"):
                    broken.setattr(type(history), "extents", _failing(history, type(history).extents, calls))
                    model(ids[:, step : step + 1], past_key_values=cache)
                assert cache.tokens == step
            expected, found = (model(ids[:, step : step + 1], past_key_values=one).logits for one in (plain, cache))
            assert_close(found, expected)
        for one in (plain, cache):
            one.crop(-2)
        for layer, other in zip(cache.layers[1:3], plain.layers[1:3], strict=True):
            keys = layer.capture()["indexer"]["keys"] if bits is None else layer.indexer.whole()
            torch.testing.assert_close(keys, other.indexer_keys)


@pytest.mark.parametrize("bits", [None, 8])
def test_what_the_next_layer_chooses_is_read_a_layer_early(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLPs that add nothing: the stream after attention is the next layer's, and its guessed choice is the true one.
    Other code's hook sees only the model's own calls, and what the model chose, which it changes here: then nothing is
    guessed for its layer."""
    model, reads = dense_with_indexers(), []
    for module in model.modules():
        if hasattr(module, "down_proj"):
            module.down_proj.weight.data.zero_()
    gather, ahead, seen, lengths = Fetcher.gather, Fetcher.ahead, [], set()

    def watched(fetcher: Fetcher, history: Any, choice: Any, *args: Any) -> Any:
        if history.form.value_dim:  # no indexer's
            guessed = None if fetcher.guess is None else fetcher.guess.units
            missing = counters.units_ready - counters.units_selected
            fetched = gather(fetcher, history, choice, *args)
            missing -= counters.units_ready - counters.units_selected
            reads.append((fetcher.layer_idx, guessed, choice.units, missing, history.units - 1))
            return fetched
        return gather(fetcher, history, choice, *args)

    def begun(fetcher: Fetcher, history: Any, *args: Any) -> None:
        lengths.add(history.length - cache.layers[fetcher.layer_idx].indexer.length)
        ahead(fetcher, history, *args)

    monkeypatch.setattr(Fetcher, "gather", watched)
    monkeypatch.setattr(Fetcher, "ahead", begun)
    ids, plain = prompt(model, 2, 60), DynamicCache(config=model.config)
    fields = {**SMALL, "reuse_capacity": 0, "indexer_bits": bits, "look_ahead": True, "path": tmp_path}
    with torch.no_grad(), DiskSwapCache(model, **fields) as cache:
        counters = cache.storage.counters
        for begin, end in itertools.pairwise([0, 30, 50, *range(51, 57)]):
            expected, found = (model(ids[:, begin:end], past_key_values=one).logits for one in (plain, cache))
            assert_close(found, expected)
        report = cache.report()
        assert report.hit_rate == 0 and report.prefetch_hit_rate is not None and report.prefetch_hit_rate > 0.5
        assert report.chosen_ahead == 3 and lengths == {0}  # no key of a guess is left
        assert f"{report.prefetch_hit_rate:.1%} read ahead, in 3 layers" in str(report)
        later = [one for one in reads if one[0]]
        assert len(later) == 2 * 6
        for _, guessed, chosen, missing, latest in later:
            if bits is None:  # a unit that the step fills was not there
                sealed = np.setxor1d(guessed, chosen)
                assert set(sealed) <= {latest} and missing == np.isin(chosen, sealed).sum()
            assert np.isin(guessed, chosen).mean() > 0.8

        def fewer(*called: Any) -> torch.Tensor:
            seen.append(called[-1].shape[2])
            return called[-1].masked_fill(called[-1] % 3 == 0, called[-1].max())  # type: ignore[no-any-return]

        indexer, inner = model.model.layers[1].self_attn.indexer, list[int]()
        hooks = [indexer.register_forward_hook(fewer), indexer.wk.register_forward_hook(lambda *_: inner.append(1))]
        reads.clear()
        for end in (57, 58, 59):
            expected, found = (model(ids[:, end - 1 : end], past_key_values=one).logits for one in (plain, cache))
            assert_close(found, expected)
        for hook in hooks:
            hook.remove()
        assert seen == [TOPK] * 2 * 3  # of both caches
        assert len(inner) == 2 * 3 if bits is None else len(inner) >= 3 * 3  # keys in 8 bits are scored in parts
        assert [one[1] is None for one in reads] == [False, True, False] * 3 and cache.report().chosen_ahead == 2
        monkeypatch.setattr(type(cache.layers[2].indexer), "add_guess", lambda *_: torch.ones(2) @ torch.ones(3))
        assert_close(*(model(ids[:, 59:60], past_key_values=one).logits for one in (cache, plain)))
        assert cache.report().chosen_ahead == 1  # an indexer that fails is not called again
        cache._pace = type(cache._pace)(False)  # what `look_ahead=None` finds faster
        model(ids[:, :1], past_key_values=cache)
        report = cache.report()
        assert (report.steps_ahead, report.decode_steps) == (10, 11)
        text = " ".join(str(report).replace("│", " ").split())
        assert "read ahead, in 1 layers and 10 of 11 steps; 2 layers read when needed" in text
        cache.storage.reset_counters()
        assert "exact, in 3 layers; 3 layers read when needed" in str(cache.report())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("deepseek_v32", torch.float32),
        ("deepseek_v32", torch.bfloat16),
        pytest.param("qwen4_exp_text", torch.float32, marks=LATER),
    ],
)
def test_autocast_rounds_as_with_a_dynamic_cache(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The first layer that chooses gets the same inputs from both caches, so it chooses the same tokens. A prompt in
    pieces, the first without autocast, candidates, and a step. Indexers' keys stay in the type of the first ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ARCHITECTURES[name]().to(dtype)
    ids, plain, outputs = prompt(model, 1, 130), DynamicCache(config=model.config), list[torch.Tensor]()
    first = next(module for module in model.modules() if hasattr(module, "indexer"))
    first.register_forward_hook(lambda _, __, found: outputs.append(found[0].float()))
    first.indexer.register_forward_hook(lambda _, __, found: outputs.append(found.clone()))
    with torch.no_grad(), DiskSwapCache(model, path=tmp_path, **SMALL) as cache:
        for begin, end in itertools.pairwise((0, 30, 32, 120, 124, 125)):
            outputs.clear()
            for one in (plain, cache):
                if end == 124:
                    one.activate_past_recording()
                with torch.autocast("cpu", torch.bfloat16, enabled=begin > 0):
                    model(ids[:, begin:end], past_key_values=one)
            chosen, output, own, found = outputs
            assert torch.equal(own, chosen) and cache.shared.indexing.chosen is None
            assert (found - output).abs().max() <= 0.02 * output.abs().max()
        layer, other = (one.layers[first.layer_idx] for one in (cache, plain))
        kept = layer.indexer.whole()
        assert kept.dtype == dtype
        torch.testing.assert_close(kept.float(), other.indexer_keys.float(), rtol=0.01, atol=0)


def _not_now(*_: Any) -> NoReturn:
    raise OSError("not now")


def _failing(history: Any, method: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`method`, which raises for one history after so many calls."""
    left = [calls]

    def extents(one: Any, units: Any) -> Any:
        if one is history:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("no such record")
        return method(one, units)

    return extents


def test_budgets_hold_and_contexts_are_checked(tmp_path: Path) -> None:
    model = layered("indexer")
    ids, geometry = prompt(model, 1, LENGTH), Geometry.of(model)
    assert geometry.is_indexed and {layer.most_chosen for layer in geometry.layers} == {TOPK}
    assert step_bytes(geometry, DiskSwapConfig(), 400, 2) == 2 * 4096 * sum(
        min(TOPK, -(-400 // 16)) for _ in geometry.layers
    )
    with pytest.raises(BudgetError, match="need at least"):
        DiskSwapCache.for_budget(model, "64KiB", 400, path=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no cache is needed
        cache = offload_cache(model, "2MiB", 400, path=tmp_path)
    with cache:
        assert isinstance(cache, DiskSwapCache) and "the model chooses what steps attend to" in cache.why
        plan = cache.plan(geometry, cache.config, 400, 1)
        generate(model, cache, ids, max_new_tokens=NEW, prompt_lookup_num_tokens=4)
        report = cache.report()
        assert report.peak_memory_bytes <= plan.peak_bytes <= 2 * 2**20
        assert 0 < report.memory_by_owner["indexer keys"] <= plan.decode["indexer keys"]
        assert plan.decode["reuse slots"] > 0
        layer = cache.layers[0]
        tree = layer.capture()
        for wrong in ({"keys": None}, {"keys": torch.zeros(2, 3, 4), "positions": None}):
            with DiskSwapCache(model) as other, pytest.raises(ContextError, match="indexer"):
                other.layers[0].restore({**tree, "indexer": wrong}, [], torch.device("cpu"))


def test_keys_in_fewer_bits_take_less_memory_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a budget, with candidates, and scored in several parts; without bits in memory, each step reads all keys.
    A context of theirs that is not whole is refused."""
    monkeypatch.setattr("hf_offload_cache.core.indexer_keys.AT_ONCE", TOPK // 2)
    model = layered("indexer")
    ids, geometry = prompt(model, 1, LENGTH), Geometry.of(model)
    tokens, reports, keys_read = [], [], []
    for bits in (None, 8, 0):
        made = DiskSwapCache.for_budget(model, "2MiB", 400, path=tmp_path, indexer_bits=bits, look_ahead=True)
        with made as cache:
            plan = cache.plan(geometry, cache.config, 400, 1)
            ahead, apart = (
                cache.plan(geometry, dataclasses.replace(cache.config, candidates=False, look_ahead=one), 400, 1).decode
                for one in (True, False)
            )
            assert ahead["staging"] == 2 * apart["staging"] and ahead.keys() - apart.keys() == {"look-ahead"}
            in_all, without = (step_bytes(geometry, one, 400, 2) for one in (cache.config, DiskSwapConfig()))
            keys_read.append(in_all - without)
            tokens.append(generate(model, cache, ids, max_new_tokens=NEW, prompt_lookup_num_tokens=4).tokens)
            reports.append(report := cache.report())
            assert report.peak_memory_bytes <= plan.peak_bytes <= 2 * 2**20
            assert report.memory_by_owner.get("indexer keys", 0) <= plan.decode["indexer keys"]
            assert cache.layers[0].full_bytes == report.full_kv_bytes // len(cache.layers)
            if bits == 0:
                store, records = cache.layers[0].indexer.exact.store, cache.layers[0].indexer.exact.units
                cache.storage.prefetcher.flush()  # what is still to be written is not read
                before = store.bytes_read
                model(ids[:, :1], past_key_values=cache)
                assert store.bytes_read - before == records * 4096 > 0
    assert keys_read == [0, *[2 * 4096 * len(geometry.layers) * -(-400 // 64)] * 2]
    first, *others = geometry.layers
    shared = replace(geometry, layers=(first, *(replace(one, indexer_bytes=0) for one in others)))
    for bits in (8, 0):  # whose other layers share the first one's indexer
        config = DiskSwapConfig(indexer_bits=bits)
        one, all_own = (DiskSwapCache.plan(each, config, 400, 1) for each in (shared, geometry))
        assert one.peak_bytes < all_own.peak_bytes and one.decode["tables"] < all_own.decode["tables"]
        keys = step_bytes(shared, config, 400, 2) - step_bytes(shared, DiskSwapConfig(), 400, 2)
        assert keys == keys_read[1] // len(geometry.layers)
    for one, report in zip(tokens[1:], reports[1:], strict=True):
        assert torch.equal(one, tokens[0]) and report.full_kv_bytes == reports[0].full_kv_bytes
    full, coded, streamed = (report.memory_by_owner.get("indexer keys", 0) for report in reports)
    assert full > 2 * coded > streamed == 0  # 16 values of 4 bytes; 16 codes and a scale
    with pytest.raises(BudgetError) as caught:
        DiskSwapCache.fit(geometry, 1 << 16, 4000, 1, {"indexer_bits": None})
    fitted = DiskSwapCache.fit(geometry, caught.value.needed - 1, 4000, 1, {})
    plan = DiskSwapCache.plan(geometry, fitted, 4000, 1)
    assert fitted.indexer_bits == 0 and plan.peak_bytes < caught.value.needed and fitted.reuse_capacity > 0
    for engine, where in (("auto", "the disk"), ("memory", "host memory")):
        notes = DiskSwapCache.notes(plan, replace(fitted, engine=engine), geometry)
        assert any(f"reads all keys of the model's indexers from {where}" in one for one in notes)
    with torch.no_grad(), DiskSwapCache(model, path=tmp_path) as cache:
        model(ids[:, :40], past_key_values=cache)
        cache.save(tmp_path / "context")
    with pytest.raises(BudgetError, match="need at least"):  # a saved context keeps its bits
        DiskSwapCache.open(tmp_path / "context", model, caught.value.needed - 1, tmp_path, max_context=4000)
    with torch.no_grad(), DiskSwapCache(model, indexer_bits=8, engine="memory") as cache:
        model(ids[:, :40], past_key_values=cache)
        parts, tree = cache.layers[0].freeze(), cache.layers[0].capture()
        keys = tree["indexer"]["keys"]
        for wrong in (
            keys["codes"], {**keys, "parts": len(parts) + 1}, {**keys, "codes": keys["codes"][:, 1:]},
            {**keys, "scales": None}, {**keys, "codes": keys["codes"][:, 1:], "scales": keys["scales"][:, 1:]},
        ):  # fmt: skip
            with DiskSwapCache(model, indexer_bits=8) as other, pytest.raises(ContextError, match="indexer"):
                indexer = {"keys": wrong, "positions": None}
                other.layers[0].restore({**tree, "indexer": indexer}, parts, torch.device("cpu"))
    with torch.no_grad(), DiskSwapCache(model, indexer_bits=0, engine="memory") as cache:
        model(ids[:, :40], past_key_values=cache)
        parts, tree = cache.layers[0].freeze(), cache.layers[0].capture()
        for wrong in (keys, {**tree["indexer"]["keys"], "exact": tree["history"]}):
            with DiskSwapCache(model, indexer_bits=0) as other, pytest.raises(ContextError, match="indexer"):
                indexer = {"keys": wrong, "positions": None}
                other.layers[0].restore({**tree, "indexer": indexer}, parts, torch.device("cpu"))
    with pytest.raises(ConfigError, match="indexer_bits must be one of"):
        DiskSwapConfig(indexer_bits=4)


@LATER
def test_plans_count_layers_that_store_only_an_indexers_keys(tmp_path: Path) -> None:
    """Two of four layers, in any type, and their records, which lie in memory or on the disk; and candidates."""
    model = mistral_large4()
    ids, geometry = prompt(model, 2, 90), Geometry.of(model)
    assert [layer.has_history for layer in geometry.layers] == [True, True, False, False] and not geometry.kept
    assert shape_of("", geometry)["layers"].count("heads") == 2  # nothing is said of layers without keys and values
    for engine, bits in itertools.product(("memory", "direct"), (None, 8, 0)):
        with torch.no_grad(), DiskSwapCache(model, path=tmp_path, engine=engine, indexer_bits=bits, **SMALL) as cache:
            begin = 0
            for end in (50, 80, 81, 82, 90):
                if end == 90:
                    cache.activate_past_recording()
                model(ids[:, begin:end], past_key_values=cache)
                begin = end
            report, plan = cache.report(), cache.plan(geometry, cache.config, 90, 2)
        case, held = (engine, bits), report.memory_by_owner
        assert report.peak_memory_bytes <= plan.peak_bytes, case
        for owner in ("indexer keys", "records in memory", "rolling tail"):
            assert held.get(owner, 0) <= plan.decode.get(owner, 0), (case, owner)
        keys = {None: 64, 8: 16 + 4, 0: 0}[bits] * 2 * 90 * len(geometry.layers)
        assert keys <= held.get("indexer keys", 0) <= 1.25 * keys, case
        stores = (2 if bits is None else 2 + 4) * (engine == "memory")
        assert held.get("records in memory", 0) == stores * 4 * 2**20 == plan.decode.get("records in memory", 0), case
        entries = sum(min(TOPK, 23) * 4096 for layer in geometry.layers if layer.has_history)
        keys_read = 0 if bits is None else len(geometry.layers) * 23 * 4096
        assert step_bytes(geometry, cache.config, 90, 2) == 2 * (entries + keys_read)


@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_slots_get_what_a_longer_context_will_need(bits: int | None, tmp_path: Path) -> None:
    """In the least budget, a short context has slots, although a long one has none. A second row, and later tokens,
    take them back. No step has to free slots."""
    model, most = dense_with_indexers(), 400
    ids, geometry, plain = prompt(model, 1, most), Geometry.of(model), DynamicCache(config=model.config)
    fields = {"group_size": 4, "look_ahead": False, "indexer_bits": bits, "candidates": False}
    with pytest.raises(BudgetError) as caught:
        DiskSwapCache.fit(geometry, 1 << 14, most, 2, fields)
    made: dict[str, Any] = {"max_context": most, "max_batch": 2, "path": tmp_path, **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caches = [DiskSwapCache.for_budget(model, caught.value.needed, reuse_capacity=0, **made)]
        caches.append(DiskSwapCache.for_budget(model, caught.value.needed, **made))
    with torch.no_grad(), caches[0] as fixed, caches[1] as cache:
        lent, hits, begin, rows = [], [], 0, 1
        for end in (240, 241, 310, 380):
            for stop in range(max(end - 2, begin + 1), end + 1):
                part = ids[:, begin:stop].expand(rows, -1)
                expected, *found = (model(part, past_key_values=one).logits for one in (plain, fixed, cache))
                for logits in found:
                    assert_close(logits, expected)
                begin = stop
            hits.append([one.report().hit_rate for one in caches])
            lent.append(cache.selecting.lent)
            assert cache.layers[0].fetcher().tiers[0].capacity == rows * cache.layers[0].slots
            for one in (plain, *caches):
                one.batch_repeat_interleave(2 if rows == 1 else 1)
            rows = 2
        assert fixed.selecting.lent == cache.config.reuse_capacity == 0
        assert lent[0] >= 240 > lent[1] > lent[2] >= lent[3] == 0
        assert hits[3][0] == 0 < hits[0][1]
        many, parts = replace(geometry, layers=geometry.layers[:1] * 30), cache.layers[0].indexer.parts
        planned = cache.plan(many, cache.config, cache.tokens, 2).decode["indexer keys"]
        assert sum(part.nbytes for part in parts) * 30 <= planned  # there is room for more tokens
        for one in caches:
            report = one.report()
            assert report.peak_memory_bytes <= report.memory_budget and one.storage.account.pressed == 0


def _chosen_at_edge(exact: torch.Tensor, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, np.ndarray]:
    """What is chosen by `scores`, sorted, and the tokens (B, T) that were scored exactly, none of them twice."""
    asked = np.zeros((len(exact), exact.shape[2]), dtype=bool)

    def make_exact(wanted: np.ndarray, mixed: torch.Tensor) -> None:
        assert not (wanted & asked).any()
        asked[wanted] = True
        rows, places = map(torch.from_numpy, wanted.nonzero())
        mixed[rows, :, places] = exact[rows, :, places]

    return chosen_at_edge(scores, count, make_exact).sort(2).values, asked


@pytest.mark.parametrize(("error", "most"), [(0.01, 0.1), (1.0, 1.0)])
def test_the_choice_at_the_edge_is_the_exact_one(error: float, most: float) -> None:
    """With the exact scores of few tokens if the others' errors are small. Of a row with fewer tokens than are chosen
    all are; where tokens are alike at the edge, the model's `topk` decides between all."""
    made, count = torch.Generator().manual_seed(5), 256
    exact = torch.randn(2, 3, 6000, generator=made)
    scores = exact + error * (2 * torch.rand(exact.shape, generator=made) - 1)
    found, asked = _chosen_at_edge(exact, scores, count)
    assert torch.equal(found, exact.topk(count, dim=2).indices.sort(2).values)
    assert 0 < asked.mean() <= most
    for one in (exact, scores):
        one[:, :, 100:] = float("-inf")
    found, _ = _chosen_at_edge(exact, scores, count)
    assert torch.equal(found[..., :100], torch.arange(100).expand(2, 3, -1))
    exact = (torch.arange(500) % 5 == 0).float().expand(1, 1, -1)
    found, asked = _chosen_at_edge(exact, exact, 200)
    assert torch.equal(found, exact.topk(200, dim=2).indices.sort(2).values) and asked.all()


@pytest.mark.slow
def test_a_compiled_model_gets_what_its_indexers_chose() -> None:
    model, ends = dense_with_indexers(), (30, 50, 51, 52)
    ids, plain, begin = prompt(model, 1, ends[-1]), DynamicCache(config=model.config), 0
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), DiskSwapCache(compiled, engine="memory", **SMALL) as cache:
        for end in ends:
            expected = model(ids[:, begin:end], past_key_values=plain).logits
            assert_close(compiled(ids[:, begin:end], past_key_values=cache).logits, expected)
            begin = end
        assert cache.report().layers["tagged"] == len(cache.layers)
