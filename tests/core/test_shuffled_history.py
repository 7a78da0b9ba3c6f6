"""A history of another order, rows of sequences and rows of heads: exact mode, crop, beams, padding, sparse gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from checked_cache import checked
from harness import CASES, SMALL, assert_exact, generate, prompt, reference, tiny
from long_llama import long_model
from pairwise import combinations
from shuffled_history import ShuffledCache, ShuffledHeadsCache
from transformers import DynamicCache

NAMED = {kind.__name__: kind for kind in (ShuffledCache, ShuffledHeadsCache)}
KINDS = pytest.mark.parametrize("kind", NAMED.values())


@pytest.mark.parametrize(("kind", "case"), combinations(NAMED, CASES.keys()))
def test_exact_in_blocks_with_positions(kind: Any, case: str) -> None:
    """Blocks of shuffled, ragged rows, merged under a mask: `DynamicCache`'s tokens and logits."""
    with harness.unchanged(tiny("llama")), kind(tiny("llama"), exact=True, **SMALL) as cache:
        assert_exact(reference("llama", case), CASES[case](tiny("llama"), cache))
        assert cache.report().layers["tagged"] == 3


@pytest.mark.parametrize(
    ("kind", "name", "case"), combinations(NAMED, ("llama", "gpt_oss"), ("padded_beams", "prompt_lookup"), strength=2)
)
def test_bitwise(kind: Any, name: str, case: str) -> None:
    with kind(tiny(name), exact="bitwise", **SMALL) as cache:
        assert_exact(reference(name, case), CASES[case](tiny(name), cache), bitwise=True)


@pytest.mark.parametrize(
    ("kind", "case"), combinations(NAMED, CASES.keys(), always=lambda kind, case: case == "padded_beams")
)
def test_all_units_selected_is_exact(kind: Any, case: str) -> None:
    """Entries at their positions under the model's mask, those that are none hidden."""
    cls = checked(kind)
    with cls(tiny("llama"), num_selected=512, reuse_capacity=64, **SMALL) as cache:
        assert_exact(reference("llama", case), CASES[case](tiny("llama"), cache))
        assert len(cls.gathers) >= 9  # of three layers, three steps at the least


@KINDS
def test_sparse_gathers(kind: Any, tmp_path: Path) -> None:
    """Half of the units, other ones in each row: with slots, beams, padding, a crop and a fork; a save and an open."""
    cls, model = checked(kind), long_model()
    mask = harness.padding(2, 240, 31)
    ids = prompt(model, 2, 240).masked_fill(mask == 0, harness.PAD)
    fields = {"group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 200, "reuse_capacity": 80}
    with cls(model, path=tmp_path, look_ahead=True, **fields) as cache:
        generate(model, cache, ids, attention_mask=mask, num_beams=3, max_new_tokens=6)
        cache.crop(-45)
        whole = torch.cat([cache.input_ids, prompt(model, len(cache.input_ids), 5, seed=3)], 1)
        seen = torch.cat([cache.attention_mask, torch.ones(len(whole), 5, dtype=torch.long)], 1)
        cache.save(tmp_path / "context")
        with kind.open(tmp_path / "context", model) as opened, cache.fork() as twin:
            outs = [generate(model, one, whole, attention_mask=seen, max_new_tokens=4) for one in (opened, twin, cache)]
        assert all(torch.equal(outs[0].logits, out.logits) for out in outs[1:])
        assert 0.2 < cache.report().selected_fraction < 0.9
    assert len(cls.gathers) >= 3 * (5 + 3)


def test_less_than_all_is_not_exact() -> None:
    """The tolerance tells."""
    model = long_model()
    expected = generate(model, DynamicCache(config=model.config), prompt(model, 1, 240), max_new_tokens=4)
    with ShuffledCache(model, group_size=4, num_recent=8, num_selected=40) as cache:
        found = generate(model, cache, prompt(model, 1, 240), max_new_tokens=4)
    assert not harness.compare(expected, found).exact
