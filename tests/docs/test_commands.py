"""Every command of the pages and of the README: parsed, and run as far as that is cheap, with a tiny model."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import pytest
from page_model import TEXT
from site_pages import DOCS, FRONT, PAGES, ROOT, blocks, name

from hf_offload_cache.console import main as console

WITH_COMMANDS = [path for path in (*PAGES, *FRONT) if blocks(path, "sh")]

CHEAP = ("plan", "inspect", "ls", "rm", "verify")
"""Verbs that run here as they are, beside those that need a model; of `tune` and `run` what is given to them is parsed.
"""


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
