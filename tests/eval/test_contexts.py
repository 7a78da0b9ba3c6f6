"""One prefill for many caches: each is then as after its own, also with windows, whose memory is counted apart."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny
from layered_models import layered
from letters import Letters
from long_llama import long_model
from transformers import DynamicCache, StaticCache

from eval.baselines.in_memory import SINKS
from eval.fidelity_contenders import missing
from eval.studies import contexts
from eval.studies.common import Rows, Study, main
from eval.studies.contexts import budget, follow, open_cache, peak_share, prefill, reference_texts, replay
from eval.studies.teacher_forced import measure
from hf_offload_cache.model import Geometry

EXACT = {"exact": True, "engine": "memory"}


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 199, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [9, 16, 150])
def test_windows_are_as_after_a_prefill_of_the_cache_itself(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than the window of 16, as many, and more; in pieces of 64, and nothing of them is copied twice."""
    monkeypatch.setattr(contexts, "PIECE", 64)
    model, text = tiny("gemma3"), ids(tokens + 6)
    context, new = prefill(model, text[:, :tokens]), text[:, tokens:]
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in text[:, :tokens].split(64, 1):
            model(piece, past_key_values=own, use_cache=True)
    assert (context.full, context.windows, context.tokens) == ([1, 3], frozenset({0, 2}), tokens)
    for layer_idx, layer in enumerate(own.layers):
        torch.testing.assert_close(context.keys[layer_idx], layer.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(context.values[layer_idx], layer.values, rtol=1e-5, atol=1e-5)
    assert context.full_bytes == 2 * 2 * context.keys[1].nbytes
    wanted = follow(model, own, new)
    for fields in (None, EXACT, {**EXACT, "cache": "cluster"}, {"cache": "window", "memory": "9/10"}):
        with open_cache(model, fields, 2 * tokens + 6) as cache:
            replay(cache, model, context)
            assert {layer.get_seq_length() for layer in cache.layers} == {tokens}
            torch.testing.assert_close(follow(model, cache, new), wanted, rtol=1e-4, atol=1e-4)


def test_a_window_of_memory_leaves_the_models_own_windows_alone() -> None:
    """As a full cache does in which the tokens between are masked, which the model's windows do not see anyway."""
    model, text = tiny("gemma3"), ids(160)
    context, new = prefill(model, text[:, :150]), text[:, 150:]
    with open_cache(model, {"cache": "window", "memory": "3/4"}, 160) as cache:
        found = follow(model, replay(cache, model, context), new)
    full, wanted = replay(DynamicCache(config=model.config), model, context), []
    for place, token in enumerate(new.split(1, 1), 150):
        seen = torch.ones(1, place + 1, dtype=torch.int64)
        seen[:, SINKS : place - 120 + SINKS] = 0
        with torch.no_grad():
            said = model(token, past_key_values=full, attention_mask=seen, position_ids=torch.tensor([[place]]))
        wanted.append(said.logits[0, -1])
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_a_share_is_one_of_the_layers_with_full_attention(tmp_path: Path) -> None:
    """Windows are added to the budget, and not counted in the peak; without windows a share is as it is."""
    model = tiny("gemma3")
    token, window = 2 * 2 * 2 * 16 * 4, 15 * 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, width, bytes
    assert Geometry.of(model).full_kv_bytes(600, 1) == 600 * token + window
    assert budget(model, "1/6.5", 600) == 600 * token * 2 // 13 + window
    assert [budget(model, memory, 600) for memory in ("2MiB", 5)] == ["2MiB", 5]
    assert budget(long_model(), "1/6.5", 600) == "2/13"
    text = ids(604)
    context, fields = prefill(model, text[:, :600]), {"num_selected": 48, "group_size": 4, "memory": "9/10"}
    with open_cache(model, EXACT, 604) as cache:
        reference = follow(model, replay(cache, model, context), text[:, 600:])
    with open_cache(model, fields, 604, str(tmp_path)) as cache:
        follow(model, replay(cache, model, context), text[:, 600:])
        found, report = peak_share(cache), cache.report()  # type: ignore[arg-type, attr-defined]
        assert found["window_bytes"] == cache.contents.kept_bytes() >= window  # type: ignore[attr-defined]
        assert found["peak_share"] <= 0.9
        least = (report.peak_memory_bytes - found["window_bytes"]) / (604 * token)
        assert found["peak_share"] == pytest.approx(least, rel=0.01)
    row = measure(model, context, text[:, 600:], fields, reference, str(tmp_path))
    assert len(row["layer_mass"]) == 2 and 0 < row["mass"] <= 1 and row["window_bytes"] == found["window_bytes"]
    assert "only models whose layers all have full attention" in str(missing("4-bit", model))


def test_states_of_other_kinds_and_other_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"neither full attention nor a window \(LinearAttentionLayer\)"):
        prefill(layered("convolution"), ids(8))
    model = tiny("gemma3")
    context = prefill(model, ids(40))
    with pytest.raises(TypeError, match="cannot be put into a StaticSlidingWindowLayer"):
        replay(StaticCache(config=model.config, max_cache_len=64), model, context)


class Marked(Letters):
    """Begins each text with a token of its own."""

    bos_token_id = 190

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        found = super().__call__(text, return_tensors="pt")["input_ids"]
        return {"input_ids": torch.cat([torch.tensor([[190]]), found], 1)}


def test_each_stretch_begins_as_a_text_does() -> None:
    plain, marked = (reference_texts(one, 3, 50) for one in (Letters(), Marked()))  # type: ignore[arg-type]
    assert [int(one[0, 0]) for one in marked] == [190] * 3 and {one.shape for one in marked} == {(1, 50)}
    assert torch.equal(marked[0][0, 1:], plain[0][0, :49]) and 190 not in torch.cat(plain)


def test_rows_of_before_an_option_are_resumed(tmp_path: Path) -> None:
    """They were measured without it."""

    def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
        rows.add(model=arguments.model)
        return {}

    study = Study("named", "Which?", run, {"tokens": (5, "tokens"), **contexts.MODEL})
    target = tmp_path / "out.json"
    main(study, ["--json", str(target)])
    earlier = json.loads(target.read_text())
    assert earlier["arguments"].pop("model", "") is None
    target.write_text(json.dumps(earlier))
    assert len(main(study, ["--json", str(target), "--resume"])["rows"]) == 2
    for wrong in ("--model gemma", "--model other", "--tokens 6"):
        with pytest.raises(SystemExit):
            main(study, ["--json", str(target), "--resume", *wrong.split()])
