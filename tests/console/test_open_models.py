"""The open models of the shipped table, and plans of them for machines elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from site_pages import DOCS, section, tables, text
from transformers import AutoConfig, AutoModelForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.config import parse_size
from hf_offload_cache.console import (
    KnownModel,
    default_model,
    known_models,
    load,
    longest,
    model_cells,
    model_header,
    read_header,
    room_of,
)
from hf_offload_cache.memory import machine
from hf_offload_cache.model import Geometry

MEMORY = ("8GB", "16GB", "24GB", "48GB")
MODELS = list(known_models().values())


def last_line(err: str) -> str:
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.name)
def test_transformers_builds_what_the_table_says(known: KnownModel) -> None:
    """Layers, heads, dimensions, windows, and with them the bytes of keys and values; and the published number of
    parameters."""
    fields = dict(known.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == known.parameters
    ours, built = known.geometry(torch.bfloat16), Geometry.of(model)
    assert ours.weight_bytes == 2 * known.parameters
    assert 0 <= built.weight_bytes - ours.weight_bytes < 2**16, "buffers, such as the rotary frequencies"
    assert dataclasses.replace(built, weight_bytes=ours.weight_bytes) == ours
    for tokens in (1, 700, known.positions):
        assert ours.full_kv_bytes(tokens, 2) == built.full_kv_bytes(tokens, 2)
    assert known.positions == config.get_text_config().max_position_embeddings
    assert known.geometry(torch.float32, "cuda").dtype == torch.float32
    assert known.geometry(torch.float32, "cuda").device == "cuda"


@pytest.mark.parametrize(("window", "full"), [(262144, 0), (None, 2)])
def test_a_window_beyond_all_positions_is_set_to_none(window: int | None, full: int) -> None:
    """Phi-4-mini's configuration as published, and as its row's note says; here of two layers."""
    known = known_models()["Phi-4-mini"]
    assert known.note is not None and "sliding_window=262144" in known.note
    fields = {**known.config, "sliding_window": window, "num_hidden_layers": 2}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(Geometry.of(model).layers) == full


def test_each_row_has_a_source_and_a_date() -> None:
    assert len(MODELS) >= 20 and [known.parameters for known in MODELS] == sorted(known.parameters for known in MODELS)
    for known in MODELS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", known.repository), known
        assert re.search(r"@[0-9a-f]{8} \S+\.(py|json)\b|package \S+ \d+\.\d+\.\d+$", known.copy), known
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.date), known


def test_the_package_has_the_models_of_two_rows(default_header: Any) -> None:
    """The default model's file has the sizes that its row says."""
    row = known_models()["SmolLM2-135M"]
    names = {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "vocab_size": "vocab_size",
        "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    }  # fmt: skip
    assert {ours: default_header.values[f"llama.{theirs}"] for theirs, ours in names.items()} == {
        ours: row.config[ours] for ours in names.values()
    }
    assert default_header.num_weights == row.parameters


@pytest.fixture
def default_header() -> Any:
    return read_header(default_model.find_gguf())


def test_the_longest_contexts_fit_and_no_longer_ones() -> None:
    known = known_models()["Llama-3.2-3B"]
    geometry, room = known.geometry(torch.bfloat16), room_of("16GB", "cpu")
    found = longest(known, room, torch.bfloat16)
    assert room == 14 * 10**9 and found is not None and found.cached == known.positions == 131072
    left = room - geometry.weight_bytes
    assert geometry.full_kv_bytes(found.full, 1) <= left < geometry.full_kv_bytes(found.full + 1, 1)
    config = DiskSwapCache.fit(geometry, left, found.cached, 1, {})
    plan = DiskSwapCache.plan(geometry, config, found.cached, 1)
    assert plan.peak_bytes <= left and plan.disk_bytes == found.disk_bytes > 0
    less = longest(known, geometry.weight_bytes + 200 * 2**20, torch.bfloat16)
    assert less is not None and less.full < less.cached < known.positions
    share = geometry.full_kv_bytes(less.cached, 1) / (200 * 2**20)
    assert 13 * (15 / 16) ** 4 < share <= 13, "a cache of at least a thirteenth"
    assert longest(known, geometry.weight_bytes, torch.bfloat16) is None
    whole = longest(known, room + 10**11, torch.bfloat16)
    assert whole is not None and (whole.full, whole.cached, whole.disk_bytes) == (131072, 131072, 0)
    windows = longest(known_models()["Gemma-3-4B"], room, torch.bfloat16)
    assert windows is not None and windows.full == 131072, "of 34 layers 29 keep 1,023 tokens"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_page_has_what_the_verb_prints(device: str, console: Any, tmp_path: Path) -> None:
    """Every number of the page's table is computed here."""
    file = tmp_path / "models.json"
    options = [word for size in MEMORY for word in ("--memory", size)]
    code, out, err = console("models", "--device", device, *options, "--json", file)
    assert (code, err) == (0, "")
    written = json.loads(file.read_text())
    place = section(text(DOCS / "models.md"), {"cpu": "On a CPU", "cuda": "On a GPU"}[device])
    ((heads, rows),) = tables(place)
    page = {row[0]: row for row in rows}
    assert heads == model_header([size.replace("GB", " GB") for size in MEMORY])
    assert list(page) == [known.name for known in MODELS]
    for known, row in zip(MODELS, written["models"], strict=True):
        rooms = {size: room_of(size, device) for size in MEMORY}
        contexts = {size: longest(known, room, torch.bfloat16, device) for size, room in rooms.items()}
        expected = model_cells(known, contexts, torch.bfloat16)
        assert page[known.name] == expected and expected[-1] in out
        assert row["contexts"] == {size: one and vars(one) for size, one in contexts.items()}
        assert (row["repository"], row["date"], row["positions"]) == (known.repository, known.date, known.positions)
        assert row["token_bytes"] == known.geometry(torch.bfloat16).full_kv_bytes(5000, 1) - known.geometry(
            torch.bfloat16
        ).full_kv_bytes(4999, 1)


def test_the_page_names_every_source() -> None:
    ((_, sources),) = tables(section(text(DOCS / "models.md"), "Where the numbers come from"))
    assert [row[0] for row in sources] == [known.name for known in MODELS]
    for known, row in zip(MODELS, sources, strict=True):
        assert known.repository in row[1] and row[2] == known.copy and row[3] == known.date


def test_this_machine(console: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 4 * 10**9)
    code, out, err = console("models")
    assert code == 0 and "3.73 GiB free" in out and "Phi-4-mini: config.json has sliding_window=262144" in out
    (row,) = [line for line in out.splitlines() if "Qwen3-1.7B" in line]
    assert row.split("│")[1:-1][-1].strip() == "-", "3.2 GiB of weights and a GB for the program"
    monkeypatch.setattr(machine, "free_memory", lambda device: None)
    code, out, err = console("models")
    assert (code, out) == (2, "") and "--memory must be given: this system does not tell what is free" in last_line(err)
    for words, said in (("lots", "must be a number of bytes or a size"), ("8", "must be more than the 2 GB that are")):
        code, _, err = console("models", "--memory", words)
        assert code == 2 and f"--memory {said}" in last_line(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_gpu_here(console: Any) -> None:
    code, _, err = console("models", "--device", "cuda")
    assert code == 2 and "this machine has no GPU" in last_line(err)


# ------------------------------------------------------------------------------- plans for other machines


@pytest.fixture
def plan(tmp_path: Path, console: Any) -> Any:
    """Runs `plan` for a model of the table: (exit code, stdout, stderr, what was written as JSON)."""

    def run(*arguments: Any, model: str = "Llama-3.1-8B") -> Any:
        file = tmp_path / "plan.json"
        found = console("plan", "--model", model, "--json", file, *arguments)
        return *found, json.loads(file.read_text()) if file.exists() else None

    return run


ASKED = pytest.mark.usefixtures("nobody_asks")


@pytest.fixture
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("free_memory", "free_disk"):
        monkeypatch.setattr(machine, name, lambda *_: pytest.fail("this machine was asked"))


ELSEWHERE = ("--free-memory", "22GB", "--free-disk", "200GB", "--disk-speed", "2GB/s", "--device", "cpu")


@ASKED
def test_a_plan_by_name_for_a_machine_elsewhere(plan: Any) -> None:
    code, out, err, written = plan("--context", "100000", "--memory", "1/13", *ELSEWHERE)
    assert (code, err) == (0, "")
    there, planned, config = written["machine"], written["plan"], written["config"]
    assert there["free"] == {"memory": 22 * 10**9, "disk": 200 * 10**9} and there["here"] is False
    assert planned["weight_bytes"] == 2 * 8030261248 and planned["full_kv_bytes"] == 100000 * 131072
    read = config["num_selected"] * 131072 // 2  # in 8 bits
    assert config["entry_bits"] == 8 and config["num_selected"] == 10000
    assert written["step"] == {"read_bytes": read, "seconds": read / (2 * 10**9)} and not written["none_needed"]
    assert "a step reads 625.0 MiB from the disk if it finds nothing in memory: 0.328 s at 2GB/s" in out
    assert "the configuration of meta-llama/Llama-3.1-8B-Instruct is the one of 2026-07-23" in out
    code, _, _, small = plan("--context", "100000", "--memory", "1/13", *ELSEWHERE, "--free-disk", "5GB")
    assert code == 1 and small["machine"]["fits"] == {"memory": True, "disk": False} and small["plan"] == planned
    _, _, _, exact = plan("--context", "100000", "--set", "exact=true", *ELSEWHERE)
    assert exact["step"]["read_bytes"] == planned["full_kv_bytes"], "all of it"


@ASKED
def test_no_cache_is_needed(plan: Any) -> None:
    """Where weights and the full KV fit; to the byte."""
    needed = 2 * 1235814400 + 30000 * 32768
    for free, none_needed in ((needed, True), (needed - 1, False)):
        code, out, _, written = plan(
            "--context", "30000", "--free-memory", str(free), "--device", "cpu", model="Llama-3.2-1B"
        )
        assert code == 0 and written["none_needed"] is none_needed
        assert ("note: you need no cache: weights and the full KV (DynamicCache) take 3.22 GiB" in out) is none_needed
        assert written["machine"]["free"]["disk"] is None and written["step"]["seconds"] is None
    small = ("--context", "300", "--free-memory", "16GB", "--device", "cpu", "--memory", "4KiB")  # no cache has room
    _, out, _, compared = plan("--compare", *small, model="SmolLM2-135M")
    assert compared["none_needed"] is True and "note: you need no cache" in out
    assert out.count("raise --memory, or lower --context or --batch") == len(compared["plans"]) == 4
    code, _, err, _ = plan(*small, model="SmolLM2-135M")
    assert code == 2 and "lower --context or --batch; or leave the cache out: you need no cache: wei" in last_line(err)


@ASKED
def test_more_tokens_than_positions(plan: Any) -> None:
    too_many = "the model has 131,072 positions, and was not made for 131,073 tokens"
    for tokens, said in (("131073", [too_many]), ("131072", [])):
        _, out, _, written = plan("--context", tokens, *ELSEWHERE, "--free-disk", "1TB", model="Llama-3.2-1B")
        assert [note for note in written["notes"] if "positions" in note] == said and all(one in out for one in said)
        assert written["machine"]["free"]["disk"] == 10**12


def test_a_disk_speed_alone_is_of_this_machine(plan: Any) -> None:
    _, out, _, written = plan("--context", "4000", "--disk-speed", "500MB", "--device", "cpu", model="SmolLM2-135M")
    assert written["machine"]["here"] is True and written["machine"]["free"]["memory"] is not None
    assert written["step"]["seconds"] == written["step"]["read_bytes"] / (500 * 10**6) and "at 500MB/s" in out
    assert written["step"]["read_bytes"] == 400 * 30 * 2 * 3 * 64 * 2


@ASKED
def test_host_memory_of_a_gpu_elsewhere(plan: Any) -> None:
    """Records go to its host memory if three quarters of what is free suffice, and a step reads nothing from the
    disk."""
    gpu = ("--device", "cuda:0", "--device-memory", "24GB", "--context", "70000", "--memory", "1/13")
    gpu = (*gpu, "--disk-speed", "2GB", "--free-disk", "200GB")
    _, out, _, large = plan(*gpu, "--free-memory", "64GB")
    assert large["config"]["engine"] == "memory" and large["machine"]["free"]["host memory"] == 48 * 10**9
    said = "from host memory if it finds nothing in memory; --disk-speed does not matter for that"
    assert large["step"]["seconds"] is None and said in out
    assert large["machine"]["free"]["device memory"] == 24 * 10**9
    _, out, _, small = plan(*gpu, "--free-memory", "4GB")
    assert small["config"]["engine"] == "auto" and small["machine"]["fits"]["disk"] is True
    assert small["step"]["seconds"] == small["step"]["read_bytes"] / (2 * 10**9) and "from the disk" in out
    _, _, _, limited = plan(*gpu, "--free-memory", "64GB", "--host-memory", "20GB")
    assert limited["machine"]["free"]["host memory"] == 20 * 10**9


@ASKED
def test_all_caches_at_a_disk_speed(plan: Any) -> None:
    code, out, _, written = plan("--context", "100000", "--memory", "1/6", *ELSEWHERE, "--compare")
    (row,) = [line for line in out.splitlines() if "seconds for that at" in line]  # the rest is on the next line
    shown = [cell.strip() for cell in row.split("│")[2:-1]]
    assert code == 0 and shown == [f"{one['read_bytes'] / (2 * 10**9):.3g}" for one in written["plans"]]
    assert "these fit that machine: disk-swap" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--disk-speed", "fast"], "--disk-speed must be a number of bytes or a size"),
        (["--disk-speed", "0"], "--disk-speed must be at least one byte a second"),
        (["--free-memory", "some"], "--free-memory must be a number of bytes or a size"),
        (["--free-disk", "some"], "--free-disk must be a number of bytes or a size"),
        (["--model", "Llama-9"], "cannot read the configuration of the Hub name (and no folder of that name exists)"),
        (["--model", "a/b"], "; `models` lists names without a Hub"),
        (["--model", "mistralai/Mistral-7B-v0.3"], "; did you mean 'Mistral-7B-v0.3', which needs no Hub?"),
    ],
)
def test_a_wrong_machine(plan: Any, arguments: list[str], words: str) -> None:
    code, out, err, _ = plan("--context", "4000", "--device", "cpu", *arguments)
    assert (code, out) == (2, "") and words in last_line(err)


def test_a_folder_goes_before_a_name(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    code, _, err, _ = plan("--context", "4000", "--device", "cpu", model="Qwen3-8B")
    assert code == 2 and "the folder 'Qwen3-8B'" in last_line(err) and "Hub?" not in last_line(err)
    with pytest.raises(OSError, match="the Hub name of Qwen3-4B is 'Qwen/Qwen3-4B'"):
        load("Qwen3-4B")


def test_another_type(plan: Any) -> None:
    _, _, _, written = plan("--context", "4000", "--device", "cpu", "--dtype", "float32", model="Qwen3-0.6B")
    assert written["plan"]["weight_bytes"] == 4 * 596049920 and parse_size("1GB") == 10**9
