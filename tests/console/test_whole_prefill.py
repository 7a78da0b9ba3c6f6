"""The console prefills whole where a model's keys depend on the length of a forward, whatever the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import prompt
from rope_models import dynamic_rope, long_rope
from transformers import DynamicCache
from words import words

from hf_offload_cache.console import PromptTooLongError, build_prompt, check_length
from hf_offload_cache.console.main import main

ORIGINAL = 1200
"""More than the tokens of a piece."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("longrope")
    long_rope(ORIGINAL).save_pretrained(place)
    words().save_pretrained(place)
    return place


def asked(folder: Path, tmp_path: Path, length: int, *options: str) -> tuple[int, list[dict[str, Any]]]:
    document = " ".join(f"w{word}" for word in prompt(long_rope(ORIGINAL), 1, length)[0].tolist())
    (tmp_path / "document.txt").write_text(document)
    fixed = ["generate", "--model", str(folder), "--prompt-file", str(tmp_path / "document.txt"), "--question", "w7"]
    fixed += ["--device", "cpu", "--max-new-tokens", "6", "--set", "exact=true", "--json", str(tmp_path / "json")]
    code = main([*fixed, *options])
    return code, json.loads((tmp_path / "json").read_text()) if code == 0 else []


def expected(folder: Path, tmp_path: Path) -> str:
    model, tokenizer = long_rope(ORIGINAL), words()
    ids = build_prompt(tokenizer, (tmp_path / "document.txt").read_text(), "w7")
    out = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=6, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("length", [1000, 1193, 1500])
def test_both_answers_are_of_one_forward(folder: Path, tmp_path: Path, length: int) -> None:
    """Within the original positions; beyond them by less than the tokens that `generate` prefills; and far beyond."""
    code, (dynamic, ours) = asked(folder, tmp_path, length, "--compare")
    assert code == 0
    assert dynamic["text"] == ours["text"] == expected(folder, tmp_path)


def test_a_chunk_size_is_refused_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = asked(folder, tmp_path, 1500, "--prefill-chunk", "256")[0]
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "a prefill chunk of 256 tokens is not possible" in last and "(longrope)" in last and "leave the" in last


def test_a_chunk_size_that_does_not_matter_is_taken(folder: Path, tmp_path: Path) -> None:
    for length, chunk in ((1000, "100"), (1500, "1300"), (1500, "5000")):
        code, (ours,) = asked(folder, tmp_path, length, "--prefill-chunk", chunk)
        assert (code, ours["text"]) == (0, expected(folder, tmp_path))


def test_dynamic_positions_reach_as_far_as_their_factor(folder: Path, tmp_path: Path) -> None:
    """Four times the positions of the configuration, as `DynamicCache` runs it; both answers are of one forward."""
    model = dynamic_rope(400)
    check_length(model, 1590, 10)
    with pytest.raises(PromptTooLongError, match="together 1,601, but the model has 1,600 positions"):
        check_length(model, 1591, 10)
    with pytest.raises(PromptTooLongError, match="the model has 4,096 positions"):
        check_length(long_rope(400), 4090, 10)
    model.save_pretrained(tmp_path / "dynamic")
    words().save_pretrained(tmp_path / "dynamic")
    code, (dynamic, ours) = asked(tmp_path / "dynamic", tmp_path, 1300, "--compare")
    assert code == 0 and dynamic["prompt_tokens"] > 1300 and dynamic["text"] == ours["text"]
