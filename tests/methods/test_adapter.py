"""Calibrated adapters: made, saved, loaded, used; and what is said of files that cannot be used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, fresh, prompt, tiny, unchanged
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import Adapter, DiskSwapCache, calibrate
from hf_offload_cache.errors import AdapterError
from hf_offload_cache.model.fingerprint import fingerprint
from hf_offload_cache.testing import open_descriptors

FIELDS: dict[str, Any] = {"group_size": 4, "num_recent": 8, "num_selected": 64}
FIELDS["engine"] = "memory"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_descriptors(), threading.active_count()
    with unchanged(tiny("llama")):
        yield
    assert (open_descriptors(), threading.active_count()) == before


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    model = tiny("llama")
    return calibrate(model, [prompt(model, 1, 300, seed=1)[0], prompt(model, 2, 200, seed=2)])


@pytest.fixture
def path(adapter: Adapter, tmp_path: Path) -> Path:
    adapter.save(tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors"


def keys_of(model: Any, ids: torch.Tensor, layer_idx: int) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache.layers[layer_idx].keys


def test_calibration_finds_the_keys_directions(adapter: Adapter) -> None:
    """Every layer; half of the joined width; the right singular vectors of all texts' keys (SVD)."""
    model = tiny("llama")
    assert sorted(adapter.projections) == [0, 1, 2]
    assert adapter.made_for == fingerprint(model)
    for layer_idx, projection in adapter.projections.items():
        texts = [prompt(model, 1, 300, seed=1), prompt(model, 2, 200, seed=2)]
        flat = torch.cat(
            [keys_of(model, ids, layer_idx).transpose(1, 2).flatten(2).flatten(0, 1) for ids in texts]
        ).double()
        assert flat.shape == (700, 32)
        assert projection.shape == (32, 16)
        true = torch.linalg.svd(flat, full_matrices=False)[2][:16].T
        kept = (flat @ projection.double()).square().sum()
        assert kept / (flat @ true).square().sum() > 0.99999


def test_strings_need_a_tokenizer() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(model, ["text"])
    with pytest.raises(ValueError, match="texts must hold at least one"):
        calibrate(model, [])

    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        assert (text, verbose) == ("text", False)
        return {"input_ids": prompt(model, 1, 20)[0].tolist()}

    adapter = calibrate(model, ["text"], tokenizer=tokenizer, rank=3)
    same = calibrate(model, [prompt(model, 1, 20)], rank=3)
    assert torch.equal(adapter.projections[2], same.projections[2])
    assert adapter.projections[2].shape == (32, 3)


def test_saved_and_loaded(adapter: Adapter, path: Path) -> None:
    loaded = Adapter.load(path, tiny("llama"))
    assert loaded.made_for == adapter.made_for
    assert loaded.projections.keys() == adapter.projections.keys()
    assert all(torch.equal(loaded.projections[i], adapter.projections[i]) for i in adapter.projections)
    assert torch.equal(loaded.of_layer(1, 5), adapter.projections[1][:, :5])
    assert torch.equal(loaded.of_layer(1, None), adapter.projections[1])


def test_a_loaded_adapter_is_used_from_the_first_group_on(adapter: Adapter, path: Path) -> None:
    model = tiny("llama")
    with DiskSwapCache(model, adapter=path, summary_dtype="int8", **FIELDS) as cache, torch.no_grad():
        model(prompt(model, 1, 350), past_key_values=cache)
        for layer_idx, layer in enumerate(cache.offloaded):
            keys = layer.predictor.fitted.keys
            used = keys.adapter.flatten(0, 1)
            assert keys.tokens == 340
            torch.testing.assert_close(used, adapter.projections[layer_idx][:, : used.shape[1]].to(used.dtype))
        model(prompt(model, 1, 1, seed=3), past_key_values=cache)
        assert 0 < cache.report().selected_fraction < 0.3


# ---------------------------------------------------------------------------------------------- what cannot be used


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], Any]) -> None:
    """Change tensors and metadata of a saved adapter."""
    tensors = load_file(path)
    metadata = {"format": "hf_offload_cache adapter 1", "model": json.dumps(fingerprint(tiny("llama")))}
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def corrupt_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)


SPOILT: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("These are not the tensors you are looking for.\n" * 20),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "corrupt header": corrupt_header,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "no fingerprint": lambda path: rewrite(path, lambda tensors, metadata: metadata.pop("model")),
    "fingerprint is no JSON": lambda path: rewrite(path, lambda tensors, metadata: metadata.update(model="{")),
    "fingerprint is no object": lambda path: rewrite(path, lambda tensors, metadata: metadata.update(model="[]")),
    "another version": lambda path: rewrite(path, lambda _, metadata: metadata.update(format="adapter 2")),
    "a foreign tensor": lambda path: rewrite(path, lambda tensors, metadata: tensors.update(bias=torch.zeros(2))),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_file_that_cannot_be_read(path: Path, kind: str) -> None:
    SPOILT[kind](path)
    with pytest.raises(AdapterError) as caught:
        DiskSwapCache(tiny("llama"), adapter=path, **FIELDS)
    assert str(path) in str(caught.value)
    assert "calibrate()" in str(caught.value)


def other_shape() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "num_key_value_heads": 4}))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: tiny("qwen3"), "model_type is qwen3, the adapter's is llama"),
        (other_shape, "num_key_value_heads is 4, the adapter's is 2"),
        (lambda: fresh("llama", seed=1), "weights is"),
    ],
    ids=["another architecture", "another shape", "other weights"],
)
def test_made_for_another_model(path: Path, make: Callable[[], Any], named: str) -> None:
    model = make()
    with unchanged(model), pytest.raises(AdapterError, match=named) as caught:
        DiskSwapCache(model, adapter=path, **FIELDS)
    assert str(path) in str(caught.value)


def test_a_rank_beyond_what_was_calibrated(path: Path) -> None:
    with pytest.raises(AdapterError, match=r"rank is 17.*16"):
        DiskSwapCache(tiny("llama"), adapter=path, rank=17, **FIELDS)


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a layer is missing": (lambda tensors: tensors.pop("layer.1"), r"no layer 1.*\[0, 2\]"),
    "too few rows": (lambda tensors: tensors.update({"layer.1": torch.ones(24, 16)}), "layer 1"),
    "one dimension": (lambda tensors: tensors.update({"layer.1": torch.ones(32)}), "layer 1"),
    "more columns than rows": (
        lambda tensors: tensors.update({"layer.1": torch.ones(32, 5000)}),
        r"layer 1 has shape \(32, 5000\).*no more columns than rows",
    ),
    "no numbers": (lambda tensors: tensors["layer.1"].fill_(torch.nan), "layer 1"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_projections_that_do_not_fit(path: Path, wrong: str) -> None:
    change, named = WRONG_TENSORS[wrong]
    rewrite(path, lambda tensors, metadata: change(tensors))
    model = tiny("llama")
    with pytest.raises(AdapterError, match=named), DiskSwapCache(model, adapter=path, **FIELDS) as cache:
        model(prompt(model), past_key_values=cache)
