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

import pytest
import torch
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from words import words

pytestmark = pytest.mark.slow

NEW = 6
BIN = Path(sys.executable).parent
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
