"""What the code has is on the pages, and what the pages say of it is so."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from site_pages import DOCS, FRONT, PAGES, ROOT, code, name, prose, section, tables, text

import hf_offload_cache
from hf_offload_cache import errors
from hf_offload_cache.console import parser
from hf_offload_cache.registry import CACHES, cache_class

OUR_NAME = "hf-offload-cache"
PACKAGE = Path(hf_offload_cache.__file__).parent
TROUBLE = text(DOCS / "troubleshooting.md")
CONSOLE = text(DOCS / "console.md")
CACHE_PAGES = {registered: DOCS / "caches" / f"{registered}.md" for registered in CACHES}
NAMED = {
    key: value
    for key, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
}


# ---------------------------------------------------------------------------------------------------- errors


def test_each_named_error_is_explained() -> None:
    headings = re.findall(r"^### (\w+)$", section(TROUBLE, "The named errors"), re.MULTILINE)
    assert sorted(headings) == sorted(NAMED) and len(NAMED) > 10


@pytest.mark.parametrize("error", sorted(NAMED))
def test_what_it_is_by_inheritance_is_said(error: str) -> None:
    said = re.match(r"An? `(\w+)`", section(TROUBLE, error).strip())
    assert said is not None and said[1] == NAMED[error].__base__.__name__


def test_errors_of_the_console_are_there_by_these_names() -> None:
    defined = {
        node.name
        for path in (PACKAGE / "console").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }
    (_, rows), = tables(section(TROUBLE, "Errors of the console"))  # fmt: skip
    unseen = {"DamagedError", "NoHomeError"}  # outside
    assert {one for row in rows for one in code(row[0])} == defined - unseen


@functools.cache
def sentences() -> list[str]:
    """Every string of the package, with "…" where a value goes."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


MESSAGES = [
    code(row[0])[0] for heads, rows in tables(TROUBLE) if heads[0] == "message" for row in rows
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_one_of_the_package(message: str) -> None:
    """One string has all its parts, in order."""
    parts = [re.escape(part) for part in message.split("…") if part.strip()]
    assert any(re.search(".*".join(parts), one, re.DOTALL) for one in sentences())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40


# ---------------------------------------------------------------------------------------------------- fields


def rows_of_fields(page: str) -> dict[str, str]:
    """Field -> what the page says of its default."""
    found: dict[str, str] = {}
    for heads, rows in tables(page):
        if heads == ["field", "meaning", "default"]:
            for row in rows:
                for field in code(row[0]):
                    assert field not in found, field
                    found[field] = row[2]
    return found


@pytest.mark.parametrize("registered", sorted(CACHES))
def test_each_field_is_on_the_page_of_its_cache(registered: str) -> None:
    fields = dataclasses.fields(cache_class(registered).config_class)
    said = rows_of_fields(text(CACHE_PAGES[registered]))
    assert sorted(said) == sorted(field.name for field in fields)


@pytest.mark.parametrize("registered", sorted(CACHES))
def test_a_default_is_what_the_page_says(registered: str) -> None:
    said = rows_of_fields(text(CACHE_PAGES[registered]))
    wrong = []
    for field in dataclasses.fields(cache_class(registered).config_class):
        if field.default is not None and field.default is not dataclasses.MISSING:
            value: Any = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            if not re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.]*\w)", said[field.name]):
                wrong.append(f"{field.name}: {value}, said {said[field.name]!r}")
    assert not wrong


def test_each_cache_is_in_the_table_of_which_one() -> None:
    (_, rows), *_ = tables(text(DOCS / "which-one.md"))
    assert {code(row[0])[0] for row in rows} == {cache_class(one).__name__ for one in CACHES}


# --------------------------------------------------------------------------------------------------- console


def verbs() -> dict[str, argparse.ArgumentParser]:
    found = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_each_verb_and_its_options_are_in_the_console_reference(verb: str) -> None:
    """In its own section, or, of several verbs, in the table of those and by name in the section."""
    own = section(CONSOLE, verb)
    if verb in ("inspect", "ls", "rm", "verify"):
        own += section(CONSOLE, "Contexts").split("### ")[0]
    actions = [one for one in verbs()[verb]._actions if not isinstance(one, argparse._HelpAction)]
    missing = [option for one in actions for option in one.option_strings if f"{option}" not in own]
    assert not missing
    every = [action for one in (parser(), *verbs().values()) for action in one._actions]
    known = {option for action in every for option in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", CONSOLE)) <= known


def test_the_sections_are_the_verbs() -> None:
    headings = re.findall(r"^#{2,3} (.+)$", CONSOLE, re.MULTILINE)
    assert sorted(set(headings) - {"Options of several verbs", "Contexts", "Streaming"}) == sorted(verbs())


# ---------------------------------------------------------------------------------------------------- others


def test_the_rooms_are_those_of_the_package() -> None:
    (_, rows), *_ = tables(text(DOCS / "architecture.md"))
    held = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {code(row[0])[0] for row in rows} == held


@pytest.mark.parametrize("path", [*PAGES, *FRONT], ids=name)
def test_modules_and_files_that_are_named_are_there(path: Path) -> None:
    """`python -m ...` of this project anywhere, and paths in backticks that begin with one of its folders."""
    words = f"{prose(path)} {' '.join(text(path).split())}"
    modules = set(re.findall(r"python -m ((?:eval|hf_offload_cache)(?:\.\w+)*)", words)) - {"eval.studies"}
    assert not [one for one in modules if find_spec(one) is None]
    files = set(re.findall(r"`((?:eval|examples|tests|hf_offload_cache)/[\w/.]+)`", words))
    assert not [one for one in files if not (ROOT / one).exists() and "<" not in one]


def test_examples_are_listed() -> None:
    (_, rows), *_ = tables(text(DOCS / "notebooks.md"))
    said = {one for row in rows for one in code(row[0])}
    held = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb", ".txt")}
    assert said == held


def test_the_files_of_contexts_have_their_names() -> None:
    from hf_offload_cache.contexts import MANIFEST_NAME
    from hf_offload_cache.streaming import NAME

    said = prose(DOCS / "on-disk-format.md")
    assert f"`{MANIFEST_NAME}` | format and library version" in said
    assert f"a manifest, `{NAME}`, and objects" in said and f"`URL/{NAME}`" in TROUBLE


def test_the_versions_are_those_that_install() -> None:
    """Of the README and the pages, as setup.cfg and the tested version have them. No newer transformers installs."""
    from hf_offload_cache.model import TESTED

    required = (ROOT / "setup.cfg").read_text()
    torch = re.search(r"torch>=([\d.]+)", required)
    transformers = re.search(r"transformers>=([\d.]+),<5\.(\d+)$", required, re.MULTILINE)
    assert torch is not None and transformers is not None
    assert f"5.{int(transformers[2]) - 1}" == TESTED
    said = f"torch {torch[1]} or newer, transformers {transformers[1]} to {TESTED}"
    assert all(said in prose(path) for path in (FRONT[0], DOCS / "index.md", DOCS / "versions.md"))


def test_the_versions_that_tests_run_with() -> None:
    """Of the page, as the Makefile, the constraints and the lowest environment have them."""
    makefile, pinned = (ROOT / "Makefile").read_text(), (ROOT / "constraints.txt").read_text()
    rows = {row[0]: row[2] for heads, rows in tables(text(DOCS / "versions.md")) if len(heads) == 4 for row in rows}
    for package in ("torch", "transformers"):
        lowest = re.search(rf"{package}==(\d+\.\d+)\.\*", makefile)
        highest = re.search(rf"^{package}==(\d+\.\d+)\.\d+$", pinned, re.MULTILINE)
        assert lowest is not None and highest is not None
        assert rows[package] == f"{lowest[1]} and {highest[1]}"
    classifiers = re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert classifiers == [rows["Python"]], "a version that no test ran with is no classifier"


def test_the_version_is_one_everywhere() -> None:
    """Of setup.cfg, the citation, and the changelog's first entry, which has a date if it is released."""
    version = re.search(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    entry = re.search(r"^## (\S+), (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entry is not None and entry[1] == version[1]
    assert re.fullmatch(r"not yet released|\d{4}-\d\d-\d\d", entry[2])


def test_the_changelog_has_every_verb_and_export() -> None:
    """Classes of configurations and reports go without saying: their caches and calls are there."""
    said = (ROOT / "CHANGELOG.md").read_text()
    assert not [verb for verb in verbs() if f"`{verb}`" not in said and f"`{OUR_NAME} {verb}" not in said]
    parts = {one for one in hf_offload_cache.__all__ if one.endswith(("Config", "Report"))}
    assert not [one for one in hf_offload_cache.__all__ if one not in said and one not in parts]
