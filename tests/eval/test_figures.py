"""The JSON files next to the benchmarks hold the figures that pages quote, with the commands that made them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hf_offload_cache.config import SelectiveConfig
from hf_offload_cache.registry import CACHES, cache_class

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "eval").rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_figure_has_a_command_and_a_page_that_quotes_it(path: Path) -> None:
    here = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for figure in json.loads(path.read_text()):
        assert {"figure", "page", "command", "machine"} <= set(figure) and (figure.get("rows") or figure["values"])
        earlier = re.fullmatch(r"made by python -m (eval[.\w]+)( .*)? at commit [0-9a-f]{7}", figure["command"])
        module = earlier[1] if earlier else here
        assert earlier or (re.match(rf"python -m {re.escape(module)}( |$)", figure["command"]) and find_spec(module))
        assert module in " ".join((ROOT / figure["page"]).read_text().split())
        assert all(len(row) == len(figure["columns"]) for row in figure.get("rows", ()))


NUMBER = re.compile(r"(?<![\w.])(1/)?(\d[\d,]*(?:\.\d+)?|\.\d+)")
PAGES = sorted({ROOT / figure["page"] for path in FILES for figure in json.loads(path.read_text())})


def tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each table of a page's figures: its lines, and the text between the table before and them."""
    text, section, lead = page.read_text(), "", ""
    if page.name != "figures.md":
        text = text.partition("\n## Figures\n")[2].partition("\n## ")[0]
    for part in text.split("\n\n"):
        if part.startswith("## "):
            section, lead = part.splitlines()[0], ""
        if not part.startswith("|"):
            lead += part
        elif section not in ("## How they were measured", "## Architectures"):
            head, _, *lines = part.splitlines()
            yield lead + head, lines
            lead = ""


def agree(shown: tuple[str, str], value: Any) -> bool:
    """True if a page's number, with "1/" before it or not, is `value` rounded, or is in this text or these values."""
    if isinstance(value, str):
        return shown in NUMBER.findall(value)
    if isinstance(value, list | tuple):
        return any(agree(shown, one) for one in value)
    digits = shown[1].replace(",", "")
    near = 0.5001 * 10.0 ** -len(digits.partition(".")[2])
    return value is not None and abs((1 / value if shown[0] and value else value) - float(digits)) <= near


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_have_the_numbers_of_the_files(page: Path) -> None:
    """A line's numbers are in one row or column, unless the line or the text before the table calls them earlier."""
    figures = [one for path in FILES for one in json.loads(path.read_text()) if ROOT / one["page"] == page]
    rows = [figure.get("rows") or [list(figure["values"].values())] for figure in figures]
    known = [series for those in rows for series in (*those, *zip(*those, strict=True))]
    compared = 0
    for lead, lines in tables(page):
        for line in lines:
            if "earlier" in (lead + line).lower():
                continue
            numbers = NUMBER.findall(re.sub("^.[^|]*|`[^`]*`", "", line))  # without label and code
            assert any(all(agree(one, series) for one in numbers) for series in known), (lead, line)
            compared += len(numbers)
    assert compared


def test_every_study_has_its_figure() -> None:
    studies = [path for path in (ROOT / "eval/studies").glob("*.py") if "STUDY = Study(" in path.read_text()]
    assert studies and not [path.name for path in studies if path.with_suffix(".json") not in FILES]


LIMITS = {
    "memory", "host_memory", "max_context", "max_batch", "engine", "verify", "io_timeout", "encryption_key", "trace",
    "progress", "graphs", "indexer_bits",
}  # fmt: skip
"""Fields of all caches that set a limit or a safeguard, or show something, or concern models with an indexer, whose
choice stays: they change neither quality nor reads."""


def test_every_field_of_a_configuration_has_a_figure() -> None:
    """A row of the study, or a figure that the study's JSON names; a field that is new fails until it has one."""
    measured: dict[str, set[str]] = {}
    for figure in json.loads((ROOT / "eval/studies/quality.json").read_text()):
        if "cache" not in figure:
            continue
        rows = {row[0].partition("=")[0] for row in figure["rows"]}
        measured.setdefault(figure["cache"], set()).update(rows, figure.get("elsewhere", {}))
        for field, other in figure.get("elsewhere", {}).items():
            pages = {one["page"] for one in json.loads((ROOT / other).read_text())}
            assert any(f"`{field}" in (ROOT / page).read_text() for page in pages), (field, other)
    shared = {field.name for field in dataclasses.fields(SelectiveConfig)}
    for name in CACHES:
        assert {field.name for field in dataclasses.fields(cache_class(name).config_class)} - shared <= measured[name]
    assert shared - LIMITS - {"host_slots"} <= measured["disk-swap"] and "host_slots" in measured["abstract-tree"]
