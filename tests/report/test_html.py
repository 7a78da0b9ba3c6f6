"""Reports and plans as tables in a notebook."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from typing import Any

from hf_offload_cache.memory import MemoryPlan
from hf_offload_cache.report import CacheReport, StreamReport

HOSTILE = "<script>alert('&amp;')</script>"


class Table(HTMLParser):
    """Tags, and the texts of a table's rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.title = ""
        self._cell: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        self._cell = []

    def handle_data(self, data: str) -> None:
        self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        text = "".join(self._cell)
        if tag in ("td", "th"):
            self.rows[-1].append(text)
        elif tag == "caption":
            self.title = text


def made(cls: Any, **given: Any) -> Any:
    """A report with small numbers in all its fields but those that are `given`."""
    values = {"int": 2048, "float": 0.5, "str": HOSTILE, "dict": {"slots": 1024, HOSTILE: 2}, "tuple": (HOSTILE,)}
    required = {field.name: str(field.type).split("[")[0].split(" ")[0] for field in dataclasses.fields(cls)}
    return cls(**{name: values[kind] for name, kind in required.items() if kind in values} | given)


def test_the_rows_of_a_cache_report_are_those_of_a_terminal() -> None:
    report = made(CacheReport, warnings=["a <b>warning</b>"], store="direct")
    table = Table(report._repr_html_())
    assert table.tags == {"table", "caption", "tr", "th", "td"}
    assert table.title == f"{HOSTILE}: 2,048 tokens"
    rows = dict(table.rows)
    assert rows["warning"] == "a <b>warning</b>" and rows["store"] == "direct"
    assert "".join(rows["memory by component"].split()) == "".join(f"slots 1.0 KiB, {HOSTILE} 2 B".split())
    printed = str(report)
    assert all(name in printed for name in rows)


def test_a_stream_report() -> None:
    report = made(StreamReport, lost=0, whole=None, trouble=(HOSTILE, "b"), bandwidth=1.25e6)
    rows = dict(Table(report._repr_html_()).rows)
    assert rows["tokens"] == "2,048" and rows["received bytes"] == "2.0 KiB" and rows["bandwidth"] == "10.0 Mbit/s"
    assert rows["trouble"] == f"{HOSTILE}; b" and rows["seconds"] == "0.50"
    assert not {"lost", "whole"} & set(rows)
    assert HOSTILE not in report._repr_html_()


def test_a_plan() -> None:
    plan = MemoryPlan({"slots": 1024, HOSTILE: 512}, {"slots": 2048}, 4096, 8192, 1 << 20)
    table = Table(plan._repr_html_())
    assert table.title == "memory plan: 2.0 KiB" and HOSTILE not in plan._repr_html_()
    assert table.rows == [
        ["", "prefill", "decode"],
        ["slots", "1.0 KiB", "2.0 KiB"],
        [HOSTILE, "512 B", "0 B"],
        ["sum", "1.5 KiB", "2.0 KiB"],
        ["full KV", "8.0 KiB", ""],
        ["on disk", "4.0 KiB", ""],
        ["weights", "1.0 MiB", ""],
    ]
    both = Table(dataclasses.replace(plan, host_decode={"records": 1024}, device="cuda")._repr_html_()).rows
    assert both[3:6] == [
        ["device memory", "1.5 KiB", "2.0 KiB"],
        ["records", "0 B", "1.0 KiB"],
        ["host memory", "0 B", "1.0 KiB"],
    ]
