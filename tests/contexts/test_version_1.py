"""A context that an earlier version of this library wrote still opens: `version_1/`, checked in as it was written."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from saved_contexts import rewrite_values, values_of
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, verify
from hf_offload_cache.model import full_fingerprint

WRITTEN_WITH = "5.23.0"
"""The version of transformers, whose configurations have other fields in others."""
FIELDS: dict[str, Any] = {
    "group_size": 128, "num_selected": 128, "rank": 4, "reuse_capacity": 128, "num_recent": 16, "look_ahead": True,
    "layer_budgets": "measured",
}  # fmt: skip


@functools.cache
def model() -> Any:
    """The one it was made with; weights by whole-number arithmetic, so that they have the same bits everywhere."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(made.named_parameters())):
            count = torch.arange(parameter.numel(), dtype=torch.int64)
            mixed = (count * 7919 + number * 104729 + count * count * 31) % 1009
            parameter.copy_((mixed.double() / 1009 - 0.5).reshape(parameter.shape))
    return made


def ids() -> torch.Tensor:
    """What it holds, (1, 560)."""
    return ((torch.arange(560) * 37 + torch.arange(560) ** 2 * 11) % 59 + 5)[None]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    found: Path = shutil.copytree(Path(__file__).parent / "version_1", tmp_path / "context")
    if transformers.__version__ != WRITTEN_WITH:
        rewrite_values(found, lambda values: values.update(identity=full_fingerprint(model())))
    found.chmod(0o700)
    for path in found.iterdir():
        path.chmod(0o600)
    return found


def test_the_manifest_says_the_same(context: Path, tmp_path: Path) -> None:
    """Names of fields and their values, what makes a model equal among them, are those of version 1."""
    with DiskSwapCache.open(context, model(), engine="mapped") as cache:
        cache.save(tmp_path / "again")
    before, now = values_of(context), values_of(tmp_path / "again")
    assert before.keys() == now.keys()
    differ = {name for name in now if now[name] != before[name]}
    assert differ <= {"library", "created", "state", "layers", "version", "config"}
    later = {"summary_bytes", "steps_per_selection"}  # fields that there were not
    assert {name: value for name, value in now["config"].items() if name not in later} == before["config"]
    assert [layer["parts"] for layer in now["layers"]] == [layer["parts"] for layer in before["layers"]]


def test_all_of_it_is_whole(context: Path) -> None:
    found = verify(context)
    assert not found.findings and (found.files, found.records) == (5, 8)


@pytest.mark.parametrize("fields", [{}, {"memory": "8MiB"}, {"layer_budgets": "uniform"}], ids=str)
def test_it_goes_on(context: Path, fields: dict[str, Any]) -> None:
    """As a cache does that was filled here; up to rounding, since keys and values were computed elsewhere."""
    with DiskSwapCache.open(context, model(), engine="mapped", **fields) as cache:
        assert torch.equal(cache.input_ids, ids()) and cache.tokens == 560
        assert cache.offloaded[0].predictor.learnt.keys is not None and cache.report().bytes_read == 0
        with torch.no_grad(), DiskSwapCache(model(), engine="mapped", **FIELDS) as fresh:
            model()(ids()[:, :-1], past_key_values=fresh)
            model()(ids()[:, -1:], past_key_values=fresh)
            for token in (7, 63, 26, 7):
                step = torch.tensor([[token]])
                logits, like = (model()(step, past_key_values=each).logits.float() for each in (cache, fresh))
                assert (logits - like).abs().max() < 0.1 * like.std()
        assert cache.report().selected_fraction is not None and cache.report().selected_fraction < 0.7
