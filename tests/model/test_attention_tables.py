"""Our table of attention functions: where it stands while caches are on a model, what it gives, and that it goes."""

from __future__ import annotations

import copy
import gc
import sys
import types
from typing import Any

import pytest
import torch
from harness import CASES, COMMON, SMALL, assert_exact, build, fresh, prompt, tiny
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TRANSFORMERS_TABLE
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from hf_offload_cache import DiskSwapCache


def exact(model: Any) -> DiskSwapCache:
    return DiskSwapCache(model, exact=True, engine="memory", **SMALL)


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def table() -> Any:
    return modeling_llama.ALL_ATTENTION_FUNCTIONS


def test_the_files_table_is_back_with_the_last_cache() -> None:
    one, other = fresh("llama"), fresh("llama", seed=2)
    first, second = exact(one), exact(other)
    assert table() is not TRANSFORMERS_TABLE and dict(table()).keys() == dict(TRANSFORMERS_TABLE).keys()
    assert type(one.config._attn_implementation) is str and one.config._attn_implementation == "sdpa"
    first.close()
    assert table() is not TRANSFORMERS_TABLE
    assert_exact(CASES["greedy"](other, dynamic(other)), CASES["greedy"](other, second))
    second.close()
    assert table() is TRANSFORMERS_TABLE


def test_it_is_back_when_the_model_dies_before_its_cache() -> None:
    model = copy.deepcopy(tiny("llama"))
    cache = exact(model)
    assert table() is not TRANSFORMERS_TABLE
    del model
    gc.collect()
    assert table() is TRANSFORMERS_TABLE
    cache.close()


def test_requests_leave_nothing() -> None:
    """A model that gets many caches in turn has one finalizer, not many."""
    model = fresh("llama")
    before = len(gc.get_referrers(modeling_llama.__dict__))
    for _ in range(5):
        exact(model).close()
    gc.collect()
    assert len(gc.get_referrers(modeling_llama.__dict__)) <= before and table() is TRANSFORMERS_TABLE


def test_the_table_of_transformers_itself_stays() -> None:
    """Files that are imported meanwhile take transformers' own."""
    with exact(fresh("llama")):
        assert sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS is TRANSFORMERS_TABLE
        assert type(TRANSFORMERS_TABLE).__name__ == "AttentionInterface"


def test_a_function_that_is_registered_meanwhile_is_called() -> None:
    """It gets what a cache does not answer by itself, and all that carries no tag."""
    model, calls = fresh("llama"), list[int]()
    own = TRANSFORMERS_TABLE["sdpa"]

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.layer_idx)
        return own(module, *args, **kwargs)

    with exact(model) as cache:
        expected = CASES["greedy"](model, cache)
        table()["sdpa"] = counting
        try:
            assert_exact(expected, CASES["greedy"](model, dynamic(model)))
            assert set(calls) == {0, 1, 2}
        finally:
            del table()["sdpa"]
    assert TRANSFORMERS_TABLE["sdpa"] is own


class OldStyle(LlamaAttention):
    """Looks its function up by its name, as code for transformers 4 does."""

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        parts = self.q_proj, self.k_proj, self.v_proj
        projected = [part(hidden_states).view(shape).transpose(1, 2) for part in parts]
        query, key = apply_rotary_pos_emb(*projected[:2], *position_embeddings)
        value = projected[2]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        function: Any = eager_attention_forward
        if self.config._attn_implementation != "eager":
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = function(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


ALL_ATTENTION_FUNCTIONS = TRANSFORMERS_TABLE


def test_code_that_looks_up_by_a_name() -> None:
    for put in ("class", "module"):
        model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
        for layer in model.model.layers:
            if put == "class":
                layer.self_attn.__class__ = OldStyle
            else:
                layer.self_attn.forward = OldStyle.forward.__get__(layer.self_attn)
        with exact(model) as cache:
            assert_exact(CASES["greedy"](model, dynamic(model)), CASES["greedy"](model, cache))
            assert cache.report().layers["tagged"] == 3, put
        assert ALL_ATTENTION_FUNCTIONS is TRANSFORMERS_TABLE


class OtherName(OldStyle):
    """Has the table under a name of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = {**globals(), "ALL_ATTENTION_FUNCTIONS": TRANSFORMERS_TABLE}
        return types.FunctionType(OldStyle.forward.__code__, names)(self, *args, **kwargs)


def test_a_table_under_another_name() -> None:
    """It is found by what it is: `import ... as` is common in code for several versions of transformers."""
    model, plain = build(LlamaForCausalLM, LlamaConfig(**COMMON)), TRANSFORMERS_TABLE
    for layer in model.model.layers:
        layer.self_attn.__class__ = OtherName
    with exact(model) as cache:
        assert TRANSFORMERS_TABLE is not plain
        assert_exact(CASES["greedy"](model, dynamic(model)), CASES["greedy"](model, cache))
        assert cache.report().layers["tagged"] == 3
    assert TRANSFORMERS_TABLE is plain


@pytest.mark.parametrize("upcast", [False, True])
def test_a_model_that_compares_its_name(upcast: bool) -> None:
    """GPT-2 computes in another way where the name is "eager" and its configuration asks for it."""
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, reorder_and_upcast_attn=upcast, bos_token_id=1,
                        eos_token_id=None, pad_token_id=0, attn_implementation="eager")  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    ids = prompt(model, 1, 40)
    expected = model.generate(ids, past_key_values=DynamicCache(config=config), **options)
    with exact(model) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
        assert cache.report().layers["tagged"] == (0 if upcast else 3)
