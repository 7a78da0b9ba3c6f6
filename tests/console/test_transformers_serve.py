"""`run transformers serve`: transformers' own server, asked over loopback, with its models' caches offloaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from words import words

from eval.chat_server import LIBRARY, PLAIN, Server, ask, summary, talk
from hf_offload_cache import ContextLibrary, offload

pytestmark = pytest.mark.slow

NEW = 6
BIN = Path(sys.executable).parent
EXACT = ["--set", "exact=true"]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['description'] + ' ' }}{% endfor %}"
    "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
)
_UP = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


def address(said: Path, server: subprocess.Popen) -> str:
    """Where it waits, once it does."""
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        found = _UP.search(said.read_text())
        if found is not None:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(said.read_text())


def test_a_chat_is_answered_through_a_cache(tmp_path: Path) -> None:
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    tokenizer, folder, said = words(), tmp_path / "tiny", tmp_path / "stderr"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = prompt(model, 1, 300)
    cache = DynamicCache(config=model.config)
    given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "do_sample": False}
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=NEW, **given)[0, 300:], skip_special_tokens=True)
    command = [BIN / "hf-offload-cache", "run", "--set", "exact=true", "--path", tmp_path, "transformers", "serve"]
    command += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    with said.open("w") as stderr, subprocess.Popen(command, env=environment, stderr=stderr) as server:
        try:
            content = " ".join(f"w{word}" for word in ids[0].tolist())
            asked = {
                "model": str(folder), "messages": [{"role": "user", "content": content}], "max_tokens": NEW,
                "temperature": 0, "stream": False,
            }  # fmt: skip
            request = urllib.request.Request(
                f"{address(said, server)}/v1/chat/completions", json.dumps(asked).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as answer:
                (choice,) = json.load(answer)["choices"]
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            finally:
                server.kill()  # of one that has ended nothing
    assert choice["message"]["content"] == expected
    assert "1 requests were offloaded\nthe latest one:" in said.read_text() and "of the full KV" in said.read_text()
    assert {one.name for one in tmp_path.iterdir()} == {"tiny", "stderr"}


# ------------------------------------------------------------------------------------------------ a library


def saved(folder: Path, seed: int = 0) -> tuple[Any, str]:
    """A model of random weights, and the folder in which it and a tokenizer were saved."""
    torch.manual_seed(seed)
    model, tokenizer = LlamaForCausalLM(LlamaConfig(**COMMON)).eval(), words()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, str(folder)


def text(model: Any, tokens: int, seed: int) -> str:
    return " ".join(f"w{word}" for word in prompt(model, 1, tokens, seed=seed)[0].tolist())


def alone(model: Any, content: str, **options: Any) -> str:
    """The model's answer without a server."""
    ids = words()(content, return_tensors="pt").input_ids
    options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **options}
    answer: str = words().decode(model.generate(ids, **options)[0, ids.shape[1] :], skip_special_tokens=True)
    return answer


def test_turns_compute_their_own_tokens_after_a_restart_too(tmp_path: Path) -> None:
    """Five turns of two conversations that alternate, streamed and not: the answers are those without a library."""
    model, folder = saved(tmp_path / "tiny")
    texts = [text(model, tokens, seed=tokens) for tokens in (150, 170)]
    questions = [text(model, 20 + turn, seed=turn) for turn in range(5)]
    rows = []
    for way, options in ((LIBRARY, [*EXACT, "--library", tmp_path / "library"]), (PLAIN, None)):
        def start(options: Any = options, way: str = way) -> Server:
            return Server(tmp_path / way, options)

        rows += talk(start, way, folder, texts, questions, restart_after=3, max_tokens=NEW)
    found = summary(rows, {})
    assert found["answers_equal"] and found["most_tokens_beyond_own"] == 0
    assert {row["streamed"] for row in rows if row["turn"] == 5} == {True, False}
    for row in rows:
        expected = row["own"] if row["way"] == LIBRARY else row["prompt"]
        assert row["computed"] == expected and row["answer"]
        assert row["turn"] == 1 or row["own"] == 20 + row["turn"] - 1 + 1, "the question, and the answer's last token"
    assert len(ContextLibrary(tmp_path / "library").entries()) == 2


def test_every_way_to_ask_uses_the_library(tmp_path: Path) -> None:
    """Completions, responses, tools, seeds, two models, and a client that goes away."""
    model, folder = saved(tmp_path / "tiny")
    other, second = saved(tmp_path / "other", seed=1)
    with Server(tmp_path / "server", [*EXACT, "--library", tmp_path / "library"]) as server:
        client, greedy = server.client, {"temperature": 0, "max_tokens": NEW}

        def computed() -> int:
            return len(server.forwards()[0]["ids"])

        def chat(content: str, of: str = folder, **options: Any) -> str:
            messages = [{"role": "user", "content": content}]
            server.forwards()
            row = client.chat.completions.create(model=of, messages=messages, **{**greedy, **options})
            return str(row.choices[0].message.content)

        content, more = text(model, 100, seed=1), text(model, 30, seed=2)
        for given, tokens in ((content, 100), (f"{content} {more}", 30)):
            server.forwards()
            answer = client.completions.create(model=folder, prompt=given, **greedy).choices[0].text
            assert answer == alone(model, given) and computed() == tokens
        server.forwards()
        limits = {"temperature": 0, "max_output_tokens": NEW}
        answered = client.responses.create(model=folder, input=f"{content} {more}", stream=False, **limits)
        assert answered.output_text == alone(model, f"{content} {more}") and computed() == 1
        events = client.responses.create(model=folder, input=content, stream=True, **limits)
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(parts) == alone(model, content) and computed() == 1

        described = text(model, 25, seed=3)
        tool = {"type": "function", "function": {"name": "look", "description": described, "parameters": {}}}
        for tokens in (125, 1):  # a tool is text before the first message
            assert chat(content, tools=[tool]) == alone(model, f"{described} {content}") and computed() == tokens

        for tokens in (100, 1):  # the other model has nothing of this one
            assert chat(content, second) == alone(other, content) and computed() == tokens
        assert chat(content) == alone(model, content) and computed() == 1

        sampled = {"do_sample": True, "max_new_tokens": NEW}
        for seed in (3, 4):
            torch.manual_seed(seed)
            expected = alone(model, content, **sampled)
            given_config = {"generation_config": json.dumps(sampled)}
            assert chat(content, seed=seed, temperature=1, extra_body=given_config) == expected and computed() == 1

        left = text(model, 120, seed=5)
        server.forwards()
        messages = [{"role": "user", "content": left}]
        stream = client.chat.completions.create(
            model=folder, messages=messages, stream=True, temperature=0, max_tokens=2000,
            extra_body={"generation_config": json.dumps({"do_sample": False, "eos_token_id": None})},
        )  # fmt: skip
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        stream.close()
        row = ask(server, folder, messages, streamed=True, **greedy)
        assert row["answer"] == alone(model, left) and server.forwards() == []
        assert chat(left) == alone(model, left) and computed() == 1
        left = text(model, 140, seed=6)
        messages = [{"role": "user", "content": left}]
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.01).chat.completions.create(model=folder, messages=messages, **greedy)
        assert chat(left) == alone(model, left)
        sizes = [len(json.loads(line)["ids"]) for line in server.log.read_text().splitlines()]
        assert sizes.count(140) == 1, "it was completed, and the next one begins with it"
    assert "were left plain" not in server.stderr.read_text()


@pytest.mark.parametrize("strict", [False, True], ids=["warns", "refuses"])
def test_continuous_batching_uses_the_library_in_its_pages(strict: bool, tmp_path: Path) -> None:
    model, folder = saved(tmp_path / "tiny")
    content, library = text(model, 40, seed=1), tmp_path / "library"
    options = [*EXACT, "--library", library, *(["--strict"] if strict else [])]
    pages = ["--continuous-batching", "--cb-num-blocks", 16, "--cb-block-size", 16, "--cb-max-batch-tokens", 64]
    why = "own cache: continuous batching has pages of its own: .* leave --continuous-batching out of transformers"
    own, ids = LlamaForCausalLM.from_pretrained(folder), words()(content, return_tensors="pt").input_ids
    with offload(own, exact=True, library=library):
        own.generate(ids, max_new_tokens=NEW, do_sample=False)

    def ask(given: str) -> str:
        messages = [{"role": "user", "content": given}]
        asked = {"model": folder, "messages": messages, "max_tokens": NEW, "temperature": 0}
        return str(server.client.chat.completions.create(**asked).choices[0].message.content)

    with Server(tmp_path / "server", options, pages) as server:
        server.forwards()
        if strict:
            with pytest.raises(openai.InternalServerError):
                ask(content)
            end = time.monotonic() + 60  # the traceback follows the answer
            while "or leave strict" not in server.stderr.read_text() and time.monotonic() < end:
                time.sleep(0.1)
        else:
            assert ask(content) == alone(model, content)
            assert len(server.forwards()[0]["ids"]) == 40 - 32, "two complete pages were stored"
            other = text(model, 50, seed=2)
            assert ask(other) == alone(model, other)
            end = time.monotonic() + 60  # it is killed, and saves until then
            while len(ContextLibrary(library).entries()) < 2 and time.monotonic() < end:
                time.sleep(0.1)
    said, known = server.stderr.read_text(), [entry.manifest.tokens for entry in ContextLibrary(library).entries()]
    if strict:
        assert re.search(f"UnsupportedModelError: LlamaForCausalLM would keep its {why} serve; or leave strict", said)
        assert known == [45]
    else:
        warned = f"LlamaForCausalLM keeps its {why} serve; such requests begin with contexts of the library if their"
        assert len(re.findall(warned, said)) == 1 and known == [48, 45]
