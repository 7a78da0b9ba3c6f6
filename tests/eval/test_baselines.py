"""The baselines: what they select on hand-made keys, what lies on the disk; attention to all of it is exact."""

from __future__ import annotations

import ast
import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from eval import contenders, equal_memory, synthetic
from eval.baselines.compact_keys import CompactKeys
from eval.baselines.flexgen import FlexGenCache
from eval.baselines.infinigen import GroupedInfiniGenCache, InfiniGenCache, kept_dimensions
from eval.baselines.loki import LokiCache, leading_directions
from eval.baselines.paged import PagedCache
from eval.baselines.shadowkv import ShadowKVCache
from hf_offload_cache.errors import BudgetError, PromptError
from hf_offload_cache.fetch import Choice
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.model import AttentionCall
from hf_offload_cache.registry import CACHES, cache_class

TINY = synthetic.Shape(layers=2, heads=4, kv_heads=2, head_dim=64, hidden=48, intermediate=64, vocabulary=128)
TOKENS = 600
SELECTIVE = (InfiniGenCache, LokiCache, GroupedInfiniGenCache, ShadowKVCache)


@pytest.fixture(scope="module")
def model() -> Any:
    return synthetic.build_model(TINY)


def next_logits(model: Any, cache: Any, batch: int = 2, steps: int = 3) -> torch.Tensor:
    """Fill `cache`, decode, and return the last logits in units of their standard deviation."""
    synthetic.fill(cache, model, TINY, TOKENS, batch)
    inputs = synthetic.Inputs(TINY, 0.9, batch=batch)
    for _ in range(steps):
        logits = synthetic.decode_step(model, cache, inputs.next())
    return (logits / logits.std()).float()


@pytest.fixture(scope="module")
def reference(model: Any) -> torch.Tensor:
    return next_logits(model, DynamicCache(config=model.config))


@pytest.mark.parametrize("kind", SELECTIVE)
def test_attention_to_all_of_it_is_exact(kind: Any, model: Any, reference: torch.Tensor, tmp_path: Path) -> None:
    """With every token selected, folding and unfolding of heads, rebuilt keys and values apart give the full cache's
    logits; ShadowKV's keys are those of full rank in 32 bits."""
    fields: dict[str, Any] = {"num_selected": 2 * TOKENS, "rank": 64}
    if kind is ShadowKVCache:
        fields = {"num_selected": 2 * TOKENS, "rank": 128, "summary_dtype": "float32"}
    with kind(model, path=tmp_path, **fields) as cache:
        logits = next_logits(model, cache)
        report = cache.report()
    assert report.selected_fraction == 1.0 and report.layers["tagged"] == 2
    torch.testing.assert_close(logits, reference, rtol=0, atol=0.05)


def test_a_part_of_it_is_not(model: Any, reference: torch.Tensor, tmp_path: Path) -> None:
    """The tolerance above tells."""
    with InfiniGenCache(model, path=tmp_path, num_selected=64, rank=16) as cache:
        assert (next_logits(model, cache) - reference).abs().max() > 0.1


def test_flexgen_is_the_full_cache_bit_by_bit(model: Any, reference: torch.Tensor, tmp_path: Path) -> None:
    """What still waits to be written, no more than the queue has, is not read back."""
    with FlexGenCache(model, path=tmp_path, write_queue="64KiB") as cache:
        assert torch.equal(next_logits(model, cache), reference)
        stored = sum(layer.history.units for layer in cache.offloaded) * cache.storage.stores[0].record_bytes * 2
        assert cache.report().bytes_read >= 3 * (stored - 2**16)


# --- what is on the disk ----------------------------------------------------------------------------------------


def test_heads_have_records_of_their_own(model: Any, tmp_path: Path) -> None:
    """One record is one token of one head, in a block of the device; rows of a sequence lie together."""
    with InfiniGenCache(model, path=tmp_path, rank=8) as cache:
        synthetic.fill(cache, model, TINY, TOKENS, 2)
        history = cache.offloaded[0].history
        keys, values = synthetic.context(TINY, TOKENS, 0, 2)
        assert history.rows == 4 and history.units == TOKENS - 32
        assert history.form.record_bytes == 4096 and history.form.entry_bytes == 2 * 2 * 64
        held_keys, held_values = history.whole()
        assert torch.equal(held_keys, keys.reshape(4, 1, TOKENS, 64))  # head h of sequence b is row 2 b + h
        assert torch.equal(held_values, values.reshape(4, 1, TOKENS, 64))
        assert torch.equal(cache.offloaded[0].keys, keys)
        assert cache.report().full_kv_bytes == 2 * TOKENS * TINY.token_bytes


def test_shadowkv_stores_values_alone(model: Any, tmp_path: Path) -> None:
    """Records are half as large, and hold the values of eight tokens; the latest keys stay beside the tail."""
    with ShadowKVCache(model, path=tmp_path, rank=32) as cache:
        synthetic.fill(cache, model, TINY, TOKENS, 1)
        layer: Any = cache.offloaded[1]
        form = layer.history.form
        keys, values = synthetic.context(TINY, TOKENS, 1, 1)
        assert (form.key_width, form.entry_width, form.group_size) == (0, 128, 8)
        sealed = layer.history.units * 8
        assert layer.history.units == (TOKENS - 32) // 8
        fetched = layer.fetcher.gather(layer.history, Choice.all_of(1, layer.history.units))
        assert torch.equal(form.split(fetched.entries)[1], values)
        assert torch.equal(layer.history.recent_keys, keys[:, :, sealed:])
        assert layer.predictor.compact.tokens == sealed
        assert cache.report().full_kv_bytes == TOKENS * TINY.token_bytes
        with pytest.raises(PromptError, match="one piece"):
            layer.whole()
        returned, other = cache.update(keys[:, :, :4], values[:, :, :4], 1)
        call = AttentionCall(no_attention, model.model.layers[1].self_attn, query_for(), returned, other, None)
        with pytest.raises(PromptError, match="one piece"):
            layer.attend(dataclasses.replace(call, query=call.query[:1].expand(-1, -1, 4, -1)))


# --- what is selected -------------------------------------------------------------------------------------------


def no_attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return query.transpose(1, 2), None


def selected(kind: Any, model: Any, tmp_path: Path, keys: torch.Tensor, query: torch.Tensor, **fields: Any) -> Any:
    """The units that the first layer chooses for query (B, H, 1, D) among `keys` (B, Hk, T, D)."""
    with kind(model, path=tmp_path, num_sinks=1, summary_dtype="float32", **fields) as cache:
        returned, values = cache.update(keys, torch.zeros_like(keys), 0)
        layer: Any = cache.layers[0]
        module = model.model.layers[0].self_attn
        layer.attend(AttentionCall(no_attention, module, query, returned, values, None, kwargs={"scaling": 1.0}))
        return layer.choose(layer.query_of(query[:, :, 0], None)).units


def planted(places: dict[tuple[int, int], int], dimension: int = 5) -> torch.Tensor:
    """Keys (2, 2, TOKENS, 64) of small noise, but for one token of each (sequence, head) of `places`."""
    generator = torch.Generator().manual_seed(0)
    keys = 0.01 * torch.randn(2, 2, TOKENS, 64, generator=generator)
    keys[..., dimension] += torch.linspace(0, 0.1, TOKENS)  # the dimension has some energy besides
    for (row, head), token in places.items():
        keys[row, head, token, dimension] = 8.0
    return keys.to(torch.bfloat16)


PLACES = {(0, 0): 100, (0, 1): 301, (1, 0): 202, (1, 1): 403}


def query_for(dimension: int = 5) -> torch.Tensor:
    query = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16)
    query[..., dimension] = 3.0
    return query


@pytest.mark.parametrize("kind", [InfiniGenCache, LokiCache])
def test_each_head_selects_its_own_token(kind: Any, model: Any, tmp_path: Path) -> None:
    """One token beside the sink: the planted one, in the row of its sequence and head, by a single kept component."""
    groups = selected(kind, model, tmp_path, planted(PLACES), query_for(), num_selected=1, rank=1)
    assert groups.tolist() == [[0, 100], [0, 301], [0, 202], [0, 403]]


def test_grouped_heads_select_together(model: Any, tmp_path: Path) -> None:
    """Two tokens for all heads of a sequence: what either head wants."""
    groups = selected(GroupedInfiniGenCache, model, tmp_path, planted(PLACES), query_for(), num_selected=2, rank=1)
    assert groups.tolist() == [[0, 100, 301], [0, 202, 403]]


def test_shadowkv_selects_chunks(model: Any, tmp_path: Path) -> None:
    """The chunks of eight in which the planted tokens lie."""
    groups = selected(ShadowKVCache, model, tmp_path, planted(PLACES), query_for(), num_selected=16, rank=4)
    assert groups.tolist() == [[0, 100 // 8, 301 // 8], [0, 202 // 8, 403 // 8]]


def test_a_dimension_that_was_not_kept_is_not_seen(model: Any, tmp_path: Path) -> None:
    """InfiniGen keeps dimensions by their mean size; one large entry in a small dimension is lost to it."""
    keys = planted({}, 5)
    keys[0, 0, 100, 7] = 1.0
    groups = selected(InfiniGenCache, model, tmp_path, keys, query_for(7), num_selected=1, rank=1)
    assert 100 not in groups[0]


def test_kept_dimensions_are_the_largest() -> None:
    """As columns of a projection, in order of position, each head for itself."""
    magnitude = torch.tensor([[0.1, 3.0, 0.2, 2.0], [5.0, 0.0, 6.0, 1.0]])
    found = kept_dimensions(torch.zeros(2, 4, 4), magnitude, 2)
    assert found.shape == (2, 4, 2)
    assert found.argmax(1).tolist() == [[1, 3], [0, 2]]
    assert torch.equal(found.sum((1, 2)), torch.tensor([2.0, 2.0]))


def test_leading_directions_hold_the_most_energy() -> None:
    """Of keys in a plane, two directions hold all."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(50, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    found = leading_directions((keys.T @ keys)[None], torch.zeros(1, 6), 2)[0]
    torch.testing.assert_close(keys @ found @ found.T, keys, rtol=0, atol=1e-4)
    assert (keys @ found)[:, 0].norm() > (keys @ found)[:, 1].norm()


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_compact_keys_of_full_rank_are_the_keys(joint: bool, dtype: torch.dtype) -> None:
    """Scores and rebuilt keys; in 8 bits to the rounding of five root mean squares over 127."""
    account = MemoryAccount()
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(2, 2, 40, 8, generator=generator), torch.randn(4, 8, generator=generator)
    parts, width = (1, 16) if joint else (2, 8)
    projection = torch.linalg.qr(torch.randn(parts, width, width, generator=generator))[0]
    compact = CompactKeys(projection, torch.ones(parts, width), dtype, 2, 2, account)
    compact.append(keys[:, :, :30])
    compact.append(keys[:, :, 30:].reshape(4, 1, 10, 8))
    assert compact.tokens == 40
    positions = torch.tensor([[3, 39, 3], [0, 1, 31]])
    wanted = torch.stack([keys[row][:, positions[row]] for row in range(2)])
    atol = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(compact.rebuild(positions), wanted, rtol=0, atol=atol)
    exact = torch.einsum("hgd,htd->hgt", query.view(2, 2, 8), keys[1]).flatten(0, 1)
    torch.testing.assert_close(compact.scores(query, 1), exact, rtol=0, atol=0.25)  # products are in bfloat16
    again = CompactKeys.restore(compact.capture(), account)
    assert torch.equal(again.scores(query, 1), compact.scores(query, 1)) and again.tokens == 40
    again.close()
    compact.select_rows(torch.tensor([1, 1]))
    torch.testing.assert_close(compact.scores(query, 0), exact, rtol=0, atol=0.25)
    compact.truncate(10)
    assert compact.scores(query, 1).shape == (4, 10)
    compact.close()
    assert account.current == 0


# --- paged by the operating system ------------------------------------------------------------------------------


def test_paged_cache_is_the_full_cache_within_its_limit(model: Any, reference: torch.Tensor, tmp_path: Path) -> None:
    """Bit by bit, after pages were dropped and read again; between layers it holds no more than the limit."""
    limit = 2 * TOKENS * TINY.token_bytes // 13
    with PagedCache(model.config, limit, tmp_path) as cache:
        assert torch.equal(next_logits(model, cache), reference)
        largest = max(layer.nbytes for layer in cache.layers)
        assert limit < cache.held_bytes <= limit + largest
        cache.trim()
        assert cache.held_bytes <= limit
        keys, values = synthetic.context(TINY, TOKENS, 0, 2)
        assert torch.equal(cache.layers[0].keys[:, :, :TOKENS], keys)
        assert torch.equal(cache.layers[0].values[:, :, :TOKENS], values)
        assert list(tmp_path.iterdir()) == []
        room = torch.zeros(2, 2, 400, 64, dtype=torch.bfloat16)
        with pytest.raises(BudgetError, match="room"):
            cache.update(room, room, 0)
    cache.close()


# --- the same memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [Fraction(1, 13), Fraction(1, 34)])
@pytest.mark.parametrize("method", (equal_memory.OWN, *equal_memory.BASELINES))
def test_fields_keep_to_the_share(method: str, memory: Fraction) -> None:
    """For 8B's layers at 32K: what the fields hold is within the share, and one more component, or more slots, would
    not be."""
    shape = synthetic.LLAMA_8B
    fields = equal_memory.fields_for(method, shape, 32768, 1, memory)
    share = memory * 32768 * shape.token_bytes
    tokens = 32768 + (1024 if method == equal_memory.OWN else 0)
    assert equal_memory.bytes_held(method, shape, tokens, 1, fields) <= share
    if method == equal_memory.OWN:
        wider = {**fields, "reuse_capacity": fields.get("reuse_capacity", 0) + 64}
    else:
        wider = {**fields, "rank": fields["rank"] + 1}
    assert equal_memory.bytes_held(method, shape, tokens, 1, wider) > share
    assert fields["num_selected"] == 400
    assert (fields.get("reuse_capacity", 400) > 0) == (method in ("InfiniGen*+ru", equal_memory.OWN))


def test_a_registered_cache_is_a_contender_and_planned_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the share, and not far below it: by one line in the registry."""
    assert {cache_class(name).__name__ for name in CACHES} <= set(contenders.METHODS)
    monkeypatch.setitem(CACHES, "pages", "examples.own_method:PageCache")
    shape = synthetic.LLAMA_8B
    fields = equal_memory.fields_for("PageCache", shape, 32768, 1, Fraction(1, 13))
    share = 32768 * shape.token_bytes // 13
    assert 0.95 * share < equal_memory.bytes_held("PageCache", shape, 32768 + 1024, 1, fields) <= share
    assert fields["num_selected"] == 400


def test_reuse_gives_way_before_there_are_no_compact_keys() -> None:
    """And what cannot be held at all is refused with its bytes."""
    shape = synthetic.LLAMA_8B
    fields = equal_memory.fields_for("InfiniGen*+ru", shape, 4096, 1, Fraction(1, 13))
    assert fields["reuse_capacity"] == 100 and fields["rank"] >= 1
    with pytest.raises(ValueError, match="1/100 of 1024 tokens"):
        equal_memory.fields_for("InfiniGen", shape, 1024, 1, Fraction(1, 100))


@pytest.mark.parametrize(
    ("kind", "method"),
    [(GroupedInfiniGenCache, "InfiniGen*"), (GroupedInfiniGenCache, "InfiniGen*+ru"), (ShadowKVCache, "ShadowKV")],
)
def test_the_account_agrees_with_what_is_reckoned(kind: Any, method: str, model: Any, tmp_path: Path) -> None:
    """A cache with the fields holds what `bytes_held` says or less, and not half of it, after some steps."""
    shape = synthetic.Shape(2, 8, 8, 64, 32, 64, 128)
    fields = equal_memory.fields_for(method, shape, 8192, 1, Fraction(1, 3))
    light = synthetic.build_model(shape)
    with kind(light, path=tmp_path, **fields) as cache:
        synthetic.fill(cache, light, shape, 8192)
        cache.storage.prefetcher.flush()
        inputs = synthetic.Inputs(shape, 0.9)
        for _ in range(3):
            synthetic.decode_step(light, cache, inputs.next())
        held = cache.memory_bytes - cache.report().memory_by_owner.get("token ids", 0)
    reckoned = equal_memory.bytes_held(method, shape, 8192, 1, fields)
    assert reckoned / 2 < held <= 1.01 * reckoned


# --- written from outside ---------------------------------------------------------------------------------------


def test_no_private_name_of_the_library() -> None:
    """`x._y` only where the baseline itself gives it that name, and nothing inherited with a `_` is overridden."""
    found = []
    for path in (Path(synthetic.__file__).parent / "baselines").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node for node in nodes if isinstance(node, ast.Attribute)]
        mine = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        mine |= {node.attr for node in names if isinstance(node.ctx, ast.Store)}
        private = [node.attr for node in names if node.attr[0] == "_" and node.attr[-1] != "_"]
        found += [f"{path.name}: {name}" for name in private if name not in mine]
        imported = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        found += [f"{path.name}: {one.name}" for node in imported for one in node.names if one.name[0] == "_"]
    assert found == []
    classes = [base for kind in SELECTIVE for one in (kind, kind.layer_class) for base in one.__mro__]
    own = [base for base in classes if base.__module__.startswith("eval.")]
    assert {name for base in own for name in vars(base) if name[0] == "_" and name[-1] != "_"} <= {"_abc_impl"}
