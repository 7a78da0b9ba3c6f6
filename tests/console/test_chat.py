"""`chat` on a tiny random model: answers and the tokens they are computed from, what is kept, commands, and Ctrl-C."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, LlamaModel
from word_model import NEW, POSITIONS, WORDS, answered, save_word_model

from hf_offload_cache import ContextLibrary, DiskSwapCache
from hf_offload_cache.console import (
    Chat,
    build_prompt,
    document_part,
    follow_up_part,
    html_text,
    named_cache,
    question_part,
    read_document_file,
)
from hf_offload_cache.console import chat as verb
from hf_offload_cache.errors import CorruptRecordError, StoreFullError
from hf_offload_cache.report import Progress

DOCUMENT_WORDS = 200
EXACT = ("--set", "exact=true", "--set", "block_tokens=32")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] | trim }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("tiny"), Whitespace())


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template, whose answers end with <end>."""
    folder = save_word_model(
        tmp_path_factory.mktemp("templated"), WhitespaceSplit(), "<user>", "<assistant>", "<end>"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model most of whose layers have windows: its caches cannot be cropped."""
    folder = save_word_model(tmp_path_factory.mktemp("windowed"), Whitespace())
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=5 + len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "document.txt"
    file.write_text(" ".join(WORDS[i * 7 % len(WORDS)] for i in range(DOCUMENT_WORDS)))
    return file


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward of a Llama."""
    seen: list[int] = []
    plain = LlamaModel.forward

    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(input_ids.shape[1])
        return plain(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    return seen


class Typed(io.StringIO):
    """stdin at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(
    tiny: Path, document: Path, console: Callable[..., tuple[int, str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:  # fmt: skip
    """Runs `chat` on the tiny model with the library `lib`: (exit code, stdout, stderr)."""

    def run(
        *arguments: object, model: Path = tiny, file: Path | list[Path] = document, lines: str = "",
        typed: bool = False, fields: tuple[str, ...] = EXACT,
        library: tuple[object, ...] = ("--library", tmp_path / "lib"),
    ) -> tuple[int, str, str]:  # fmt: skip
        monkeypatch.setattr(sys, "stdin", Typed(lines) if typed else io.StringIO(lines))
        files = [file] if isinstance(file, Path) else file
        fixed = ["chat", *files, "--model", model, "--device", "cpu", "--max-new-tokens", NEW, *fields, *library]
        return console(*fixed, *arguments)

    return run


@pytest.fixture
def chat(tiny: Path, document: Path) -> Iterator[Chat]:
    """A conversation without a library, begun."""
    with_model = AutoModelForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)
    one = made(*with_model, document)
    one.begin()
    yield one
    one.close()


def made(model: Any, tokenizer: Any, document: Path) -> Chat:
    ids = document_part(tokenizer, document.read_text())
    fields = {"exact": True, "block_tokens": 32}
    return Chat(model, tokenizer, ids, "disk-swap", None, POSITIONS, path=None, fields=fields, memory=None)


def plain_ids(model: Any, ids: torch.Tensor) -> list[int]:
    """The answer's tokens by transformers alone."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1}
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


def nothing(text: str) -> None:
    pass


# ------------------------------------------------------------------------------------------------------- answers


def test_the_first_answer_is_that_of_generate_and_of_transformers(run, console, tiny, document):
    code, out, err = run("--question", "w5")
    assert code == 0
    assert out.strip() == answered(tiny, build_prompt(AutoTokenizer.from_pretrained(tiny), document.read_text(), "w5"))
    arguments = ["generate", "--model", tiny, "--prompt-file", document, "--question", "w5", "--device", "cpu", *EXACT]
    assert out.strip() == console(*arguments, "--max-new-tokens", NEW)[1].strip()
    assert re.search(rf"^read {DOCUMENT_WORDS} tokens in [\d.]+ s; {POSITIONS - DOCUMENT_WORDS} are left", err, re.M)


def test_each_answer_continues_exactly_the_tokens_that_the_cache_has(chat):
    tokenizer = chat.tokenizer
    asked, length = chat.ids, chat.ids.shape[1]
    for number, question in enumerate(("w5", "w9 w11", "w2")):
        asked = torch.cat([chat.ids, question_part(tokenizer, question)], 1)
        answer = chat.ask(question, NEW, nothing)
        assert list(answer.new_ids) == plain_ids(chat.model, asked)
        assert chat.ids.tolist() == [asked[0].tolist() + list(answer.new_ids)]
        assert chat.cache.input_ids.tolist() == [chat.ids[0, :-1].tolist()]
        assert (chat.answers, chat.stopped) == (number + 1, "length")
    assert chat.left == POSITIONS - chat.ids.shape[1] and chat.ids.shape[1] == length + 3 * (4 + NEW) + 4


def test_an_answers_end_is_in_the_conversation_once(templated, document):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(templated).eval(), AutoTokenizer.from_pretrained(templated)
    ids = document_part(tokenizer, document.read_text())
    prompt = torch.cat([ids, question_part(tokenizer, "w5")], 1)
    assert tokenizer.decode(prompt[0]).split() == f"<user> {document.read_text()} w5 <end> <assistant>".split()
    answer = plain_ids(model, prompt)
    length = answer.index(answer[-1])
    model.generation_config.eos_token_id = [1, answer[-1]]  # the answer ends there, and not with the template's token
    chat = made(model, tokenizer, document)
    try:
        chat.begin()
        assert list(chat.ask("w5", NEW, nothing).new_ids) == answer[: length + 1] and chat.stopped == "end"
        assert chat.ids.tolist() == [prompt[0].tolist() + answer[:length]] == chat.cache.input_ids.tolist()
        follow = follow_up_part(tokenizer, "w9")
        assert tokenizer.decode(follow[0]).split() == ["<end>", "<user>", "w9", "<end>", "<assistant>"]
        asked = torch.cat([chat.ids, follow], 1)
        assert list(chat.ask("w9", NEW, nothing).new_ids) == plain_ids(model, asked)
    finally:
        chat.close()


def test_without_a_chat_template_an_answer_ends_with_its_line(chat, monkeypatch):
    answer = plain_ids(chat.model, torch.cat([chat.ids, question_part(chat.tokenizer, "w5")], 1))
    length = answer.index(answer[3])
    decode = chat.tokenizer.decode

    def decoded(ids: Any, **options: Any) -> str:  # the tokenizer has no word with a line's end
        return ".\n" if list(ids) == [answer[3]] else str(decode(ids, **options))

    monkeypatch.setattr(chat.tokenizer, "decode", decoded)
    assert list(chat.ask("w5", NEW, nothing).new_ids) == answer[: length + 1]
    assert chat.stopped == "end" and chat.ids[0, -1] == (answer[length - 1] if length else chat.ids[0, -1])


def test_what_has_no_room_is_one_line_and_the_conversation_goes_on(run):
    long = " ".join(["w3"] * (POSITIONS - DOCUMENT_WORDS - 4))
    code, out, err = run(lines=f"{long}\nw5\n/quit\nw9\n", typed=True)
    assert code == 0 and len(out.split()) >= 1 and len(out.strip().splitlines()) == 1
    asked = f"documents, conversation and this question have {POSITIONS:,} tokens, and there is room for {POSITIONS:,}"
    assert f"PromptTooLongError: {asked}" in err
    code, out, err = run(lines=f"{long}\nw5\n")  # in a pipe nobody can react
    assert (code, out.strip()) == (2, "") and "PromptTooLongError" in err
    shorter = " ".join(["w3"] * (POSITIONS - DOCUMENT_WORDS - 4 - 2))
    code, out, err = run("--question", shorter, "--json", "--max-new-tokens", 1)
    assert code == 0 and json.loads(out)["new_tokens"] == 1 and json.loads(out)["tokens_left"] == 1


def test_memory_limits_the_cache(run):
    code, out, err = run("--memory", "230KiB", "--question", "w5", "--json", fields=("--set", "block_tokens=32"))
    assert code == 0 and 0 < json.loads(out)["memory_bytes"] <= 230 * 1024
    said = r"^hf-offload-cache: a step selects \d+ tokens; .*: raise --memory, or lower --set max_context$"
    assert "UserWarning" not in err and re.search(said, err, re.M)
    code, out, err = run("--memory", "230KiB", "--question", "w5", "--json", fields=("--set", "block_tokens=32"))
    assert json.loads(out)["library_tokens"] == DOCUMENT_WORDS and json.loads(out)["memory_bytes"] <= 230 * 1024
    code, out, err = run("--memory", "1/500", "--question", "w5", fields=())
    assert (code, out) == (2, "") and "--memory is" in err.strip().splitlines()[-1]


def test_what_a_memory_is_planned_for(run, monkeypatch):
    """The documents and some tokens more, or --set max_context; no more than the positions."""
    monkeypatch.setattr(verb, "_PLANNED", 100)
    most = DOCUMENT_WORDS + 200
    for given, room in ((None, DOCUMENT_WORDS + 100), (most, most), (10 * POSITIONS, POSITIONS)):
        fields = () if given is None else ("--set", f"max_context={given}")
        code, out, err = run("--memory", "2MiB", "--question", "w5", fields=fields)
        assert code == 0 and out and f"; {room - DOCUMENT_WORDS} are left for questions" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cache", "dynamic"], "cache 'dynamic' keeps all in memory"),
        (["--set", "num_selectd=3"], "did you mean 'num_selected'?"),
        (["--no-library", "--library-bytes", "1GB"], "leave out --no-library"),
        (["--library-bytes", "lots"], "--library-bytes must be"),
        (["--set", "encryption_key=a"], "own files too: give --key FILE, and no other key, or --no-library"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(run, tmp_path, arguments, words):
    library = () if "--no-library" in arguments else ("--library", tmp_path / "lib")
    code, out, err = run("--question", "w5", *arguments, fields=(), library=library)
    assert (code, out) == (2, "")
    assert words in err.strip().splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("model", ["tiny", "default"])
def test_a_text_that_is_too_long_is_known_before_weights_are_loaded(run, tiny, tmp_path, monkeypatch, model):
    def loads(*arguments: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(named_cache, "load_for", loads)
    file = tmp_path / "long.txt"
    file.write_text("w1 " * (POSITIONS - 10))
    if model == "default":
        monkeypatch.setattr(named_cache, "load_tokenizer", lambda name: AutoTokenizer.from_pretrained(tiny))
        monkeypatch.setattr(named_cache, "load_positions", lambda name: POSITIONS)
    code, out, err = run("--question", "w5", file=file)
    assert (code, out) == (2, "")
    assert (
        f"the documents and a question have {POSITIONS - 5} tokens and an answer may have {NEW}, together "
        f"{POSITIONS + 1}, but the model has {POSITIONS} positions: name a model for longer texts with --model "
        "(`hf-offload-cache models` lists some), or shorten the documents by 1 tokens, or give --max-new-tokens 5\n"
    ) in err
    _, _, err = run("--question", "w5", "--set", "max_context=60", "--max-new-tokens", "2", file=file)
    assert f"--set max_context=60 is less than the {POSITIONS - 3} tokens of the documents, a question and" in err
    file.write_text("w1 " * POSITIONS)
    assert run("--question", "w5", file=file)[2].endswith(f" or shorten the documents by {NEW + 5} tokens\n")
    assert not (tmp_path / "lib").exists() or list((tmp_path / "lib").iterdir()) == []


def test_positions_of_models(tiny):
    assert named_cache.load_positions(str(tiny)) == POSITIONS
    assert named_cache.load_positions() == 8192
    with pytest.raises(named_cache.ModelLoadError, match="cannot read the configuration of the folder"):
        named_cache.load_positions(str(tiny.parent))


# --------------------------------------------------------------------------------------------------- the library


def test_the_next_start_computes_only_the_question(run, forwards, tmp_path):
    code, out, err = run("--question", "w5", "--question", "w9", "--json")
    first, second = map(json.loads, out.splitlines())
    assert sum(forwards) == DOCUMENT_WORDS + 5 + NEW - 1 + 1 + 5 + NEW - 1
    assert (first["computed_tokens"], second["computed_tokens"]) == (5, 6)  # and the first answer's last token
    assert (first["document_tokens"], first["library_tokens"]) == (DOCUMENT_WORDS, 0)
    assert len(ContextLibrary(tmp_path / "lib").entries()) == 1
    forwards.clear()
    code, out, err = run("--question", "w5", "--json")
    again = json.loads(out)
    assert sum(forwards) == 5 + NEW - 1 and again["library_tokens"] == DOCUMENT_WORDS
    assert again["text"] == first["text"] and f"{DOCUMENT_WORDS} of them from the library" in err
    assert len(ContextLibrary(tmp_path / "lib").entries()) == 1


def test_a_longer_text_computes_what_is_new_and_replaces_the_shorter_one(run, document, forwards, tmp_path):
    run("--question", "w5")
    document.write_text(f"{document.read_text()} {' '.join(WORDS[:30])}")
    forwards.clear()
    code, out, err = run("--question", "w5", "--json")
    assert json.loads(out)["library_tokens"] == DOCUMENT_WORDS and sum(forwards) == 30 + 5 + NEW - 1
    assert [entry.manifest.tokens for entry in ContextLibrary(tmp_path / "lib").entries()] == [DOCUMENT_WORDS + 30]


def test_a_model_with_windows(run, windowed, document):
    """Its contexts match completely or not at all, so that `/new` opens the library's again."""
    code, out, err = run("--json", model=windowed, lines="w5\n/new\nw5\n")
    first, second = map(json.loads, out.splitlines())
    assert first["text"] == answered(
        windowed, build_prompt(AutoTokenizer.from_pretrained(windowed), document.read_text(), "w5")
    )
    assert (first["library_tokens"], second["library_tokens"]) == (0, DOCUMENT_WORDS)
    assert second["text"] == first["text"] and second["computed_tokens"] == 5
    assert json.loads(run("--json", model=windowed, lines="w5\n")[1])["library_tokens"] == DOCUMENT_WORDS


def test_where_the_library_is(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    usual = tmp_path / "home" / "hf_offload_cache" / "library"
    (key := tmp_path / "own-key").write_bytes(bytes(range(32)))
    own = ("--no-library", "--set", f"encryption_key={key}")
    assert run("--question", "w5", *own, library=())[0] == 0 and not usual.exists()
    assert run("--question", "w5", library=())[0] == 0
    assert len(ContextLibrary(usual).entries()) == 1 and usual.stat().st_mode & 0o777 == 0o700
    code, out, err = run("--question", "w5", "--json", library=())
    assert json.loads(out)["library_tokens"] == DOCUMENT_WORDS

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", homeless)
    code, out, err = run("--question", "w5", library=())
    assert code == 0 and out.strip() and "nothing is kept in a library: user" in err


def test_a_library_with_a_key(run, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    assert run("--question", "w5", "--key", key)[0] == 0
    assert json.loads(run("--question", "w5", "--key", key, "--json")[1])["library_tokens"] == DOCUMENT_WORDS
    assert json.loads(run("--question", "w5", "--json")[1])["library_tokens"] == 0
    (entry, other) = ContextLibrary(tmp_path / "lib").entries()
    assert {entry.manifest.key_check is None, other.manifest.key_check is None} == {True, False}


def test_a_document_that_cannot_be_kept_is_answered(run):
    code, out, err = run("--question", "w5", "--library-bytes", "1KiB")
    assert code == 0 and out.strip()
    assert "not kept in the library: max_bytes is 1,024" in err


def test_a_conversation_whose_context_is_damaged_is_read_again(chat, monkeypatch, capsys):
    chat.ask("w5", NEW, nothing)
    expected = plain_ids(chat.model, torch.cat([chat.ids, question_part(chat.tokenizer, "w9")], 1))
    before, cache, whole = chat.ids, chat.cache, DiskSwapCache.update

    def damaged(self: Any, *arguments: Any, **options: Any) -> Any:
        if self is cache:
            raise CorruptRecordError("record 7 of layer 0 is damaged")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(DiskSwapCache, "update", damaged)
    assert list(chat.ask("w9", NEW, nothing).new_ids) == expected
    assert chat.cache is not cache and cache.closed
    assert chat.ids[0, : before.shape[1]].tolist() == before[0].tolist()
    assert "read again, because its context could not be read: record 7" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "kind"), [("full disk", "tiny"), ("Ctrl-C", "windowed")])
def test_a_question_that_fails_within_a_forward_leaves_the_conversation_as_it_was(
    what, kind, request, document, monkeypatch, capsys
):
    folder = request.getfixturevalue(kind)
    error = KeyboardInterrupt() if what == "Ctrl-C" else StoreFullError(28, "no room")
    chat = made(AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), document)
    chat.begin()
    chat.ask("w5", NEW, nothing)
    before, plain, calls = chat.ids, DiskSwapCache.update, []

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return plain(self, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, StoreFullError)):
        patch.setattr(DiskSwapCache, "update", fail)
        chat.ask("w7 w8 w3", NEW, nothing)
    assert chat.ids is before
    expected = plain_ids(chat.model, torch.cat([before, question_part(chat.tokenizer, "w9")], 1))
    assert list(chat.ask("w9", NEW, nothing).new_ids) == expected
    assert ("read again, because the last question" in capsys.readouterr().err) is (kind == "windowed")
    chat.close()


# -------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(chat):
    before = signal.getsignal(signal.SIGINT)
    pieces: list[str] = []

    def stop(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    answer = chat.ask("w5", 40, stop)
    assert (chat.stopped, answer.new_tokens) == ("interrupted", 4)  # the streamer holds a word and its blank back
    assert "".join(pieces).split() == answer.text.split()
    assert signal.getsignal(signal.SIGINT) is before
    assert chat.cache.input_ids.tolist() == [chat.ids[0, :-1].tolist()]
    asked = torch.cat([chat.ids, question_part(chat.tokenizer, "w9")], 1)
    assert list(chat.ask("w9", NEW, nothing).new_ids) == plain_ids(chat.model, asked)


def test_a_second_ctrl_c_drops_the_question(chat):
    length, asked = chat.cache.tokens, torch.cat([chat.ids, question_part(chat.tokenizer, "w9")], 1)

    def twice(text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        chat.ask("w5", NEW, twice)
    assert (chat.cache.tokens, chat.answers) == (length, 0)
    assert list(chat.ask("w9", NEW, nothing).new_ids) == plain_ids(chat.model, asked)


def test_ctrl_c_while_reading_keeps_what_was_read(run, forwards, monkeypatch):
    plain = Progress.update

    def update(self: Progress, done: float, *others: Any) -> None:
        plain(self, done, *others)
        if done == 64:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "update", update)
        code, out, err = run("--question", "w5", "--prefill-chunk", "32")
    assert (code, out) == (130, "") and sum(forwards) == 64
    assert "the next start continues after 64 tokens" in err and "Traceback" not in err
    forwards.clear()
    code, out, err = run("--question", "w5", "--json")
    assert code == 0 and json.loads(out)["library_tokens"] == 64
    assert sum(forwards) == DOCUMENT_WORDS - 64 + 5 + NEW - 1


def test_ctrl_c_at_the_prompt_drops_the_line(run, monkeypatch):
    lines = iter([KeyboardInterrupt, "w5", EOFError])

    def read(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    code, out, err = run(typed=True)
    assert code == 0 and len(out.strip().splitlines()) == 1
    assert "/quit or Ctrl-D ends the conversation" in err


# ------------------------------------------------------------------------------------------------------ commands


def test_commands(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    saved, nowhere = tmp_path / "saved", tmp_path / "no" / "where"
    lines = ["/help", "w5", "", "/context", "/report", f"/save {saved}", f"/save {saved}", f"/save {nowhere}", "/save"]
    lines += ["/nonsense", "/new", "w5", "/quit", "w9"]
    code, out, err = run(lines="\n".join(lines), typed=True)
    assert code == 0
    first, second = out.splitlines()
    assert first == second  # after /new
    held = DOCUMENT_WORDS + 5 + NEW
    assert f"saved {held - 1} tokens in {saved}" in err
    assert f"OutputFileError: /save {str(saved)!r} cannot be made: it exists already" in err
    assert f"/save {str(nowhere)!r} cannot be made: there is no folder {str(nowhere.parent)!r}" in err
    assert "/save needs a folder: /save DIR" in err
    assert "there is no command '/nonsense'" in err and "Ctrl-C stops an answer" in err
    assert "DiskSwapCache: " in err and "memory now" in err  # the report
    table = err[err.index("┌") : err.index("┘") + 1].splitlines()  # before the report
    assert len(table) > 9 and max(map(len, table)) <= 44
    joined = "\n".join(table)
    assert f"{DOCUMENT_WORDS} tokens" in joined and f"{5 + NEW} tokens, 1 answers" in joined
    assert f"{POSITIONS - held} of {POSITIONS} tokens" in joined
    with DiskSwapCache.open(saved, AutoModelForCausalLM.from_pretrained(tiny).eval()) as cache:
        assert cache.tokens == held - 1


def test_a_command_that_fails_ends_a_script(run):
    code, out, err = run(lines="/nonsense\nw5\n")
    assert (code, out) == (2, "") and "there is no command '/nonsense'" in err


def test_questions_from_a_pipe_and_from_options(run):
    code, out, err = run(lines="w5\n\nw9\n /w\n")
    assert code == 0 and len(out.strip().splitlines()) == 3
    assert "> " not in err and "/help" not in err
    code, given, err = run("--question", "w5", "--question", "w9", lines="w2\n")
    assert given.splitlines() == out.splitlines()[:2]


def test_a_line_of_json_an_answer(run):
    code, out, err = run("--json", lines="w5\nw9\n")
    first, second = map(json.loads, out.splitlines())
    assert (first["question"], second["question"]) == ("w5", "w9")
    assert first["stopped"] == second["stopped"] == "length" and first["new_tokens"] == NEW
    assert first["prompt_tokens"] == DOCUMENT_WORDS + 5
    assert second["prompt_tokens"] == DOCUMENT_WORDS + 5 + NEW + 5
    assert second["tokens_left"] == POSITIONS - second["prompt_tokens"] - NEW
    assert first["first_token_seconds"] > 0 and "report" not in first and "new_ids" not in first
    assert first["disk_bytes"] > 0 < first["memory_bytes"]


def test_escapes_of_an_answer_do_not_reach_a_terminal(capsys):
    for terminal, shown in ((True, "a\\x1b[2J b\nc"), (False, "a\x1b[2J b\nc")):
        show = verb._Shown(terminal)
        for piece in (" \n", " a\x1b[2J", " b\n", "c \n", "\n"):
            show(piece)
        assert capsys.readouterr().out == shown


def test_the_first_answer_of_a_process_with_a_terminal(tiny, document, tmp_path):
    """The prompt and the answer go to the terminal; progress is a bar of the terminal's width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 50, 0, 0))
    command = [sys.executable, "-m", "hf_offload_cache.console.main", "chat", document, "--model", tiny]
    environment = {**{name: value for name, value in os.environ.items() if name != "COLUMNS"}, "TERM": "dumb"}
    options = ["--max-new-tokens", str(NEW), "--library", tmp_path / "lib", "--prefill-chunk", "32", *EXACT]
    os.write(leader, b"w5\n/quit\n")
    with subprocess.Popen(
        [*map(str, [*command, *options])], stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        said = b""
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:
                break
            if not piece:
                break
            said += piece
    os.close(leader)
    text = said.decode()
    expected = answered(tiny, build_prompt(AutoTokenizer.from_pretrained(tiny), document.read_text(), "w5"))
    assert process.returncode == 0, text
    assert expected in text and "> " in text
    bars = [piece for piece in re.split(r"[\r\n]", text) if piece.startswith("read:") and "%" in piece]
    assert bars and max(map(len, bars)) <= 50 and any("<" in bar for bar in bars)  # with the time left


# ----------------------------------------------------------------------------------------------------- documents


def test_text_of_html():
    page = """<!doctype html><html><head><title>A page</title><style>p { color: red }</style>
    <script>if (1 < 2) alert("no")</script></head><body><h1>Head &amp; tail</h1><p>One <b>bold</b>
      word.<p>Two<br>lines<ul><li>first</li><li><p>second</p></li></ul><table><tr><th>a</th><td>1</td></tr><tr><th>b</th>
    <td>2</td></tr></table><pre>  kept
      as is</pre><svg><text>drawn</text></svg></body></html>"""
    assert html_text(page) == (
        "A page\n\nHead & tail\n\nOne bold word.\n\nTwo\nlines\n\n- first\n- second\n\na\t1\nb\t2\n\n"
        "  kept\n      as is"
    )


def test_html_is_read_as_its_text(run, tiny, document, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f"<html><script>w1</script><p>{document.read_text()}</p></html>")
    assert run("--question", "w5", file=page)[1] == run("--question", "w5")[1]
    assert read_document_file(page) == document.read_text()


def test_several_documents_have_their_names(run, document, tmp_path):
    other = tmp_path / "w2.md"
    other.write_text("w3 w4\n")
    joined = f"document.txt:\n\n{document.read_text()}\n\nw2.md:\n\nw3 w4"
    both = [(document, read_document_file(document)), (other, read_document_file(other))]
    assert verb.join_documents(both) == joined
    code, out, err = run("--question", "w5", "--json", file=[document, other])
    assert code == 0 and json.loads(out)["document_tokens"] == len(re.findall(r"\w+|[^\w\s]+", joined))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", None, "cannot be read: No such file or directory"),
        ("bad.txt", b"w1 \xff w2", "is not UTF-8 text: byte 3 is 0xff"),
        ("empty.md", b" \n", "has no text (2 characters)"),
        ("empty.html", b"<p> </p>", "has no text (0 characters)"),
    ],
)
def test_a_bad_document(run, tmp_path, name, content, words):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    code, out, err = run("--question", "w5", file=file)
    assert (code, out) == (2, "") and f"PromptFileError: file '{file}' {words}" in err


@pytest.mark.parametrize(("ending", "module", "package"), [("pdf", "pypdf", "pypdf"), ("docx", "docx", "python-docx")])
def test_without_the_extra_the_error_names_it(run, tmp_path, monkeypatch, ending, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / f"report.{ending}"
    file.write_bytes(b"%PDF-1.4")
    code, out, err = run("--question", "w5", file=file)
    assert (code, out) == (2, "")
    assert f"needs the package {package}, which is not installed: pip install 'hf-offload-cache[documents]'" in err


def pdf(*pages: str) -> bytes:
    """A PDF file with these lines, one a page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b""
        kids.append(len(objects) + 1)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects) + 2} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    references = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{references}] /Count {len(kids)} >>".encode()
    written, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size, start = len(objects) + 1, len(written)
    end = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, start)
    return written + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (size, table, end)


def test_pdf_and_docx(run, document, tmp_path):
    """With the extra `documents`, which `dev` has too."""
    import docx

    words = document.read_text().split()
    file = tmp_path / "report.pdf"
    file.write_bytes(pdf(" ".join(words[:100]), " ".join(words[100:])))
    assert read_document_file(file).split() == words
    assert run("--question", "w5", file=file)[1] == run("--question", "w5")[1]
    written = docx.Document()
    written.add_paragraph(" ".join(words[:100]))
    written.add_table(1, 2).rows[0].cells[1].text = "w7"
    written.add_paragraph("")
    written.add_paragraph(" ".join(words[100:]))
    written.save(tmp_path / "report.docx")
    parts = [" ".join(words[:100]), "\tw7", " ".join(words[100:])]
    assert read_document_file(tmp_path / "report.docx") == "\n\n".join(parts)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("scan.pdf", pdf(""), "has no text (0 characters): if its pages are pictures, it needs OCR first"),
        ("no.pdf", b"nothing", "cannot be read as PDF: "),
        ("no.docx", b"nothing", "cannot be read as DOCX: "),
        ("none.pdf", None, "cannot be read: No such file or directory"),
    ],
)
def test_a_bad_pdf_or_docx(run, tmp_path, name, content, words):
    test_a_bad_document(run, tmp_path, name, content, words)
