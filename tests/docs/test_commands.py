"""Every command of ours on the pages and in the README is parsed, and runs with a tiny model; those of lm-eval run in
`tests/eval/test_tasks.py`. Of others it is looked up that what they name is there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from page_model import TEXT
from short_tuning import measure_shortly, tune_shortly
from site_pages import DOCS, FRONT, PAGES, ROOT, blocks, commands, name

from hf_offload_cache import DiskSwapCache, offload_cache
from hf_offload_cache.console import main as console
from hf_offload_cache.console import parser
from hf_offload_cache.testing import __main__ as walk

OUR_NAME = "hf-offload-cache"
WITH_COMMANDS = [path for path in (*PAGES, *FRONT) if blocks(path, "sh")]

CHEAP = ("plan", "models", "inspect", "ls", "rm", "verify", "completion")
"""Verbs that run here as they are: all others get a model, `tune` also less to measure, `run` a program of the name."""
WITH_A_MODEL = ("generate", "chat", "publish", "serve", "stream")
"""The last but one is what the last asks."""

FILLED = {
    "FILE": "examples/document.txt", "TEXT": "Who wrote it?", "DIR": "contexts/manual", "URL": "published",
    "FOLDER": "published", "PACKAGE": "served", "ARGUMENT": "serve",
}  # fmt: skip
"""What tests write where a page says what to write."""


COMMANDS = [(path, words) for path in WITH_COMMANDS for words in commands(path)]


def filled(words: Sequence[str]) -> list[str]:
    """What is given to ours."""
    return [FILLED.get(word, word) for word in words[1:]]


OURS = [(path, filled(words)) for path, words in COMMANDS if words[0] == OUR_NAME]


@pytest.mark.parametrize(("path", "words"), OURS, ids=lambda given: name(given) if isinstance(given, Path) else None)
def test_the_console_takes_what_is_given(path: Path, words: list[str]) -> None:
    if words == ["--help"]:
        with pytest.raises(SystemExit) as end:
            parser().parse_args(words)
        assert end.value.code == 0
    else:
        assert callable(parser().parse_args(words).run)


def once(*verbs: str) -> list[list[str]]:
    """What is given to these, whichever pages have it."""
    given = dict.fromkeys(tuple(words) for _, words in OURS)
    return [list(words) for words in given if words[0] in verbs]


@pytest.mark.parametrize("words", once(*CHEAP), ids=" ".join)
def test_what_is_cheap_runs(words: list[str], saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = (0, 1) if words[0] == "plan" else (0,)  # 1: this machine has not the disk
    assert console.main(words) in codes
    assert capsys.readouterr().out or words[0] == "rm"
    if words[0] == "rm":
        assert (saved / "contexts" / "manual").exists() is ("--max-bytes" in words)


def test_every_verb_of_the_pages_runs() -> None:
    assert {words[0] for _, words in OURS} == {"--help", *CHEAP, *WITH_A_MODEL, "tune", "run", "lm-eval"}


def with_a_model(path: Path) -> list[list[str]]:
    """What this page gives verbs that load one, in its order; with `serve`, which the one behind it asks."""
    own = [filled(words) if words[0] == OUR_NAME else words for page, words in COMMANDS if page == path]
    return [words for words in own if words[0] in ("mkdir", *WITH_A_MODEL)]


@pytest.mark.parametrize("path", [path for path in WITH_COMMANDS if with_a_model(path)], ids=name)
def test_what_needs_a_model_runs(
    path: Path, folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny one, about the beginning of the document, from a folder like a checkout."""
    (saved / "examples").mkdir()
    (saved / "examples" / "document.txt").write_text(TEXT)
    monkeypatch.syspath_prepend(str(ROOT))
    if path not in (DOCS / "streaming.md", DOCS / "console.md"):  # elsewhere `generate` makes it
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
            if verb == "chat":
                monkeypatch.setenv("XDG_CACHE_HOME", str(saved))
                given += ["--question", "Who wrote it?"]
            assert console.main([verb, *given, "--model", str(folder)]) == 0, (verb, *others)
            said = capsys.readouterr()
            assert said.out and (verb != "stream" or re.search(r"[1-9]\d* (cells )?streamed", said.err)), said.err
            if "--trace" in given:
                assert (saved / given[given.index("--trace") + 1]).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("words", once("tune"), ids=" ".join)
def test_tuning_runs(
    words: list[str], folder: Path, session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And the library opens what is written."""
    monkeypatch.chdir(tmp_path)
    tune_shortly(monkeypatch)
    measure_shortly(monkeypatch)
    assert console.main([*words, "--model", str(folder)]) == 0
    memory, context, out = (words[words.index(option) + 1] for option in ("--memory", "--context", "--out"))
    assert f"wrote {out}" in capsys.readouterr().err and [one.name for one in tmp_path.iterdir()] == [out]
    if "--compare" in words:
        with offload_cache(session["model"], memory, int(context), measured=out) as chosen:
            assert chosen.why.count(f" at {len(TEXT):,} tokens") == 3, chosen.why  # not what is shipped
    else:
        with DiskSwapCache(session["model"], config=out) as tuned:
            found = tuned.config
            assert (found.max_context, found.max_batch) == (int(context), int(words[words.index("--batch") + 1]))


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


PROGRAM = """#!{python}
import sys
import torch
from transformers import AutoModelForCausalLM
assert sys.argv[1:] == ["serve"], sys.argv
model = AutoModelForCausalLM.from_pretrained({folder!r})
ids = torch.arange(4500)[None] % 256 + 1
print("answer", model.generate(ids, max_new_tokens=4, do_sample=False)[0, 4500:].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", once("run"), ids=" ".join)
def test_another_program_runs(
    words: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program or a module of that name, which serves nobody, but loads a model and asks it something."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILLED["DIR"]).parent.mkdir()
    called = words[words.index("serve") - 1]
    program = tmp_path / (f"{called}.py" if "-m" in words else called)
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert console.main(words) == 0
    said = capsys.readouterr()
    reused = ", 0 tokens of their prompts came from the library" if "--library" in words else ""
    assert re.fullmatch(r"answer \[(\d+, ){3}\d+\]\n", said.out), said
    assert f"1 requests were offloaded{reused}\n" in said.err, said
    assert "full KV" in said.err


WALK = ["python", "-m", "hf_offload_cache.testing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", sorted({tuple(words[3:]) for _, words in COMMANDS if words[:3] == WALK}), ids=" ".join
)
def test_a_model_is_walked(
    given: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert walk.main([str(folder) if word == "MODEL" else word for word in given]) == 0
    assert capsys.readouterr().out.endswith("LlamaForCausalLM: exact\n")


def test_other_commands_are_of_this_project() -> None:
    makefile, extras = (ROOT / "Makefile").read_text(), (ROOT / "setup.cfg").read_text()
    for path, words in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE), (path, words)
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]) is not None, (path, words)
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"(?:hf-offload-cache|\.)\[([\w-]+)\]", words[-1]):
                assert re.search(rf"^{extra} =", extras, re.MULTILINE), (path, words)
        else:
            assert words[0] in ("hf-offload-cache", "python", "mkdir"), (path, words)
