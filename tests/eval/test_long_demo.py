"""The demo behind 30,000 tokens, here with a tiny model and fewer; and the licence that it asks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval import gemma, long_demo
from hf_offload_cache.console import load_default_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_default_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and the default model's tokenizer without its chat template."""
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)).save_pretrained(place)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(place)
    tokenizer.chat_template = template
    return place


@pytest.mark.parametrize("tokens", [1500, 6000])
def test_the_text_has_every_key_at_its_depth(tokenizer: Any, tokens: int) -> None:
    text = long_demo.make_text(tokenizer, tokens)
    assert tokens * 0.9 < len(tokenizer(text, verbose=False)["input_ids"]) <= tokens
    for number, (place, code) in enumerate(long_demo.PLACES.items()):
        assert text.count(f"he secret code of the {place} is {code}.") == 2
        assert abs(text.index(code) / len(text) - (2 * number + 1) / 6) < 0.15


def test_a_run_asks_for_each_key(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A model with random weights finds none, and one that writes the key finds it."""
    arguments = ["--model", str(folder), "--tokens", "1500", "--memory", "4MiB"]
    assert long_demo.main(arguments) == 1
    out = capsys.readouterr().out
    tokens = int(re.search(r"read ([\d,]+) tokens in", out)[1].replace(",", ""))  # type: ignore[index]
    assert 1350 < tokens <= 1500 and "times the full KV" in out and "0 of 3 pass-keys found" in out
    assert [line for line in out.splitlines() if line.startswith("the secret code of the amber lighthouse: ")]
    assert "(wrong, it is 48127)" in out and "the text goes on: " in out
    asked: list[tuple[int, int]] = []

    def complete(model: Any, tokenizer: Any, cache: Any, ids: torch.Tensor, new_tokens: int) -> str:
        asked.append((cache.tokens, ids.shape[1]))
        text = tokenizer.decode(ids[0, -30:])
        return next((code for place, code in long_demo.PLACES.items() if place in text), "and so on")

    monkeypatch.setattr(long_demo, "_complete", complete)
    assert long_demo.main(arguments) == 0
    assert "3 of 3 pass-keys found" in capsys.readouterr().out
    assert [held for held, _ in asked] == [tokens - 1] * 4, "the text is read once, all but its last token"
    assert asked[-1][1] == tokens and all(length > tokens for _, length in asked[:-1])
    with pytest.raises(SystemExit):
        long_demo.main([*arguments[:-1], "4KiB"])
    assert "error: memory is 4,096 bytes" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hf_offload_cache" / "models" / "gemma-terms-accepted"


@pytest.mark.parametrize(("terminal", "answer", "accepted"), [(True, "y", 1), (True, "", 0), (False, "y", 0)])
def test_terms_are_shown_and_asked_for_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, answer: str, accepted: int
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: answer)
    shown: list[str] = []
    if accepted:
        gemma.accept_terms(tell=shown.append)
        gemma.accept_terms(tell=lambda text: pytest.fail("once is enough"))
    else:
        with pytest.raises(gemma.GemmaTermsError, match="--accept-gemma-terms"):
            gemma.accept_terms(tell=shown.append)
    assert shown == [gemma.TERMS] and "https://ai.google.dev/gemma/terms" in gemma.TERMS
    assert home.exists() is bool(accepted)


def test_an_option_accepts_the_terms(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(long_demo, "load_gemma", lambda: pytest.fail("not accepted"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit):
        long_demo.main([])
    said = capsys.readouterr().err
    assert gemma.TERMS in said and "make demo-long ARGS=--accept-gemma-terms" in said and not home.exists()
    gemma.accept_terms(accepted=True, tell=lambda text: None)
    assert home.read_text().strip() == gemma.TERMS


def test_the_demo_is_no_part_of_another_one() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "demo-long: $(VENV)/.long\n\t@$(BIN)/python -m eval.long_demo $(ARGS)\n" in makefile
    assert "demo: $(VENV)/.model\n" in makefile
    assert "EXTRAS := demo,quant,crypto,cluster,stream,ray,docs,dev\n" in makefile
