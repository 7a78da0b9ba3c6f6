"""Every block of the pages and of the README runs: Python on a tiny model, the console as far as that is cheap.

The blocks of one page share a namespace, as a reader's session has one. Sybil finds and runs them: it knows Markdown
and skips, needs no formatter of its own beside ruff, and its errors name the line of the page.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import types
import unittest
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import torch
from site_pages import DOCS, FRONT, PAGES, ROOT, blocks, name, text
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import main as console

README = FRONT[0]
WITH_PYTHON = [path for path in (*PAGES, README) if blocks(path, "python")]
WITH_COMMANDS = [path for path in (*PAGES, *FRONT) if blocks(path, "sh")]
TEXT = (ROOT / "examples" / "document.txt").read_text()[:4500]

SKIPPED = {
    "docs/batch-inference.md": ["starts Ray, which takes half a minute; the block below has what its workers do"],
    "docs/streaming.md": ["needs an object store and a web server; the block below it does the same with a folder"],
    "docs/tuning.md": ["needs a file that tuning wrote, which takes minutes", "tuning takes minutes"],
}
"""What no test runs, and why, as the pages say it."""

CHEAP = ("plan", "inspect", "ls", "rm", "verify")
"""Verbs that run here as they are, beside those that need a model; of `tune` and `run` what is given to them is parsed.
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: 1 + at for at, letter in enumerate(letters)}}
    own = Tokenizer(BPE(vocabulary, []))
    own.pre_tokenizer, own.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as a hub gives it."""
    made = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=40000, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def session(folder: Path) -> dict[str, Any]:
    """What the quickstart's first block leaves."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    return {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(TEXT, return_tensors="pt")}


@pytest.fixture
def saved(session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the context that pages name `contexts/manual`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contexts").mkdir()
    with DiskSwapCache(session["model"]) as cache, torch.no_grad():
        session["model"](session["inputs"].input_ids[:, :600], past_key_values=cache)
        cache.save("contexts/manual")
    return tmp_path


def resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def run_page(page: str, path: str, namespace: dict[str, Any]) -> tuple[int, list[str]]:
    """How many blocks ran, and why others did not. Raises what a block raises, with its line."""
    document = Document(page, path)
    for parser in (PythonCodeBlockParser(), SkipParser()):
        for region in parser(document):
            document.add(region)
    document.namespace.update(namespace)
    ran, skipped = 0, []
    for example in document.examples():
        try:
            example.evaluate()
            ran += 1
        except unittest.SkipTest as reason:
            skipped.append(str(reason))
    document.namespace.clear()
    return ran, skipped


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_runs(
    path: Path, folder: Path, session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no thread and no descriptor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))  # which dataclasses look for
    before = resources()
    namespace = {"__name__": "page", "name": str(folder), "text": TEXT}
    if path not in (README, DOCS / "quickstart.md"):  # which make these themselves
        namespace |= session
    ran, skipped = run_page(text(path), name(path), namespace)
    assert skipped == SKIPPED.get(name(path), [])
    assert ran == len(blocks(path, "python"))  # where one is skipped, what says so counts
    assert resources() == before


@pytest.mark.parametrize("path", sorted(SKIPPED))
def test_what_is_skipped_is_python(path: str) -> None:
    for block in blocks(ROOT / path, "python"):
        ast.parse(block)


def test_a_block_that_fails_is_told_with_its_line() -> None:
    page = "# One\n\n```python\na = 1\n```\n\nand\n\n```python\nassert a == 2\n```\n"
    with pytest.raises(AssertionError) as raised:
        run_page(page, "one.md", {})
    assert raised.traceback[-1].lineno == 9 and str(raised.traceback[-1].path).endswith("one.md")


# ------------------------------------------------------------------------------------------------ the console


def commands(path: Path) -> list[list[str]]:
    """The words of each command of a page, without variables that are set before it."""
    lines = "\n".join(blocks(path, "sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [list(dropwhile(re.compile(r"[A-Z_]+=").match, words)) for words in found if words]


COMMANDS = [(path, words) for path in WITH_COMMANDS for words in commands(path)]
OURS = [(path, words[1:]) for path, words in COMMANDS if words[0] == "hf-offload-cache"]


def placeholder(words: Sequence[str]) -> bool:
    return any(re.fullmatch(r"[A-Z]+", word) for word in words)


@pytest.mark.parametrize(("path", "words"), OURS, ids=lambda given: name(given) if isinstance(given, Path) else None)
def test_the_console_takes_what_is_given(path: Path, words: list[str]) -> None:
    if words == ["--help"]:
        with pytest.raises(SystemExit) as end:
            console.parser().parse_args(words)
        assert end.value.code == 0
    else:
        assert callable(console.parser().parse_args(words).run)


@pytest.mark.parametrize(
    "words",
    [list(one) for one in dict.fromkeys(tuple(words) for _, words in OURS) if one[0] in CHEAP and not placeholder(one)],
    ids=" ".join,
)
def test_what_is_cheap_runs(words: list[str], saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = (0, 1) if words[0] == "plan" else (0,)  # 1: this machine has not the disk
    assert console.main(words) in codes
    assert capsys.readouterr().out or words[0] == "rm"
    if words[0] == "rm":
        assert (saved / "contexts" / "manual").exists() is ("--max-bytes" in words)


def with_a_model(path: Path) -> list[list[str]]:
    """What this page gives verbs that load one, in its order; with `serve`, which the one behind it asks."""
    verbs = ("generate", "publish", "serve", "stream")
    own = [words for page, words in COMMANDS if page == path and not placeholder(words)]
    return [words[1:] if words[1] in verbs else words for words in own if words[0] == "mkdir" or words[1] in verbs]


@pytest.mark.parametrize("path", [path for path in WITH_COMMANDS if with_a_model(path)], ids=name)
def test_what_needs_a_model_runs(
    path: Path, folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny one, about the beginning of the document, from a folder like a checkout."""
    (saved / "examples").mkdir()
    (saved / "examples" / "document.txt").write_text(TEXT)
    monkeypatch.syspath_prepend(str(ROOT))
    if path != DOCS / "streaming.md":  # elsewhere `generate` makes it
        shutil.rmtree(saved / "contexts")
    asked, url = "http://127.0.0.1:8000", ""
    with contextlib.ExitStack() as served:
        for verb, *others in with_a_model(path):
            if verb == "mkdir":
                (saved / others[0]).mkdir()
                continue
            if verb == "serve":
                url = served.enter_context(serving(saved / others[0]))
                continue
            given = [word.replace(asked, url) for word in others]
            if verb != "publish":
                given += ["--max-new-tokens", "4"]
            assert console.main([verb, *given, "--model", str(folder)]) == 0, (verb, *others)
            said = capsys.readouterr()
            assert said.out and (verb != "stream" or re.search(r"[1-9]\d* (cells )?streamed", said.err)), said.err
            if "--trace" in given:
                assert (saved / given[given.index("--trace") + 1]).stat().st_size


@contextlib.contextmanager
def serving(place: Path) -> Iterator[str]:
    """`serve` on a port that is free."""
    command = [str(Path(sys.executable).parent / "hf-offload-cache"), "serve", str(place), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert re.fullmatch(r"http://\S+/\n", first)
            yield first.rstrip("/\n")
        finally:
            process.terminate()


def test_other_commands_are_of_this_project() -> None:
    makefile, extras = (ROOT / "Makefile").read_text(), (ROOT / "setup.cfg").read_text()
    for path, words in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE), (path, words)
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]) is not None, (path, words)
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"(?:hf-offload-cache|\.)\[(\w+)\]", words[-1]):
                assert re.search(rf"^{extra} =", extras, re.MULTILINE), (path, words)
        else:
            assert words[0] in ("hf-offload-cache", "python", "mkdir"), (path, words)
