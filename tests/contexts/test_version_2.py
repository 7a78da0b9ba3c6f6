"""A context of version 2, in which coded keys lie token by token, still opens."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.contexts import MANIFEST_NAME, VERSION, Manifest, save
from hf_offload_cache.methods.disk_swap import CodedKeys

FIELDS: dict[str, Any] = {"num_selected": 48, "group_size": 8, "num_recent": 8, "reuse_capacity": 24}


def token_by_token(capture: Any, keys: CodedKeys) -> dict[str, Any]:
    """What `keys` captures, as it was in version 2."""
    tree = capture(keys)
    codes = tree["codes"].unflatten(1, (keys.coding.nbytes, -1)).transpose(2, 3).flatten(2)
    return {**tree, "codes": codes.contiguous()}


def test_a_context_of_version_2_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on as the cache that was saved, and is of the latest version when it is saved again."""
    model, ids = tiny("llama"), torch.randint(3, 190, (2, 640), generator=torch.Generator().manual_seed(0))
    with DiskSwapCache(model, **FIELDS) as cache, torch.no_grad():
        model(ids[:, :600], past_key_values=cache)
        with monkeypatch.context() as old:
            capture = CodedKeys.capture
            old.setattr(CodedKeys, "capture", lambda self: token_by_token(capture, self))
            old.setattr(save, "Manifest", functools.partial(Manifest, version=2))
            cache.save(tmp_path / "two")
        with DiskSwapCache.open(tmp_path / "two", model) as opened:
            said = [
                torch.cat([model(ids[:, at : at + 1], past_key_values=one).logits for at in range(600, 640)])
                for one in (cache, opened)
            ]
            opened.save(tmp_path / "latest")
    assert torch.equal(*said)
    versions = [json.loads((tmp_path / name / MANIFEST_NAME).read_text()) for name in ("two", "latest")]
    assert [one.get("manifest", one)["version"] for one in versions] == [2, VERSION]
