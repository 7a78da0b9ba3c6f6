"""`run`: a program that knows nothing of this library, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig, LlamaForCausalLM

from hf_offload_cache.console import main as cli

PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
found = model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)
print("answer", found[0, 40:].tolist())
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a model."""
    build(LlamaForCausalLM, LlamaConfig(**COMMON)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "serve.py"
    file.write_text(PROGRAM)
    return file


@pytest.mark.parametrize("code", [0, 3])
def test_a_file_runs_with_its_arguments_and_its_models_are_offloaded(
    code: int, program: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, before = GenerationMixin.generate, (list(sys.argv), list(sys.path))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    expected = model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    own = ["run", "--cache", "disk-swap", "--set", "exact=true", "--path", str(tmp_path)]
    assert cli.main([*own, str(program), str(tiny), str(code)]) == code
    out, err = capsys.readouterr()
    assert f"answer {expected}" in out and "1 requests were offloaded" in err and "full KV" in err
    assert GenerationMixin.generate is plain and (sys.argv, sys.path) == before


def test_a_module_runs(program: Path, tiny: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(program.parent)
    assert cli.main(["run", "-m", "serve", str(tiny), "0"]) == 0
    assert "answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["/bin/sh"], "is no Python script"),
        (["--cache", "disk-swp", "x.py"], "did you mean 'disk-swap'"),
        (["--set", "num_selekted=3", "x.py"], "num_selekted"),
    ],
)
def test_a_wrong_request_is_one_line(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *wrong]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
