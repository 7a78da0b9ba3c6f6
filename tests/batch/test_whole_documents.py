"""Documents of a model whose keys depend on the length of a forward."""

from __future__ import annotations

from pathlib import Path

import pytest
from many_documents import NEW, expected, text
from rope_models import long_rope
from words import words

from hf_offload_cache import AnswerDocuments

ORIGINAL = 1200


@pytest.mark.parametrize(("length", "origin"), [(1190, "with each question"), (1400, None)])
def test_answers_are_those_of_one_forward(length: int, origin: str | None, tmp_path: Path) -> None:
    """The document alone is shorter than the original positions, and longer with a question; or it is longer alone."""
    model = long_rope(ORIGINAL)
    document, questions = text(model, length, 3), [text(model, 30, 4), text(model, 37, 5)]
    contexts = (tmp_path / "contexts").as_uri()
    worker = AnswerDocuments(
        lambda: (long_rope(ORIGINAL), words()), "disk-swap", path=str(tmp_path), exact=True, max_new_tokens=NEW,
        contexts=contexts,
    )  # fmt: skip
    for _ in range(2):
        (row,) = worker({"document": [document], "questions": [questions]}).to_pylist()
        assert row["error"] is None
        assert row["answers"] == expected(model, words(), document, questions)
        assert (origin or "") in (row["context_note"] or "")


def test_a_chunk_size_is_an_error_of_such_a_document(tmp_path: Path) -> None:
    model = long_rope(ORIGINAL)
    worker = AnswerDocuments(
        lambda: (model, words()), "disk-swap", path=str(tmp_path), exact=True, prefill_chunk=256, errors="raise"
    )
    with pytest.raises(ValueError, match=r"a prefill chunk of 256 tokens is not possible .*\(longrope\)"):
        worker({"document": [text(model, 1400, 3)], "questions": [["w5"]]})
