"""Two workers of Ray's: one dies in the midst of a document; and another process opens what either has prefilled.

The page of many documents runs here, too: starting Ray a second time would take half a minute.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from harness import COMMON, build
from local_ray import listening, local_ray
from many_documents import DIES_AT, NEW, dies_once, expected, is_gone, text
from page_model import TEXT, byte_tokenizer, save_tiny
from page_run import Setting, run_page
from pyarrow import parquet
from site_pages import DOCS, blocks, name
from site_pages import text as page_text
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from words import words

from hf_offload_cache import AnswerDocuments, answer_documents
from hf_offload_cache.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.alone]
"""Ray gives up on its own processes where they take half a minute to start."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Ray is started in: paths of a job that are not whole begin there."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def ray(place: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        with contextlib.chdir(place):
            found = stack.enter_context(local_ray())
        yield found


@pytest.fixture(scope="module")
def model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 1024}))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    model.save_pretrained(found)
    words().save_pretrained(found)
    return found


def rows_of(model: Any, seed: int) -> list[dict[str, Any]]:
    """Six documents with two questions each, other ones for each seed."""
    ends = {3: " " + DIES_AT}
    return [
        {
            "name": place,
            "document": text(model, 300 + place, place) + ends.get(place, ""),
            "questions": [text(model, 9, seed + place), text(model, 20, seed + 50 + place)],
        }
        for place in range(6)
    ]


def test_a_worker_that_dies_loses_its_turn_and_what_it_prefilled_is_opened(
    ray: Any, model: Any, folder: Path, tmp_path: Path
) -> None:
    mark, contexts = tmp_path / "mark", tmp_path / "contexts"
    options = {
        "contexts": contexts.as_uri(), "max_new_tokens": NEW, "prefill_chunk": 64, "path": str(tmp_path), "exact": True,
        "num_recent": 8, "group_size": 4,
    }  # fmt: skip

    def check(found: list[dict[str, Any]], asked: list[dict[str, Any]], context: str) -> None:
        assert [row["name"] for row in found] == list(range(6)) and {row["error"] for row in found} == {None}
        assert {row["context"] for row in found} == {context} and {row["context_note"] for row in found} == {None}
        for row, given in zip(found, asked, strict=True):
            assert row["answers"] == expected(model, words(), given["document"], given["questions"])

    loads, asked = functools.partial(dies_once, str(folder), str(mark)), rows_of(model, 100)
    # One block, of which a worker that dies would lose all: what is opened again would not be "prefilled".
    answered = answer_documents(ray.data.from_items(asked, override_num_blocks=1), loads, concurrency=2, **options)
    check(sorted(answered.take_all(), key=lambda row: row["name"]), asked, "prefilled")
    assert is_gone(mark) and int(mark.read_text()) != os.getpid()
    assert len(list(contexts.iterdir())) == 6
    assert listening(psutil.Process()) == {"127.0.0.1"}
    asked = rows_of(model, 300)  # without Ray, who would start a worker anew
    check(AnswerDocuments(loads, **options)(pyarrow.Table.from_pylist(asked)).to_pylist(), asked, "opened")
    assert {path.name for path in tmp_path.iterdir()} == {"mark", "contexts"}


def test_what_is_wrong_is_told_before_a_worker_starts(ray: Any) -> None:
    documents = ray.data.from_items([{"document": "w5", "questions": "w6"}])
    for wrong in ({"cache": "disc-swap"}, {"num_selekted": 4}, {"memory": "a lot"}, {"errors": "ignore"}):
        with pytest.raises(ConfigError):
            answer_documents(documents, **wrong)


def test_the_page_runs(ray: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker, and a folder in the place of a store."""
    monkeypatch.chdir(place)
    rows = [
        {"document": TEXT[:300], "questions": ["What is it about?", "Who is named?"]},
        {"document": TEXT[300:500], "questions": ["Where?"]},
    ]
    (place / "documents").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), place / "documents" / "all.parquet")
    tiny, shared, page = save_tiny(place / "tiny"), place / "shared", DOCS / "batch-inference.md"
    setting = Setting({"s3://bucket/contexts": shared.as_uri(), "concurrency=8": "concurrency=1"})
    namespace = {"__name__": "page", "name": str(tiny), "text": TEXT}
    assert run_page(setting.of(page_text(page)), name(page), namespace) == len(blocks(page, "python"))
    found = {row["document"]: row for row in parquet.read_table(place / "answers").to_pylist()}
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for row in rows:
        got = found.pop(row["document"])
        assert (got["questions"], got["context"], got["error"]) == (row["questions"], "prefilled", None)
        assert got["answers"] == expected(model, byte_tokenizer(), row["document"], row["questions"], new=64)
    assert not found and len(list(shared.iterdir())) == 2
