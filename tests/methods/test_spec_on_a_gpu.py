"""`SpecCache` on a GPU: fused kernels, and entries that it reads out of pinned host memory by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_cache import checked
from harness import Decoded, generate, prompt
from long_llama import LENGTH, long_model
from shared_keys import gemma3n
from spec_fields import ALL, SMALL
from transformers import DynamicCache

from hf_offload_cache import SpecCache

pytestmark = pytest.mark.gpu
MEMORY: dict[str, Any] = {**SMALL, "group_size": 32, "engine": "memory"}


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model().to("cuda")


def padded(model: Any, rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, mask = prompt(model, rows, LENGTH).cuda(), torch.ones(rows, LENGTH, dtype=torch.long, device="cuda")
    mask[-1, :100] = 0
    return ids, {"attention_mask": mask}


def near(own: Decoded, theirs: Decoded) -> None:
    """Half precision of low-bit entries aside; tokens are the same."""
    assert torch.equal(own.tokens, theirs.tokens)
    torch.testing.assert_close(own.logits, theirs.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("fields", [{}, {"top_up": "always"}, {"speculative": False}], ids=str)
@pytest.mark.parametrize("engine", ["memory", "auto"])
def test_where_all_is_as_it_was_stored(model: Any, options: Any, fields: Any, engine: str) -> None:
    """It is `DynamicCache`. 256 tokens are exchanged at a time, more in another way."""
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids, mask = padded(model, rows) if rows > 1 else (prompt(model, 1, LENGTH).cuda(), {})
    expected = generate(model, DynamicCache(config=model.config), ids, **mask, **options)
    few = {**ALL, "engine": engine, "group_size": 32 if engine == "memory" else 4, **fields}
    with SpecCache(model, **few) as cache:
        near(generate(model, cache, ids, **mask, **options), expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 6}], ids=str)
def test_what_is_exchanged(model: Any, options: Any) -> None:
    """All of a short prompt is as it was stored, 200 tokens that are exchanged: it is `DynamicCache`."""
    ids = prompt(model, 1, 20).repeat(1, 10).cuda()
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=40, **options)
    with SpecCache(model, **{**MEMORY, "num_selected": 250}) as cache:
        near(generate(model, cache, ids, max_new_tokens=40, **options), expected)


def test_layers_that_share_keys() -> None:
    """Each attends to what was chosen for this step, once."""
    cls, model = checked(SpecCache), gemma3n().to("cuda")
    with cls(model, num_selected=20, **MEMORY) as cache:
        generate(model, cache, prompt(model, 1, 400).cuda(), max_new_tokens=40)
    assert len(cls.gathers) > 40


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_out_of_pinned_memory_comes_what_comes_from_a_disk(model: Any, bits: int, tmp_path: Path) -> None:
    """Step by step, over forks and crops: the same tokens are chosen, and what was stored of them is attended to."""
    found, hits = [], []
    for fields in (MEMORY, {**SMALL, "engine": "auto", "path": tmp_path}):
        ids, mask = padded(model, 2)
        with SpecCache(model, bits=bits, num_selected=20, **fields) as cache:
            first = generate(model, cache, ids, max_new_tokens=60, **mask)
            if fields is MEMORY:
                history = cache.layers[0].history
                assert history.store.addresses(history.table.ids.reshape(-1).astype("int64")) is not None
            hits.append(cache.report().hit_rate)
            assert cache.report().bytes_read > 0
            with cache.fork() as twin:
                twin.crop(-70)
                more = torch.cat([first.tokens[:, : twin.tokens], prompt(model, 2, 3).cuda()], 1)
                seen = torch.nn.functional.pad(mask["attention_mask"], (0, more.shape[1] - LENGTH), value=1)
                found.append((first, generate(model, twin, more, max_new_tokens=20, attention_mask=seen)))
    assert hits[0] == pytest.approx(hits[1], abs=0.01) and hits[0] > 0
    for own, theirs in zip(*found, strict=True):
        near(own, theirs)


@pytest.mark.parametrize("bits", [1, 2])
def test_it_says_what_a_cpu_says(model: Any, bits: int) -> None:
    """The same tokens, as far as half precision, and elements between two codes, let the choice be the same."""
    ids, mask = padded(model, 2)
    decoded = []
    for place in ("cuda", "cpu"):
        model.to(place)
        with SpecCache(model, bits=bits, num_selected=20, **MEMORY) as cache:
            on = {name: one.to(place) for name, one in mask.items()}
            decoded.append(generate(model, cache, ids.to(place), max_new_tokens=8, **on).logits.cpu())
    model.to("cuda")
    torch.testing.assert_close(*decoded, rtol=0.15, atol=0.15)


def test_the_account_is_what_a_gpu_holds(model: Any) -> None:
    generate(model, DynamicCache(config=model.config), prompt(model, 4, LENGTH).cuda())  # work spaces of libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with SpecCache(model, num_selected=20, **MEMORY) as cache:
        generate(model, cache, prompt(model, 4, LENGTH).cuda(), max_new_tokens=8)
        owners = cache.report().memory_by_owner
        on_device = sum(owners.get(name, 0) for name in ("low-bit copy", "chosen entries", "rolling tail"))
        held = torch.cuda.memory_allocated() - before
        assert 0.9 * on_device <= held <= 1.3 * on_device + 2**20
    assert torch.cuda.memory_allocated() - before < 2**20
