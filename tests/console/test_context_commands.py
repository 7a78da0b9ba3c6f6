"""The console's verbs for contexts: what goes to stdout and stderr, exit codes, text that cannot act on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import PROMPT, SMALL, prompt
from harness import tiny as tiny_model
from tokenizers.pre_tokenizers import WhitespaceSplit
from word_model import WORDS, answered, save_word_model

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import answer, build_prompt, document_part, printable, question_part
from hf_offload_cache.console import named_cache as load_model
from hf_offload_cache.contexts import Manifest, listing, remove, total_bytes
from hf_offload_cache.errors import ConfigError

EVIL = "\x1b[31mred\x1b[0m"
TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] | trim }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(console: Run) -> Run:
    return console


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its words would turn a terminal red."""
    return save_word_model(tmp_path_factory.mktemp("tiny"), WhitespaceSplit(), EVIL)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "document.txt"
    file.write_text(" ".join(WORDS[i * 7 % len(WORDS)] for i in range(150)) + "\n")
    return file


@pytest.fixture
def ask(run: Run, folder: Path) -> Run:
    def ask(*arguments: object, question: str = "w5") -> tuple[int, str, str]:
        fixed = ["--model", folder, "--device", "cpu", "--max-new-tokens", "6", "--question", question]
        return run("generate", *fixed, *arguments)

    return ask


def save(path: Path, ids: torch.Tensor, **fields: Any) -> None:
    model = tiny_model("llama")
    with DiskSwapCache(model, engine="mapped", **SMALL, **fields) as cache:
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.save(path)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A folder with the contexts a, b and c, used in this order."""
    contexts = tmp_path / "contexts"
    contexts.mkdir()
    for seed, name in enumerate("abc"):
        save(contexts / name, prompt(tiny_model("llama"), 1, 24 + seed, seed=seed))
        listing.touch(contexts / name, 10**18 + seed)
    return contexts


def one_line(err: str, *words: str) -> bool:
    last = err.strip().splitlines()[-1]
    return "Traceback" not in err and all(word in last for word in words)


# ---------------------------------------------------------------------------------------------- generate


def expected(folder: Path, document: Path, question: str = "w5") -> str:
    """The answer by transformers alone, to the prompt in two parts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = document_part(tokenizer, document.read_text()), question_part(tokenizer, question)
    return answered(folder, torch.cat(parts, 1))


@pytest.mark.parametrize("chunk", ["64", "4096"])
def test_save_the_document_and_ask_again(ask: Run, folder: Path, document: Path, tmp_path: Path, chunk: str) -> None:
    saved, file, exact = tmp_path / "saved", tmp_path / "answers.json", ("--set", "exact=true")
    code, out, err = ask("--prompt-file", document, "--save", saved, "--prefill-chunk", chunk, *exact)
    assert (code, out.strip()) == (0, expected(folder, document))
    assert f"saved 150 tokens in {saved}" in err
    before = sorted((path.name, path.stat().st_size) for path in saved.iterdir())
    listing.touch(saved, 10**18)
    for question in ("w5", "w7 w8 w9"):
        code, out, err = ask("--context", saved, "--json", file, question=question)
        assert (code, out.strip()) == (0, expected(folder, document, question))
        (answer,) = json.loads(file.read_text())
        assert answer["prompt_tokens"] == 150 + 3 + len(question.split()) - 1
        assert answer["report"]["bytes_written"] < 10 * 4096 * 2, "the document was not prefilled anew"
    assert sorted((path.name, path.stat().st_size) for path in saved.iterdir()) == before
    entry = listing.look(saved)
    assert entry is not None and entry.last_used_ns > 10**18, "asking counts as use"


def test_the_same_prompt_with_save_as_from_the_context(ask: Run, document: Path, tmp_path: Path) -> None:
    """Sparse as well: what was saved is what the first run went on from."""
    sparse = ("--set", "num_selected=32", "--set", "reuse_capacity=0", "--set", "num_recent=8")
    code, first, _ = ask("--prompt-file", document, "--save", tmp_path / "saved", *sparse)
    assert code == 0
    code, again, _ = ask("--context", tmp_path / "saved")
    assert (code, again) == (0, first)


def test_overwrite(ask: Run, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    assert ask("--prompt-file", document, "--save", saved)[0] == 0
    document.write_text("w1 w2 w3 " * 20)
    assert ask("--prompt-file", document, "--save", saved, "--overwrite")[0] == 0
    manifest = json.loads((saved / "manifest.json").read_text())["manifest"]
    assert manifest["tokens"] == 60
    monkeypatch.setattr(load_model, "load", lambda *arguments: pytest.fail("a model was loaded"))
    code, out, err = ask("--prompt-file", document, "--save", saved)
    assert (code, out) == (2, "") and one_line(err, "--save", "exists already", "--overwrite")
    code, _, err = ask("--prompt-file", document, "--save", tmp_path / "no" / "where")
    assert code == 2 and one_line(err, "--save", "there is no folder")
    code, _, err = ask("--context", tmp_path)
    assert code == 2 and one_line(err, "ContextError", str(tmp_path), "not a context")


def test_a_context_that_turns_up_meanwhile_is_not_replaced(
    ask: Run, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    prefill = answer.prefill

    def meanwhile(*arguments: Any) -> None:
        if not saved.exists():
            save(saved, prompt(tiny_model("llama")))
        prefill(*arguments)

    monkeypatch.setattr(answer, "prefill", meanwhile)
    code, out, err = ask("--prompt-file", document, "--save", saved)
    assert (code, out) == (2, "") and one_line(err, "--save", "saved")
    assert json.loads((saved / "manifest.json").read_text())["manifest"]["tokens"] == PROMPT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--prompt-file", "--context"]),
        (["--prompt-file", "x", "--context", "y"], ["not allowed with"]),
        (["--context", "y", "--save", "z"], ["--save saves the document of --prompt-file"]),
        (["--prompt-file", "x", "--overwrite"], ["--overwrite needs --save"]),
        (["--prompt-file", "x", "--cache", "dynamic", "--save", "z"], ["--save needs a cache of this library"]),
        (["--context", "x", "--cache", "dynamic"], ["--context needs a cache of this library"]),
    ],
)
def test_options_that_contradict(ask: Run, arguments: list[str], words: list[str]) -> None:
    code, out, err = ask(*arguments)
    assert (code, out) == (2, "") and one_line(err, *words)


def test_an_encrypted_context(ask: Run, run: Run, folder: Path, document: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, other, saved = tmp_path / "key", tmp_path / "other", tmp_path / "saved"
    key.write_text("ab" * 32 + "\n")
    other.write_bytes(bytes(32))
    exact = ("--set", "exact=true")
    code, out, _ = ask("--prompt-file", document, "--save", saved, "--key", key, *exact)
    assert (code, out.strip()) == (0, expected(folder, document))
    assert ask("--context", saved, "--key", key)[:2] == (0, out)
    for wrong in ([], ["--key", other]):
        code, out, err = ask("--context", saved, *wrong)
        assert (code, out) == (2, "") and one_line(err, "EncryptionKeyError") and "ab" * 8 not in err
        assert run("verify", saved, *wrong)[0] == 2
        assert run("inspect", saved, "--text", "--model", folder, *wrong)[0] == 2
    assert run("verify", saved, "--key", key)[0] == 0
    code, out, _ = run("inspect", saved)
    assert code == 0 and "yes" in out
    code, out, _ = run("inspect", saved, "--text", "--model", folder, "--key", key, "--json")
    assert json.loads(out)["text"] == [document.read_text().strip()]


@pytest.mark.parametrize(("ending", "compare"), [("records", True), ("layer", False)])
def test_a_damaged_context_is_prefilled_anew(
    ask: Run, document: Path, tmp_path: Path, ending: str, compare: bool
) -> None:
    """Its text is there: the answer comes all the same, and what was wrong is said."""
    saved, more = tmp_path / "saved", ["--compare"] if compare else []
    assert ask("--prompt-file", document, "--save", saved)[0] == 0
    code, expected, _ = ask("--context", saved, *more)
    assert code == 0
    states = {layer.state.file for layer in Manifest.parse((saved / "manifest.json").read_bytes(), "here").layers}
    for file in saved.glob("*.records") if ending == "records" else map(saved.joinpath, states):
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    code, out, err = ask("--context", saved, *more)
    assert code == 0 and "is damaged: its text is prefilled" in " ".join(err.split())
    assert out.split() == expected.split()


def test_publish_wants_the_kind_of_context_that_the_key_is_for(
    ask: Run, run: Run, folder: Path, document: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    saved, key = tmp_path / "saved", tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    assert ask("--prompt-file", document, "--save", saved)[0] == 0
    publish = ["publish", saved, tmp_path / "pub", "--model", folder, "--device", "cpu", "--key", key]
    code, out, err = run(*publish)
    assert (code, out) == (2, "") and one_line(err, "EncryptionKeyError", "--plain-context")
    assert run(*publish, "--plain-context")[0] == 0
    assert b"prefixes" not in (tmp_path / "pub" / "stream.json").read_bytes()


def test_another_model_is_refused(ask: Run, tmp_path: Path) -> None:
    save(tmp_path / "saved", prompt(tiny_model("llama")))
    code, out, err = ask("--context", tmp_path / "saved")
    assert (code, out) == (2, "") and one_line(err, "ContextMismatchError", "config.")


def test_an_error_with_words_from_the_disk_cannot_act_on_a_terminal(ask: Run, tmp_path: Path) -> None:
    save(tmp_path / "saved", prompt(tiny_model("llama")))
    file = tmp_path / "saved" / "manifest.json"
    manifest = Manifest.parse(file.read_bytes(), "here").model_copy(update={"cache": EVIL})
    file.write_bytes(manifest.to_bytes())
    code, out, err = ask("--context", tmp_path / "saved")
    assert (code, out) == (2, "") and one_line(err, "cache: Value error, it must be printable") and "\x1b" not in err


def test_the_clock_runs_while_a_context_is_opened_and_stands_while_one_is_saved(
    ask: Run, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only opening and saving move."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in ("open", "save"):
        call = getattr(DiskSwapCache, name)

        def slow(*arguments: Any, call: Any = call, **keywords: Any) -> Any:
            now[0] += 100
            return call(*arguments, **keywords)

        monkeypatch.setattr(DiskSwapCache, name, slow)
    file = tmp_path / "answer.json"
    for options, seconds in ((("--prompt-file", document, "--save"), 0), (("--context",), 100)):
        assert ask(*options, tmp_path / "saved", "--json", file)[0] == 0
        (answer,) = json.loads(file.read_text())
        assert answer["first_token_seconds"] == seconds


def test_a_context_of_several_sequences_is_refused(ask: Run, tmp_path: Path) -> None:
    save(tmp_path / "saved", prompt(tiny_model("llama"), 2))
    code, out, err = ask("--context", tmp_path / "saved")
    assert (code, out) == (2, "") and one_line(err, "--context", "open it in Python")


def test_what_is_no_context(run: Run, tmp_path: Path) -> None:
    assert run("ls", tmp_path) == (0, "0 contexts, 0 B\n", "")
    assert json.loads(run("ls", tmp_path, "--json")[1])["contexts"] == []
    for verb, place in (("ls", tmp_path / "nowhere"), ("verify", tmp_path)):
        code, out, err = run(verb, place)
        assert (code, out) == (2, "") and one_line(err, "ContextError", str(place))


# ---------------------------------------------------------------------------------------------- the prompt in two parts


def _tokenizer(folder: Path, template: str | None) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_both_parts_are_the_whole_where_words_do_not_merge(folder: Path, template: str | None) -> None:
    tokenizer = _tokenizer(folder, template)
    parts = [document_part(tokenizer, "  w1 w2 w3 \n"), question_part(tokenizer, " w4 w5 ")]
    assert torch.equal(torch.cat(parts, 1), build_prompt(tokenizer, "w1 w2 w3", "w4 w5"))
    assert torch.equal(parts[0], document_part(tokenizer, "w1 w2 w3")), "no question has a part in it"


def test_what_would_end_the_text_is_left_out_of_the_document(folder: Path) -> None:
    """A tokenizer that puts a token before and one behind every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = _tokenizer(folder, None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="w95 $A <eos>", special_tokens=[("w95", tokenizer.convert_tokens_to_ids("w95")), ("<eos>", 1)]
    )
    words = tokenizer.convert_ids_to_tokens(document_part(tokenizer, "w1 w2")[0])
    assert words == ["w95", "w1", "w2"]
    assert "w95" not in tokenizer.convert_ids_to_tokens(question_part(tokenizer, "w4")[0])


def test_a_template_that_changes_the_document(folder: Path) -> None:
    tokenizer = _tokenizer(folder, "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}")
    with pytest.raises(ConfigError, match="chat template"):
        document_part(tokenizer, "w1")


# ---------------------------------------------------------------------------------------------- inspect


def test_inspect(run: Run, three: Path) -> None:
    code, out, err = run("inspect", three / "a")
    assert (code, err) == (0, "")
    for words in ("DiskSwapCache", "llama, float32", "1 x 24 tokens", "3 offloaded", "group_size=4", "ago", "no"):
        assert words in out
    code, out, err = run("inspect", three / "a", "--json")
    values = json.loads(out)
    entry = listing.look(three / "a")
    assert entry is not None and entry.manifest is not None
    assert (code, err) == (0, "")
    assert values["tokens"] == 24 and values["sequences"] == 1 and values["layers"] == {"offloaded": 3}
    assert values["disk_bytes"] == entry.bytes == values["freed_bytes"] and values["shared_bytes"] == 0
    assert values["record_bytes"] == entry.manifest.record_bytes and values["damage"] is None
    assert values["identity"]["config.model_type"] == "llama" and "text" not in values
    assert set(values) == {
        "path", "damage", "cache", "tokens", "sequences", "layers", "record_bytes", "state_bytes", "disk_bytes",
        "shared_bytes", "freed_bytes", "created", "last_used", "age_seconds", "library", "format_version", "encrypted",
        "config", "identity",
    }  # fmt: skip
    help_text = run("inspect", "--help")[1]
    assert [name for name in (*values, "text") if name not in help_text] == []


def test_inspect_says_what_is_shared(run: Run, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with DiskSwapCache(model, engine="mapped", **SMALL) as cache, torch.no_grad():
        model(prompt(model), past_key_values=cache)
        cache.save(tmp_path / "one")
        cache.save(tmp_path / "two")
    values = json.loads(run("inspect", tmp_path / "one", "--json")[1])
    assert values["shared_bytes"] == values["record_bytes"] > 0
    assert values["freed_bytes"] == values["disk_bytes"] - values["shared_bytes"]
    assert "shared with others" in run("inspect", tmp_path / "one")[1]


def test_text_only_when_asked_and_without_effect_on_a_terminal(
    run: Run, folder: Path, tmp_path: Path, ask: Run
) -> None:
    document = tmp_path / "evil.txt"
    document.write_text(f"w1 {EVIL} w2 " * 20)
    assert ask("--prompt-file", document, "--save", tmp_path / "saved")[0] == 0
    assert "[31m" not in run("inspect", tmp_path / "saved")[1]  # of the text, whose words a path may have too
    code, out, err = run("inspect", tmp_path / "saved", "--text", "--model", folder)
    assert (code, err) == (0, "")
    assert "\x1b" not in out and "w1 \\x1b[31mred\\x1b[0m w2" in out
    code, out, err = run("inspect", tmp_path / "saved", "--text", "--model", folder, "--json")
    assert "\x1b" not in out and json.loads(out)["text"] == [document.read_text().strip()]


def test_text_of_several_sequences_leaves_padding_out(run: Run, folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    ids = torch.arange(10, 22).reshape(2, 6)
    with DiskSwapCache(model, engine="mapped", **SMALL) as cache, torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.save(tmp_path / "saved")
    code, out, _ = run("inspect", tmp_path / "saved", "--text", "--model", folder, "--json")
    assert code == 0
    assert json.loads(out)["text"] == ["w6 w7 w8 w9", "w10 w11 w12 w13 w14 w15"]


def test_a_wrong_tokenizer_is_said(run: Run, ask: Run, folder: Path, document: Path, tmp_path: Path) -> None:
    assert ask("--prompt-file", document, "--save", tmp_path / "saved")[0] == 0
    other = transformers.AutoTokenizer.from_pretrained(folder)
    other.add_tokens(["more"])
    other.save_pretrained(tmp_path / "other")
    code, _, err = run("inspect", tmp_path / "saved", "--text", "--model", tmp_path / "other")
    assert code == 0 and "another tokenizer" in err


def test_inspect_what_is_damaged_or_no_context(run: Run, three: Path) -> None:
    next((three / "a").glob("*.records")).unlink()
    code, out, _ = run("inspect", three / "a")
    assert code == 1 and "is missing" in out
    (three / "b" / "manifest.json").write_text('{"manifest": {"format": "\x1b[31m"}}')
    for name in ("b", "nothing", ""):
        code, out, err = run("inspect", three / name)
        assert (code, out) == (2, "") and one_line(err, "ContextError") and "\x1b" not in err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 😀", "plain é 漢 😀"),
        ("a\x1b]0;title\x07b", "a\\x1b]0;title\\x07b"),
        ("a\rb\x08c\x9bd\x7f", "a\\rb\\x08c\\x9bd\\x7f"),
        ("user\u202etxt.exe\u2066", "user\\u202etxt.exe\\u2066"),
        ("\ud800 \u2028", "\\ud800 \\u2028"),
        ("two\nlines\there", "two\nlines\there"),
    ],
)
def test_printable(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert printable(text, keep="\n\t") == shown
    assert "\n" not in printable(text)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert printable("é") == "\\xe9"


# ---------------------------------------------------------------------------------------------- ls


def test_ls(run: Run, three: Path) -> None:
    next((three / "b").glob("*.records")).unlink()
    code, out, err = run("ls", three)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["c", "b", "a"], "those used last first"
    assert "damaged" in lines[2] and "missing" in lines[2] and "damaged" not in lines[1] + lines[3]
    assert lines[-1].startswith("3 contexts, ")


def test_ls_as_json(run: Run, three: Path) -> None:
    (three / "a" / "manifest.json").write_text("nonsense")
    os.utime(three / "a" / "manifest.json", ns=(5, 5))
    code, out, _ = run("ls", three, "--json")
    values = json.loads(out)
    entries = listing.listing(three)
    assert code == 0 and values["folder"] == str(three)
    assert values["total_bytes"] == total_bytes(entries) == sum(entry.bytes for entry in entries)
    assert [context["name"] for context in values["contexts"]] == ["c", "b", "a"]
    assert [context["tokens"] for context in values["contexts"]] == [26, 25, None]
    assert [context["damage"] is None for context in values["contexts"]] == [True, True, False]
    assert values["contexts"][0]["last_used"].startswith("2001-09-09T01:46:40")
    help_text = run("ls", "--help")[1]
    assert [name for name in (*values, *values["contexts"][0]) if name not in help_text] == []


def test_ls_shows_names_that_cannot_act_on_a_terminal(run: Run, three: Path) -> None:
    (three / "a").rename(three / "\x1b[31mred [bold]")
    code, out, err = run("ls", three)
    assert code == 0 and "\x1b" not in out + err and "\\x1b[31mred [bold]" in out
    code, out, err = run("rm", three / "\x1b[31mred [bold]", three / "\x1bgone")
    assert code == 2 and "\x1b" not in out + err


def test_a_context_that_vanishes_between_listing_and_opening(
    run: Run, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = listing.look

    def remove_b(path: Any, **options: Any) -> Any:
        if Path(path).name == "b":
            remove(path)
        return looking(path, **options)

    monkeypatch.setattr(listing, "look", remove_b)
    code, out, err = run("ls", three)
    assert (code, err) == (0, "") and [line.split()[0] for line in out.splitlines()[1:-1]] == ["c", "a"]
    assert out.splitlines()[-1].startswith("2 contexts")


def test_ls_and_rm_do_without_torch(three: Path) -> None:
    """They answer at once."""
    program = (
        "import sys\n"
        "from hf_offload_cache.console.main import main\n"
        "codes = [main(['ls', sys.argv[1]]), main(['inspect', sys.argv[2]]), main(['rm', sys.argv[2]])]\n"
        "sys.exit(any(codes) or 3 * ('torch' in sys.modules))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", program, str(three), str(three / "a")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (three / "a").exists()


# ---------------------------------------------------------------------------------------------- rm


@pytest.mark.parametrize("wipe", [[], ["--wipe"]])
def test_rm(run: Run, three: Path, wipe: list[str]) -> None:
    entry = listing.look(three / "a")
    code, out, err = run("rm", three / "a", three / "c", *wipe)
    assert (code, err) == (0, "") and entry is not None
    assert out.splitlines()[0] == f"removed {three / 'a'}, which freed {entry.bytes / 1024:.1f} KiB"
    assert [path.name for path in three.iterdir()] == ["b"]


def test_rm_goes_on_and_refuses_what_is_no_context(run: Run, three: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    (tmp_path / "link").symlink_to(three / "b")
    code, out, err = run("rm", tmp_path / "mine", three / "a", tmp_path / "link", three / "nothing")
    assert code == 2 and len(out.splitlines()) == 1 and len(err.splitlines()) == 3
    assert (tmp_path / "mine" / "file").read_text() == "keep"
    assert sorted(path.name for path in three.iterdir()) == ["b", "c"]


def test_rm_of_the_least_recently_used(run: Run, three: Path) -> None:
    sizes = {entry.name: entry.bytes for entry in listing.listing(three)}
    next((three / "a").glob("*.records")).unlink()
    code, out, err = run("rm", "--folder", three, "--max-bytes", sizes["b"] + sizes["c"])
    assert (code, err) == (0, "")
    assert "was damaged" in out and [line.split()[1] for line in out.splitlines()[:-1]] == [f"{three / 'a'},"]
    assert out.splitlines()[-1].startswith("freed ") and "the remaining contexts take" in out
    listing.touch(three / "b")
    assert run("rm", "--folder", three, "--max-bytes", "1KiB", "--wipe")[0] == 0
    assert list(three.iterdir()) == []


def test_rm_says_what_does_not_go(run: Run, three: Path) -> None:
    (three / "a" / "notes").write_text("mine")
    code, out, err = run("rm", "--folder", three, "--max-bytes", "0")
    assert code == 1 and one_line(err, "notes") and len(out.splitlines()) == 3
    assert [path.name for path in three.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--folder", "x"], ["--max-bytes", "1"], ["x", "--folder", "x", "--max-bytes", "1"],
     ["--folder", ".", "--max-bytes", "many"]],
)
def test_rm_of_a_wrong_request(run: Run, arguments: list[str]) -> None:
    code, out, err = run("rm", *arguments)
    assert (code, out) == (2, "") and one_line(err, "--max-bytes")


# ---------------------------------------------------------------------------------------------- verify


def test_verify(run: Run, three: Path) -> None:
    code, out, err = run("verify", three / "a")
    assert code == 0 and out.startswith("intact: 7 files")
    assert re.fullmatch(r"verify: (\S+ KiB) of \1 in [\d.]+ s\n", err)  # no terminal: one line at the end
    file = sorted((three / "a").glob("*.records"))[0]
    content = bytearray(file.read_bytes())
    content[4096 * 2] ^= 1
    file.write_bytes(content)
    (three / "a" / "\x1bnote").write_text("hi")
    code, out, err = run("verify", three / "a")
    assert (code, err.count("\n")) == (1, 1) and "\x1b" not in out
    (line,) = [line for line in out.splitlines() if file.name in line]
    assert line.split()[:5] == ["damaged", "layer", line.split()[2], file.name, "2"]
    assert "\\x1bnote" in out and out.splitlines()[-1].startswith("DAMAGED")
    code, out, _ = run("verify", three / "a", "--json")
    values = json.loads(out)
    assert code == 1 and values["whole"] is False
    assert [(x["kind"], x["records"]) for x in values["findings"] if x["kind"] == "damaged"] == [("damaged", [2])]
    assert [name for name in (*values, *values["findings"][0]) if name not in run("verify", "--help")[1]] == []


def test_published_and_streamed(ask: Run, run: Run, folder: Path, document: Path, tmp_path: Path) -> None:
    """The same answer as without a network; and what cannot be asked for."""
    saved, url = tmp_path / "saved", tmp_path / "published"
    _, answer, _ = ask("--prompt-file", document, "--save", saved)
    named = "--model", folder
    code, out, err = run("publish", saved, url, *named, "--level", "lossless", "--chunk-tokens", 64)
    assert (code, out.count("in 3 chunks"), out.count("(lossless)")) == (0, 1, 1), err
    assert re.search(r"^publish: (\d+) of \1 layers in [\d.]+ s$", err, re.M)
    options = *named, "--prompt-file", document, "--path", tmp_path, "--question", "w5", "--max-new-tokens", 6
    code, out, err = run("stream", url, *options)
    assert (code, out) == (0, answer), err
    assert "cells computed" in err and "first token after" in err
    assert re.search(r"^\d+ cells computed, \d+ streamed: (\d+) of \1 cells in [\d.]+ s$", err, re.M), err
    code, _, err = run("publish", saved, url, *named)
    assert code == 2 and one_line(err, "overwrite")
    code, _, err = run("stream", tmp_path / "nowhere", *options)
    assert code == 1 and one_line(err, "no published context")
    code, _, err = run("serve", tmp_path / "nowhere")
    assert code == 2 and one_line(err, "is not a folder")
    code, _, err = run("publish", saved, url, *named, "--private", "9:3")
    assert code == 2 and one_line(err, "a range of tokens is A:B")
