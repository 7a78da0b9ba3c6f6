"""Contexts shared on a store that refuses, fails or answers with a page: told in the row, and nothing is rewritten. And
errors that tell nothing of a document."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from lanes_in_order import stream_first
from long_llama import long_model
from many_documents import text
from nothing_left import no_threads_and_descriptors
from web_store import Reply, WebStore, web_store
from words import words

from hf_offload_cache import AnswerDocuments
from hf_offload_cache.errors import ConfigError

NAME = "stream.json"
PAGE = b"<html>log in</html>"
ASKED = {"questions": [["w5 w6?"]]}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    long_model()
    with no_threads_and_descriptors():
        yield


@pytest.fixture
def store() -> Iterator[WebStore]:
    with web_store() as made:
        yield made


def worker(folder: Path, contexts: str | None = None, **options: Any) -> AnswerDocuments:
    fields: dict[str, Any] = {"num_recent": 8, "group_size": 4, "exact": True, "max_new_tokens": 2}
    return AnswerDocuments(lambda: (long_model(), words()), path=folder, contexts=contexts, **{**fields, **options})


def answered(answers: AnswerDocuments) -> dict[str, Any]:
    (row,) = answers({"document": [text(long_model(), 300, 1)], **ASKED}).to_pylist()
    assert row["error"] is None and len(row["answers"]) == 1
    return row


REPLIES: dict[str, Reply] = {
    "403": Reply(403), "503": Reply(503, headers={"Retry-After": "0"}),
    "429 for long": Reply(429, headers={"Retry-After": "3600"}), "a page": Reply(200, PAGE),
    "JSON": Reply(200, b'{"error": "denied"}'), "a redirect": Reply(302, headers={"Location": "/login"}),
}  # fmt: skip
SAID = {"a page": "HTML page", "JSON": "no manifest", "a redirect": "10 redirects"}


@pytest.mark.parametrize("what", list(REPLIES))
def test_a_store_that_refuses_is_told_and_left(what: str, store: WebStore, tmp_path: Path) -> None:
    answers = worker(tmp_path, f"{store.url}/c?sig=SECRET")
    first = answered(answers)
    assert (first["context"], first["context_note"]) == ("prefilled", None)
    assert answered(answers)["context"] == "streamed"
    before = dict(store.files)
    store.reply = lambda asked: REPLIES[what] if asked.method == "GET" else None
    store.asked.clear()
    row = answered(answers)
    assert (row["context"], row["answers"]) == ("prefilled", first["answers"])
    assert SAID.get(what, what[:3]) in row["context_note"] and "not shared" in row["context_note"]
    assert "SECRET" not in row["context_note"]
    assert not store.of("PUT") and store.files == before
    store.reply = lambda asked: None
    row = answered(answers)
    assert (row["context"], row["context_note"], row["answers"]) == ("streamed", None, first["answers"])


@pytest.mark.parametrize("what", ["403", "a page"])
def test_objects_that_are_refused_are_not_rewritten(
    what: str, store: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are missing are, when the store says so of all."""
    stream_first(monkeypatch)
    answers = worker(tmp_path, f"{store.url}/c")
    first = answered(answers)
    before = dict(store.files)
    store.reply = lambda asked: REPLIES[what] if asked.method == "GET" and NAME not in asked.path else None
    store.asked.clear()
    row = answered(answers)
    assert (row["context"], row["answers"]) == ("streamed", first["answers"])
    assert "could not be fetched" in row["context_note"] and SAID.get(what, what) in row["context_note"]
    assert not store.of("PUT") and store.files == before
    store.reply = lambda asked: None
    for path in [path for path in before if NAME not in path]:
        del store.files[path]
    assert answered(answers)["context"] == "streamed" and len(store.files) > 3
    assert answered(answers)["context_note"] is None


def test_a_store_that_takes_nothing_is_told(store: WebStore, tmp_path: Path) -> None:
    store.reply = lambda asked: Reply(403) if asked.method == "PUT" else None
    row = answered(worker(tmp_path, f"{store.url}/c"))
    assert row["context"] == "prefilled" and not store.files and len(store.of("PUT")) == 1
    assert "not shared" in row["context_note"] and "403" in row["context_note"]


def test_a_folder_that_refuses_is_told_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = worker(tmp_path, str(tmp_path / "contexts"))
    first = answered(answers)
    (context,) = (tmp_path / "contexts").iterdir()
    held, lstat = sorted(os.listdir(context)), os.lstat

    def refusing(path: Any, **more: Any) -> Any:
        if str(path) == str(context):
            raise PermissionError(errno.EACCES, "Permission denied")
        return lstat(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refusing)
        row = answered(answers)
    assert (row["context"], row["answers"]) == ("prefilled", first["answers"])
    assert "Permission denied" in row["context_note"] and "not shared" in row["context_note"]
    assert sorted(os.listdir(context)) == held and answered(answers)["context"] == "opened"


# --- nothing of a document is told -----------------------------------------------------------------------------------


SECRET = "w7 confidential w9"


@pytest.mark.parametrize(
    ("document", "questions"),
    [
        ([SECRET], ["w5"]), ({"text": SECRET}, ["w5"]), (SECRET.encode(), ["w5"]), (SECRET + "\ud800", ["w5"]),
        ("w3", [SECRET, 3]), ("w3", {SECRET: 1, 4: 2}), ("w3", [SECRET.encode()]), ("w3", [SECRET + "\udfff"]),
        ("w3", 5), (None, [SECRET]), (" ", [SECRET]), ("w3", [SECRET, " "]), ("w3", []),
    ],
)  # fmt: skip
def test_errors_tell_nothing_of_a_document(document: Any, questions: Any, tmp_path: Path) -> None:
    answers = worker(tmp_path)
    row = answers._row(document, questions)
    assert set(row) == {"error"} and row["error"].startswith("DocumentError: ") and "w9" not in row["error"]
    raising = worker(tmp_path, errors="raise")
    with pytest.raises(ValueError, match="must be a text") as caught:
        raising._row(document, questions)
    seen: BaseException | None = caught.value
    while seen is not None:
        assert "confidential" not in repr(seen)
        seen = seen.__cause__ or seen.__context__


@pytest.mark.parametrize("column", [[SECRET, 3], [SECRET, [SECRET]], [SECRET + "\ud800", SECRET]])
def test_columns_that_are_none_tell_nothing(column: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="column 'document' has values of") as caught:
        worker(tmp_path)({"document": column, "questions": [["w5"], ["w6"]]})
    assert "confidential" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize("column", ["document", "questions"])
def test_a_text_that_is_no_utf8_is_its_row_alone(column: str, tmp_path: Path) -> None:
    """pyarrow checks nothing of what a file calls a text, and its error has all of it."""
    secret, good = SECRET.encode() + b"\xff", b"w5 w6"
    offsets = pyarrow.array([0, len(secret), len(secret) + len(good)], pyarrow.int32()).buffers()[1]
    texts = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(secret + good))
    columns = {"document": pyarrow.array(["w5 w6"] * 2), "questions": pyarrow.array(["w5"] * 2), column: texts}
    errors = worker(tmp_path)(pyarrow.table(columns)).column("error").to_pylist()
    assert errors[1] is None and errors[0].startswith("DocumentError: ") and errors[0].endswith("got bytes")
