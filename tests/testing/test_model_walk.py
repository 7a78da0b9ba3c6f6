"""The walk on a user's own model, from the command line too; and that it notices what is wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import fresh, tiny, tokenizer, unchanged
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.model import TESTED
from hf_offload_cache.model import place as tested_version
from hf_offload_cache.testing.__main__ import main
from hf_offload_cache.testing.model_walk import CASES, walk_model


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_model_that_is_exact(name: str) -> None:
    """Every case in both modes; the model is as before."""
    model = tiny(name)
    with unchanged(model):
        found = walk_model(model, new_tokens=6)
    assert [(finding.case, finding.mode) for finding in found] == [
        (case, mode) for case in CASES for mode in ("streamed", "bitwise")
    ]
    assert not [str(finding) for finding in found if finding.failed or finding.comparison is None]


def test_a_narrow_type_is_told_and_not_judged() -> None:
    found = walk_model(fresh("llama").to(torch.bfloat16), new_tokens=4)
    assert all(finding.comparison is not None and not finding.failed for finding in found)
    assert all("not judged" in finding.reason for finding in found if finding.mode == "streamed")


@pytest.mark.parametrize("layer_class", [harness.OnlyNewTokens, harness.StaleGroup, harness.NoReorder])
def test_a_broken_cache_is_noticed(layer_class: Any) -> None:
    """A cache that loses, damages or mixes up its history is wrong in some case; an error of ours is wrong too."""
    model = tiny("llama")

    def broken(model: Any, exact: Any) -> DynamicCache:
        cache = harness.broken(model, layer_class)
        cache.close = lambda: None
        return cache

    assert any(finding.failed for finding in walk_model(model, new_tokens=8, make=broken))


def test_an_error_of_ours_is_a_failure() -> None:
    def raising(model: Any, exact: Any) -> Any:
        raise OSError("no room")

    found = walk_model(tiny("llama"), new_tokens=2, make=raising)
    assert all(finding.failed and "no room" in finding.reason for finding in found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and 0; 1 where something is wrong; 2 where there is no model."""
    model = fresh("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer(harness.vocabulary(model)).save_pretrained(tmp_path / "model")
    command = [str(tmp_path / "model"), "--new-tokens", "4", "--device", "cpu"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert all(case in printed for case in CASES)
    assert printed.endswith("LlamaForCausalLM: exact\n")
    monkeypatch.setattr(DiskSwapCache, "reorder_cache", lambda *arguments: None)
    assert main(command) == 1
    assert "beams" in next(line for line in capsys.readouterr().out.splitlines() if "WRONG" in line)
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main([*command, "--cache", "examples.own_method:PageCache"]) == 0  # one from outside
    assert capsys.readouterr().out.endswith("LlamaForCausalLM: exact\n")
    assert main([*command, "--cache", "disk-swop"]) == 2
    assert "did you mean 'disk-swap'?" in capsys.readouterr().err


VERSIONS = [("5.17.0", 0), ("5.23.4", 0), ("5.24.0", 1), ("5.24rc1", 1), ("6.0.0.dev0", 1), ("6.1", 1)]
"""Also of a checkout and of a release candidate, whose second number ends in letters."""


@pytest.mark.parametrize(("version", "said"), VERSIONS)
def test_a_newer_transformers_is_told_once(version: str, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first cache of the process, and the command that checks it."""
    tested_version._warn.cache_clear()
    monkeypatch.setattr(tested_version.transformers, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            DiskSwapCache(tiny("llama"), exact=True, engine="memory").close()
    texts = [str(warning.message) for warning in caught if "hf_offload_cache.testing MODEL" in str(warning.message)]
    assert len(texts) == said
    assert all(version in text and TESTED in text for text in texts)
    tested_version._warn.cache_clear()


def test_rocm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody tested it, and the command that checks a model; in each report, too."""
    tested_version._warn.cache_clear()
    monkeypatch.setattr(tested_version.torch.version, "hip", "6.4.1")
    line = "torch is built for ROCm 6.4.1, which hf_offload_cache was not tested with: check your model"
    with pytest.warns(UserWarning, match=line), DiskSwapCache(tiny("llama"), exact=True, engine="memory") as cache:
        assert [note for note in cache.report().warnings if note.startswith(line)]
    tested_version._warn.cache_clear()


def test_the_tested_version_is_the_one_of_the_package() -> None:
    """setup.cfg says it beside the range that installs."""
    setup = (Path(harness.__file__).parents[1] / "setup.cfg").read_text()
    assert f"with transformers {TESTED}.\n" in setup
