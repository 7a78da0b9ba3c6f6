"""What a worker does with the rows that it is given: answers, figures, errors, and contexts that are shared."""

from __future__ import annotations

import functools
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from long_llama import long_model
from many_documents import NEW, expected, text
from nothing_left import no_threads_and_descriptors
from pairwise import combinations
from words import words

from hf_offload_cache import AnswerDocuments, ContextLibrary, answer_documents, offload
from hf_offload_cache.batch import COLUMNS, DocumentError, PublishedContexts, SavedContexts
from hf_offload_cache.batch import documents as document_answers
from hf_offload_cache.console import PromptTooLongError, document_part
from hf_offload_cache.errors import BudgetError, ConfigError, StoreError, StoreFullError
from hf_offload_cache.fetch import Prefetcher
from hf_offload_cache.registry import CACHES
from hf_offload_cache.streaming import NAME, StreamManifest

SMALL: dict[str, Any] = {"num_recent": 8, "group_size": 4, "max_new_tokens": NEW}
EXACT: dict[str, Any] = {**SMALL, "exact": True}
SPARSE: dict[str, Any] = {**SMALL, "num_selected": 40}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No thread, no descriptor, no file beside the contexts; but for a moment threads of transfers that have ended."""
    long_model()
    with no_threads_and_descriptors():
        yield
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    assert {path.name for path in tmp_path.iterdir()} <= {"contexts", "key", "other key"}


def worker(folder: Path, cache: str = "disk-swap", **options: Any) -> AnswerDocuments:
    return AnswerDocuments(lambda: (long_model(), words()), cache, path=folder, **{**EXACT, **options})


def document(seed: int = 0, length: int = 560) -> str:
    return text(long_model(), length, seed)


def questions(*seeds: int) -> list[str]:
    return [text(long_model(), 7 + seed, seed) for seed in seeds]


def asked(seed: int, *of: int) -> dict[str, Any]:
    """A batch of one row."""
    return {"document": [document(seed)], "questions": [questions(*of)]}


def only(answered: pa.Table) -> dict[str, Any]:
    (row,) = answered.to_pylist()
    return row


def place_of(kind: str, folder: Path) -> str:
    return {"saved": (folder / "contexts").as_uri(), "published": "memory://contexts"}[kind]


# --- answers and figures -------------------------------------------------------------------------------------------


def test_answers_are_those_of_a_dynamic_cache(tmp_path: Path) -> None:
    """Any column stays; of one with texts alone, a text is a question."""
    several = pa.table(
        {"name": ["a", "b"], "text": [document(1), document(2)], "asked": [questions(3, 4, 5), questions(6)]}
    )
    answers = worker(tmp_path, document="text", questions="asked")
    found = answers(several).to_pylist()
    for row in found:
        assert row["answers"] == expected(long_model(), words(), row["text"], row["asked"])
        assert row["new_tokens"] == NEW * len(row["asked"]) and row["document_tokens"] == 560
        assert row["context"] == "prefilled" and row["context_note"] is None and row["error"] is None
        longest = 560 + max(len(one.split()) for one in row["asked"]) + 2  # "Question:", "Answer:"
        assert row["full_kv_bytes"] == (longest + NEW - 1) * 3 * 2 * 2 * 16 * 4
        assert 0 < row["peak_memory_bytes"] < 6 * row["full_kv_bytes"]  # writes may wait on a busy machine
        assert row["disk_bytes"] > row["full_kv_bytes"] // 2
        assert row["seconds"] > 0
    assert len({answer for row in found for answer in row["answers"]}) == 4
    assert [row["name"] for row in found] == ["a", "b"]
    single = answers({"text": np.array([document(1)]), "asked": np.array([questions(4)[0]])})
    assert only(single)["answers"] == [found[0]["answers"][1]]
    assert single.column_names == ["text", "asked", *COLUMNS]


@pytest.mark.parametrize(("name", "kind"), combinations(list(CACHES), ["saved", "published"]))
def test_a_shared_context_gives_what_a_prefill_does(name: str, kind: str, tmp_path: Path) -> None:
    """Where a cache selects, too; for a question that nobody had asked, by another worker."""
    contexts = place_of(kind, tmp_path)
    alone = only(worker(tmp_path, name, **{**SPARSE, "exact": False})(asked(1, 5, 6)))
    first = worker(tmp_path, name, contexts=contexts, **{**SPARSE, "exact": False})
    assert only(first(asked(1, 7)))["context"] == "prefilled"
    second = worker(tmp_path, name, contexts=contexts, **{**SPARSE, "exact": False})
    row = only(second(asked(1, 5, 6)))
    assert (row["answers"], row["context_note"]) == (alone["answers"], None)
    assert row["context"] == {"saved": "opened", "published": "streamed"}[kind]
    assert only(second(asked(2, 5)))["context"] == "prefilled"


@pytest.mark.parametrize(("name", "memory"), [*((name, None) for name in CACHES), ("disk-swap", "2MiB")])
def test_documents_of_a_library_share_how_they_begin(name: str, memory: str | None, tmp_path: Path) -> None:
    """A request of `offload` has left a part of the first one; another worker opens all of it."""
    library, computed = ContextLibrary(tmp_path / "contexts"), list[int]()
    texts = [document(1), " ".join([*document(1).split()[:400], *document(2).split()[:90]])]
    small = EXACT if memory is None else {"exact": True, "max_new_tokens": NEW, "memory": memory}
    fields = {name: value for name, value in small.items() if name != "max_new_tokens"}

    def made() -> AnswerDocuments:
        return AnswerDocuments(lambda: (long_model(), words()), name, contexts=library, **small)

    first = made()
    ids = document_part(words(), texts[0])
    with offload(long_model(), name, library=library, **fields), torch.no_grad():
        long_model().generate(ids[:, :300], max_new_tokens=1, do_sample=False)
    hook = long_model().get_input_embeddings().register_forward_hook(
        lambda _, given, __: computed.append(given[0].numel())
    )  # fmt: skip
    try:
        rows = []
        for own, answers in ((texts[0], first), (texts[1], first), (texts[0], made())):
            computed.clear()
            rows.append(only(answers({"document": [own], "questions": [questions(5)]})))
            rows[-1]["computed"] = sum(computed)
    finally:
        hook.remove()
    asked_tokens = NEW - 1 + len(questions(5)[0].split()) + 2
    assert [row["error"] for row in rows] == [None] * 3
    assert [row["context"] for row in rows] == ["continued", "continued", "opened"]
    assert [row["context_note"] for row in rows] == [None] * 3
    assert [row["computed"] - asked_tokens for row in rows] == [260, 90, 0]
    for row, own in zip(rows, (*texts, texts[0]), strict=True):
        assert row["answers"] == expected(long_model(), words(), own, questions(5))


@pytest.mark.parametrize(("exact", "memory", "context"), [(True, "1/2", "continued"), (False, 260_000, "prefilled")])
def test_a_stored_beginning_that_does_not_fit_is_computed(
    tmp_path: Path, exact: bool, memory: str | int, context: str
) -> None:
    """In a budget that a prefill of the complete document just fits. A sparse cache has room for less beside what was
    stored."""
    small: dict[str, Any] = {"exact": exact, "max_new_tokens": NEW}
    shared = {"contexts": ContextLibrary(tmp_path / "contexts"), **small}

    def make(**options: Any) -> AnswerDocuments:
        return AnswerDocuments(lambda: (long_model(), words()), **options)

    only(make(**shared)({"document": [" ".join(document(1).split()[:300])], "questions": [questions(5)]}))
    row, alone = (only(make(memory=memory, **options)(asked(1, 5))) for options in (shared, small))
    assert (row["error"], row["context"]) == (None, context) and row["answers"] == alone["answers"]
    assert (row["context_note"] is None) == exact and (exact or "does not fit: memory" in row["context_note"])
    assert not exact or row["answers"] == expected(long_model(), words(), document(1), questions(5))


def test_a_library_of_documents_has_limits_and_a_key(tmp_path: Path) -> None:
    """A copy of it, as each worker of a job has one, has them too."""
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    given = ContextLibrary(tmp_path / "contexts", 3_000_000, tmp_path / "key", max_bytes_a_day="1GB")
    library = pickle.loads(pickle.dumps(given))
    assert (library.max_bytes, library.max_bytes_a_day) == (3_000_000, 10**9)
    with pytest.raises(ConfigError, match="the library's key encrypts the cache's own files too"):
        worker(tmp_path, contexts=library, encryption_key=tmp_path / "key")
    answers = worker(tmp_path, contexts=library)
    assert only(answers(asked(1, 5)))["context"] == "prefilled"
    assert all(entry.encrypted for entry in library.entries()) and library.entries()
    row = only(worker(tmp_path, contexts=given)(asked(1, 5)))
    assert row["context"] == "opened" and row["answers"] == expected(long_model(), words(), document(1), questions(5))
    library.max_bytes = 1000
    assert "not shared: max_bytes is 1,000" in only(answers(asked(2, 5)))["context_note"]
    (entry,) = library.entries()
    for file in entry.path.glob("*.records"):
        file.write_bytes(bytes(file.stat().st_size))
    library.max_bytes = 3_000_000
    row = only(answers(asked(1, 5)))
    assert row["context"] == "prefilled" and "the shared context is not used" in row["context_note"]
    assert row["answers"] == expected(long_model(), words(), document(1), questions(5))
    assert only(answers(asked(1, 5)))["context"] == "opened", "it was stored again"


def test_a_budget_is_of_each_document(tmp_path: Path) -> None:
    """And a later question may be longer than the one that a context was made for."""
    contexts = place_of("saved", tmp_path)
    sizes = {"num_recent": 32, "group_size": None, "exact": False, "memory": "1/2"}
    rows = {"document": [document(1, 1500), document(2, 1900)], "questions": [questions(9), questions(9)]}
    found = worker(tmp_path, contexts=contexts, **sizes)(rows).to_pylist()
    assert {row["context"] for row in found} == {"prefilled"}
    longer = {**rows, "questions": [[text(long_model(), 200, 3)], questions(4)]}
    several = only(worker(tmp_path, **sizes)({"document": [document(1, 1500)], "questions": [questions(9, 8)]}))
    assert several["full_kv_bytes"] // 2 < several["peak_memory_bytes"] < several["full_kv_bytes"]
    for row in [*found, *worker(tmp_path, contexts=contexts, **sizes)(longer).to_pylist()]:
        assert row["peak_memory_bytes"] <= (row["full_kv_bytes"] + 2 * 3 * 2 * 2 * 16 * 4) // 2
    assert row["context"] == "opened"
    assert only(worker(tmp_path, contexts=contexts, **{**sizes, "memory": "2/3"})(
        {name: column[:1] for name, column in rows.items()}
    ))["context"] == "prefilled"  # fmt: skip


@pytest.mark.parametrize("kind", ["saved", "published"])
def test_a_document_that_is_too_short_for_its_share_has_the_floor(kind: str, tmp_path: Path) -> None:
    """As a short request has it in `offload`; who opens or streams what it left, too."""
    small: dict[str, Any] = {"exact": False, "memory": "1/90", "contexts": place_of(kind, tmp_path)}
    with pytest.warns(UserWarning, match="memory='1/90' of this request .* 64MiB per sequence"):
        first = only(worker(tmp_path, **small)(asked(1, 5)))
    again = only(worker(tmp_path, **small)(asked(1, 5)))
    assert first["error"] is None and first["answers"] == again["answers"] != [""]
    assert (first["context"], again["context"]) == ("prefilled", {"saved": "opened", "published": "streamed"}[kind])
    assert first["full_kv_bytes"] / 90 < first["peak_memory_bytes"] <= 64 * 2**20


def test_fields_that_fix_what_is_stored_have_contexts_of_their_own(tmp_path: Path) -> None:
    shared = {"contexts": place_of("saved", tmp_path), "exact": False, "num_selected": 40}
    for fields, origin in (
        ({}, "prefilled"), ({"num_selected": 20}, "opened"), ({"group_size": 8}, "prefilled"),
        ({"exact": True}, "prefilled"), ({"exact": True, "verify": False}, "opened"),
    ):  # fmt: skip
        assert only(worker(tmp_path, **{**shared, **fields})(asked(1, 5)))["context"] == origin, fields


# --- what is wrong with a row --------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_row_is_in_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [document(1), "", None, document(2, 8190), document(3), document(4), document(1)]
    given = pa.table({"document": texts, "questions": [*([questions(5)] * 4), [], [" "], questions(5)]})
    found = worker(tmp_path)(given).to_pylist()
    errors = [row["error"] and row["error"].partition(":")[0] for row in found]
    wrong = ["DocumentError", "DocumentError", "PromptTooLongError", "DocumentError", "DocumentError"]
    assert errors == [None, *wrong, None]
    assert found[0]["answers"] == found[-1]["answers"] != None  # noqa: E711
    assert all(row[name] is None for row in found[1:-1] for name in COLUMNS[:-1])
    assert "shorten the document by" in found[3]["error"]
    none = worker(tmp_path)(given.slice(1, 1))
    assert none.schema == worker(tmp_path)(given.slice(0, 1)).schema  # blocks of a data set have the same types
    for place, kind in ((1, DocumentError), (3, PromptTooLongError)):
        with pytest.raises(kind):
            worker(tmp_path, errors="raise")(given.slice(place, 1))
    for small in ({"memory": "1/90", "strict": True}, {"memory": "1/90", "floor": 9000}, {"memory": 9000}):
        assert only(worker(tmp_path, **small, exact=False)(asked(1, 5)))["error"].startswith("BudgetError: memory is")
        with pytest.raises(BudgetError):
            worker(tmp_path, **small, exact=False, errors="raise")(asked(1, 5))

    def fails(error: BaseException) -> Any:
        def prefill(*_: Any) -> None:
            raise error

        return prefill

    monkeypatch.setattr(document_answers, "prefill", fails(StoreFullError(28, "no room")))
    assert "no room" in only(worker(tmp_path)(asked(1, 5)))["error"]
    monkeypatch.setattr(document_answers, "prefill", fails(ZeroDivisionError("a fault of the program's")))
    with pytest.raises(ZeroDivisionError):  # which is none of the document's
        worker(tmp_path)(asked(1, 5))


class Decoding:
    """Reads of steps of decoding, which fail while `broken` says so of the store that is read."""

    def __init__(self, patch: pytest.MonkeyPatch, broken: Callable[[Any], object]) -> None:
        self.failed, decodes, read, answer = 0, [False], Prefetcher.read, document_answers.generate_answer

        def answering(*args: Any, **kwargs: Any) -> Any:
            decodes[0] = True
            try:
                return answer(*args, **kwargs)
            finally:
                decodes[0] = False

        def reading(prefetcher: Prefetcher, store: Any, *args: Any, **kwargs: Any) -> Any:
            if decodes[0] and broken(store):
                self.failed += 1
                raise StoreError(5, f"{store.name}: the disk is broken")
            return read(prefetcher, store, *args, **kwargs)

        patch.setattr(document_answers, "generate_answer", answering)
        patch.setattr(Prefetcher, "read", reading)


def test_a_disk_that_fails_in_a_step_loses_a_documents_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents before it and behind it are answered; `errors="raise"` ends the job."""
    rows = {"document": [document(1), document(2), document(3)], "questions": [questions(5)] * 3}
    whole = worker(tmp_path)(rows).to_pylist()
    answers, ending = worker(tmp_path), worker(tmp_path, errors="raise")
    place = iter((False, True, False, True))
    row, now = answers._row, [False]

    def next_row(*asked: Any) -> Any:
        now[0] = next(place)
        return row(*asked)

    answers._row = next_row  # type: ignore[method-assign]
    reads = Decoding(monkeypatch, lambda store: now[0])
    found = answers(rows).to_pylist()
    assert reads.failed and found[1]["error"].startswith("StoreError: ") and "disk is broken" in found[1]["error"]
    assert all(found[1][name] is None for name in COLUMNS[:-1])
    assert [row["answers"] for row in found[::2]] == [row["answers"] for row in whole[::2]]
    now[0] = True
    with pytest.raises(StoreError, match="disk is broken"):
        ending(asked(1, 5))


def test_a_shared_context_that_goes_away_in_a_step_costs_a_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was away before; what the cache writes itself is read. It is there again afterwards, untouched."""
    answers = worker(tmp_path, contexts=place_of("saved", tmp_path))
    first = only(answers(asked(1, 5, 6)))
    (context,) = (tmp_path / "contexts").iterdir()
    held = {path.name: path.stat().st_ino for path in context.iterdir()}

    def is_shared(store: Any) -> bool:
        return any(part.inode[1] in held.values() for part in getattr(store, "parts", ()))

    with monkeypatch.context() as patch:
        reads = Decoding(patch, is_shared)
        second = only(answers(asked(1, 5, 6)))
    assert reads.failed and (second["context"], second["answers"]) == ("prefilled", first["answers"])
    assert "disk is broken" in second["context_note"] and second["error"] is None
    assert {path.name: path.stat().st_ino for path in context.iterdir()} == held
    third = only(answers(asked(1, 5, 6)))
    assert (third["context"], third["answers"], third["context_note"]) == ("opened", first["answers"], None)


def test_what_is_wrong_with_the_job_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"cache": "dynamic"}, {"cache": "disc-swap"}, {"num_selekted": 3}, {"errors": "pass"}, {"level": "good"},
        {"max_new_tokens": 0}, {"contexts": "nothing://x"}, {"floor": "much"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            worker(tmp_path, **{"contexts": "memory://x", **options})
    with pytest.raises(ConfigError, match="path must be a folder that exists"):
        worker(tmp_path / "not there")
    with pytest.raises(ConfigError, match="path must be a folder that exists"):
        worker(tmp_path / "not there", memory="1/2", exact=False)
    (tmp_path / "contexts").touch()
    with pytest.raises(StoreError, match="folder cannot be made"):
        worker(tmp_path, contexts=str(tmp_path / "contexts"))
    for wrong in (long_model(), (long_model(), words()), 3):
        for asks in (AnswerDocuments, functools.partial(answer_documents, None)):
            with pytest.raises(ConfigError, match="model must be a Hub name, a folder, or a function"):
                asks(wrong)
    with pytest.raises(ConfigError, match="no column 'questions' among document, question: name it"):
        worker(tmp_path)({"document": ["w5"], "question": ["w5"]})
    with pytest.raises(ConfigError, match="a column 'error' already"):
        worker(tmp_path)({"document": ["w5"], "questions": ["w5"], "error": [1]})
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ImportError, match=r"hf-offload-cache\[ray\]"):
        answer_documents(None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"hf-offload-cache\[ray\]"):
        worker(tmp_path)


# --- what is not to be trusted -------------------------------------------------------------------------------------


def spoil(file: Path) -> None:
    """Another byte in the middle of it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.unlink()  # a cache that has it open keeps what it has
    file.write_bytes(data)


def of_another_text(context: Path, tmp_path: Path) -> None:
    shutil.rmtree(context)
    before = set(context.parent.iterdir())
    worker(tmp_path, contexts=str(context.parent))(asked(2, 5))
    (other,) = set(context.parent.iterdir()) - before
    other.rename(context)


SPOILT = {
    "a record": lambda context, tmp: spoil(max(context.glob("*.records"))),
    "every record": lambda context, tmp: [spoil(file) for file in context.glob("*.records")],
    "a state": lambda context, tmp: spoil(max(context.glob("*.state"))),
    "no record": lambda context, tmp: max(context.glob("*.records")).unlink(),
    "half a manifest": lambda context, tmp: (context / "manifest.json").write_bytes(
        (context / "manifest.json").read_bytes()[:900]
    ),
    "another text": of_another_text,
}


@pytest.mark.parametrize("what", list(SPOILT))
def test_a_saved_context_that_is_damaged_is_made_anew(what: str, tmp_path: Path) -> None:
    answers = worker(tmp_path, contexts=place_of("saved", tmp_path))
    first = only(answers(asked(1, 5, 6)))
    (context,) = (tmp_path / "contexts").iterdir()
    SPOILT[what](context, tmp_path)
    second, third = only(answers(asked(1, 5, 6))), only(answers(asked(1, 5, 6)))
    assert (second["context"], third["context"]) == ("prefilled", "opened")
    assert "is not used" in second["context_note"] and third["context_note"] is None
    assert first["answers"] == second["answers"] == third["answers"]


def published_files() -> tuple[Any, str]:
    """The file system, and the folder of the one context."""
    system = fsspec.filesystem("memory")
    (folder,) = system.ls("/contexts", detail=False)
    return system, folder


def test_half_of_a_context_is_none(tmp_path: Path) -> None:
    """A published one has its manifest last, and is published anew."""
    answers = worker(tmp_path, contexts=place_of("published", tmp_path))
    first = only(answers(asked(1, 5)))
    system, folder = published_files()
    system.rm(f"{folder}/{NAME}")
    for origin in ("prefilled", "streamed"):
        row = only(answers(asked(1, 5)))
        assert (row["context"], row["context_note"], row["answers"]) == (origin, None, first["answers"])
    answers = worker(tmp_path, contexts=place_of("saved", tmp_path))
    answers(asked(1, 5))
    (context,) = (tmp_path / "contexts").iterdir()
    (context / "manifest.json").unlink()
    held = sorted(context.iterdir())
    row = only(answers(asked(1, 5)))
    assert row["context"] == "prefilled" and row["answers"] == first["answers"]
    assert "is not a context" in row["context_note"] and "not shared" in row["context_note"]
    assert sorted(context.iterdir()) == held


def test_a_published_context_that_is_damaged_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = worker(tmp_path, contexts=place_of("published", tmp_path))
    first = only(answers(asked(1, 5)))
    system, folder = published_files()
    manifest = system.cat(f"{folder}/{NAME}")

    def again(origin: str, *told: str) -> None:
        row = only(answers(asked(1, 5)))
        assert (row["context"], row["answers"]) == (origin, first["answers"])
        assert all(one in (row["context_note"] or "") for one in told) and bool(told) == bool(row["context_note"])

    system.pipe(f"{folder}/{NAME}", manifest[: len(manifest) // 2])
    again("prefilled", "is not used")
    again("streamed")
    other = StreamManifest.parse(manifest, "")
    system.pipe(f"{folder}/{NAME}", other.model_copy(update={"prefixes": ("0" * 40,)}).dumped())
    again("prefilled", "another text")
    again("streamed")
    cells = [cell.name for row in other.cells for cell in row if cell is not None]
    for name in cells:
        system.pipe(f"{folder}/{name}", b"another size")
    again("streamed", "could not be fetched")
    again("streamed")
    whole = system.cat(f"{folder}/{cells[0]}")
    system.pipe(f"{folder}/{cells[0]}", whole[:-1] + bytes([whole[-1] ^ 1]))
    again("streamed", "could not be fetched")
    again("streamed")
    for name in cells:
        system.rm(f"{folder}/{name}")
    again("streamed", "could not be fetched")
    again("streamed")


# --- several at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "of"), [("saved", SavedContexts), ("published", PublishedContexts)])
def test_two_that_leave_the_same_are_both_right(
    kind: str, of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins and ends while the first one is about to leave its own."""
    contexts, keep, between = place_of(kind, tmp_path), of.keep, []

    def late(self: Any, ids: torch.Tensor, cache: Any, *, replace: bool) -> Any:
        if not between:
            between.append(None)
            between.append(only(worker(tmp_path, contexts=contexts)(asked(1, 5))))
        return keep(self, ids, cache, replace=replace)

    monkeypatch.setattr(of, "keep", late)
    row = only(worker(tmp_path, contexts=contexts)(asked(1, 5)))
    assert row["context"] == between[1]["context"] == "prefilled"
    assert row["answers"] == between[1]["answers"] and row["context_note"] is between[1]["context_note"] is None
    third = only(worker(tmp_path, contexts=contexts)(asked(1, 5)))
    assert third["context"] != "prefilled" and third["answers"] == row["answers"] and third["context_note"] is None


@pytest.mark.parametrize("kind", ["saved", "published"])
def test_encrypted_contexts_are_found_with_their_key(kind: str, tmp_path: Path) -> None:
    for place, name in enumerate(("key", "other key")):
        (tmp_path / name).write_bytes(bytes([place]) * 32)
        (tmp_path / name).chmod(0o600)

    def origin(**key: Any) -> str:
        row = only(worker(tmp_path, contexts=place_of(kind, tmp_path), **key)(asked(1, 5)))
        assert row["error"] is None and row["context_note"] is None
        return row["context"]

    mine, other = ({"encryption_key": str(tmp_path / name)} for name in ("key", "other key"))
    assert origin(**mine) == "prefilled" != origin(**mine)
    assert origin(**other) == origin() == "prefilled"
    assert origin(**mine) != "prefilled" != origin(**other)
