"""Names in backticks on the pages are there: of this package, or of others, which are listed here."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from keyword import iskeyword
from pathlib import Path

import pytest
from site_pages import FRONT, PAGES, ROOT, name, prose

import hf_offload_cache

PACKAGE = Path(hf_offload_cache.__file__).parent

NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
"""A name, an attribute, a method."""

OF_OTHERS = {
    "ClientSession", "ContinuousBatchingConfig", "GenerationConfig", "HTTPS_PROXY", "HTTP_PROXY", "NAME.py", "NO_PROXY",
    "RAY_AUTH_TOKEN",
    "__del__", "chmod", "clone", "cookies", "cpu_offload_space", "custom_generate",
    "from_pretrained", "generate_batch", "tools",
    "kernel.io_uring_disabled", "model.gradient_checkpointing_disable", "model.train",
    "repartition", "set_attn_implementation", "spawn",
}  # fmt: skip
"""Names, as they stand on the pages, of transformers, Ray, Python and Linux, and what a reader fills in."""


@functools.cache
def ours() -> set[str]:
    """Every name that the package and its tools define: modules, classes, functions, arguments, attributes, and texts
    that could be names (keys of JSON, values of fields, options)."""
    found = set(re.findall(r"^([\w-]+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE))  # extras
    found |= set(re.findall(r"^(\w+) = \w", (ROOT / "setup.cfg").read_text(), re.MULTILINE))
    places = (PACKAGE, ROOT / "eval", ROOT / "examples")
    for path in (file for place in places for file in place.rglob("*.py")):
        found |= {path.stem, *(folder.name for folder in path.relative_to(ROOT).parents)}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
                found.add(str(node.arg))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value, node.value.removeprefix("--")}
    return found


@functools.cache
def files() -> set[str]:
    """The names of a checkout's files."""
    folders = [ROOT / one for one in ("docs", "examples", "tests", "eval", PACKAGE.name)]
    return {path.name for path in (*ROOT.glob("*"), *(one for folder in folders for one in folder.rglob("*.*")))}


def names(page: Path) -> set[str]:
    """Those in backticks, without parentheses and without the values that are set."""
    spans = [span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
    found = {match[0].removesuffix("()") for span in spans if (match := NAME.fullmatch(span.partition("=")[0]))}
    return {one for one in found if not hasattr(builtins, one) and not iskeyword(one)}


def known(one: str) -> bool:
    first, *others = one.split(".")
    if one in files() or first in sys.stdlib_module_names:
        return True
    if others and first in ("torch", "transformers", "numpy"):
        return True
    return all(part in ours() for part in (others or [first]))


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=name)
def test_names_in_backticks_are_there(page: Path) -> None:
    assert sorted(one for one in names(page) - OF_OTHERS if not known(one)) == []


def test_names_of_others_are_on_a_page_and_not_ours() -> None:
    """What is not named any more, or has become ours, leaves the list."""
    on_pages = {one for page in (*PAGES, *FRONT) for one in names(page)}
    assert sorted(one for one in OF_OTHERS if one not in on_pages or known(one)) == []
