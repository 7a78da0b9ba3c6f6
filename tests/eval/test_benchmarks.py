"""The benchmarks at tiny sizes. The memory account is checked here in earnest."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import fresh
from transformers import DynamicCache

from eval import bench, bench_decode, bench_text, calls, memory, phases, replay, synthetic
from eval.bench_text import ALONE, DYNAMIC, FIRST, STATIC
from eval.contenders import FULL, NO_REUSE, OWN, SINGLE, SLOW
from hf_offload_cache import DiskSwapCache
from hf_offload_cache.config import parse_size

TINY = synthetic.Shape(layers=2, heads=3, kv_heads=1, head_dim=64, hidden=48, intermediate=64, vocabulary=128)
COMMANDS = (
    "bench", "bench_contexts", "bench_decode", "bench_gpu", "bench_text", "calls", "chat_server", "memory", "phases",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"eval.{name}").main()
    assert end.value.code == 0


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "chunk", "fields"),
    [
        pytest.param("disk-swap", 0, {"summary_bytes": 64}, marks=pytest.mark.slow),
        ("disk-swap", 1024, {"summary_bytes": 64}),
        pytest.param("abstract-tree", 1024, {"resident_layers": 0}, marks=pytest.mark.slow),
    ],
    ids=["piece", "chunks", "tree"],
)
def test_account_agrees_with_the_process(cache: str, chunk: int, fields: dict[str, Any]) -> None:
    """After prefill and after decoding: within 5% of what the kernel says, or 3 MiB; nothing is left after close. Keys
    of a prompt in pieces become compact at its end, which is the first step."""
    found = memory.measure(memory.Run(4096, chunk, steps=8, layers=11, heads=3, cache=cache, fields=fields))
    for stage, row in found["stages"].items():
        assert row["agrees"], (stage, row)
        assert row["account"] > (2 if stage == "decode" else 0) * memory.LEAST_BYTES
    assert abs(found["left_after_close"]) <= memory.LEAST_BYTES
    assert found["share_of_full_kv"] < 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "fields"),
    [("1/6", {"abstracts": "disk"}), ("1/5", {"compress": 0.5}), (None, {})],
    ids=["abstracts on the disk", "replicas", "resident"],
)
def test_account_of_a_tree_agrees_with_the_process(budget: str | None, fields: dict[str, Any]) -> None:
    """With all that it may hold, where 5% is more than the noise of a process."""
    run = memory.Run(12288, steps=8, cache="abstract-tree", budget=budget, fields=fields, filled=True)
    found = memory.measure(run)
    for stage, row in found["stages"].items():
        assert row["agrees"], (stage, row)
    assert found["stages"]["decode"]["account"] > 12 * memory.LEAST_BYTES
    assert abs(found["left_after_close"]) <= memory.LEAST_BYTES


def test_a_false_account_does_not_agree() -> None:
    """The tolerance is narrow enough to tell."""
    assert memory.agrees(100 << 20, 104 << 20)
    assert not memory.agrees(100 << 20, 107 << 20)
    assert not memory.agrees(10 << 20, 14 << 20)


# --- speed -------------------------------------------------------------------------------------------------------


def test_methods_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, in turns; a reload reads everything in each step, the others a part."""
    monkeypatch.setitem(replay.SHAPES, "replay", replace(TINY, heads=4, kv_heads=2))
    methods = (OWN, NO_REUSE, SINGLE, FULL, "all keys", "StaticCache")
    words = ["--shape", "replay", "--quick", "--memory", "1/2", "--path", str(tmp_path), "--set", "look_ahead=false"]
    words += ["--methods", *methods, "--json", str(tmp_path / "out.json"), "--threads", "1", "--beyond"]
    assert bench_decode.main(words) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert set(found["rows"]) == set(found["beyond_seconds"]) == set(methods) and not found["left_out"]
    for name, row in found["rows"].items():
        assert row["off"]["steps"] == (2 if name in SLOW else 6) and row["on"]["tokens_per_second"] > 0
    full, own = (found["rows"][name]["off"] for name in (FULL, OWN))
    assert full["bytes_read"] > own["bytes_read"] > 0 and own["store_seconds"] > 0
    assert found["rows"][SINGLE]["group_size"] == 1 and found["rows"][NO_REUSE]["hit_rate"] == 0


def test_rows_of_all_contenders_on_text() -> None:
    """A cache that attends to everything agrees with `DynamicCache`; one that selects a little does not."""
    model = fresh("llama")
    ids = torch.randint(1, 190, (2, 700), generator=torch.Generator().manual_seed(0))
    everything = {"num_selected": 1024, "num_recent": 8, "group_size": 4, "engine": "memory"}
    ours = {"everything": everything, "little": {**everything, "num_selected": 16, "reuse_capacity": 16}}
    rows = bench_text.run(model, ids, 600, FIRST + 9, 200, ours, turn=5)
    assert list(rows) == [ALONE, DYNAMIC, STATIC, *ours]
    assert max(rows[name]["kl"] for name in (DYNAMIC, STATIC, "everything")) < 1e-6
    assert rows["little"]["kl"] > 1e-3 and 0 < rows["little"]["hit_rate"] < 1
    assert bench_text.text_rows(torch.arange(100), 3, 40)[:, 0].tolist() == [0, 20, 40]


def test_filled_caches_hold_the_same_context(tmp_path: Path) -> None:
    """A cache filled without a prefill, at once or in pieces, gives the logits of `DynamicCache` filled with the same
    keys and values."""
    model = synthetic.build_model(TINY)
    logits = []
    for exact, piece in ((None, 100), (True, None), ("bitwise", None), (True, 100)):
        cache = DynamicCache(config=model.config) if exact is None else DiskSwapCache(model, path=tmp_path, exact=exact)
        synthetic.fill(cache, model, TINY, 512, piece=piece)
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True).logits)
        getattr(cache, "close", lambda: None)()
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=5e-3)
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=0)
    torch.testing.assert_close(logits[3], logits[0], rtol=0, atol=5e-3)


def test_calls_are_counted() -> None:
    """Python functions, built-in ones and the package's own; a step that selects nothing raises."""
    step = eval("lambda: (inner(), len(()))", {"inner": lambda: None})
    found = calls.count(step, 10)
    parse_size("3KiB")  # which is remembered
    assert (found["python"], found["ours"]) == (2, 0) and calls.count(lambda: parse_size("3KiB"), 10)["ours"] == 1
    few = calls.measure("disk-swap", TINY, 1024, 2, num_selected=64)
    assert 0 < few["ours"] < few["python"] < few["all"] and few["files"] > 20
    with pytest.raises(RuntimeError, match="more are needed"):
        calls.measure("disk-swap", TINY, 32, 2)


def test_a_phase_is_what_is_left_of_it(tmp_path: Path) -> None:
    """Nested spans count without those within; every phase of a real trace has a meaning."""
    spans = [("decode", 0, 1000), ("layer 0", 100, 500), ("attention", 110, 400), ("gather", 200, 300)]
    events = [{"ph": "X", "cat": "compute", "name": name, "ts": at, "dur": end - at} for name, at, end in spans]
    assert phases.phases(events, 0) == pytest.approx(
        {"step": 1.0, "decode": 0.6, "layer": 0.11, "attention": 0.19, "gather": 0.1}
    )
    model, path = fresh("llama"), tmp_path / "trace.json"
    ids = torch.randint(1, 190, (1, 700), generator=torch.Generator().manual_seed(0))
    fields = {"num_selected": 16, "reuse_capacity": 16, "num_recent": 8, "group_size": 4}
    with DiskSwapCache(model, tmp_path, trace=path, **fields) as cache, torch.no_grad():
        model(ids[:, :640], past_key_values=cache)
        for place in range(640, 660):
            model(ids[:, place : place + 1], past_key_values=cache)
    found = set(phases.phases(json.loads(path.read_text()), first=4))
    assert {"attend", "rank", "gather", "read", "append"} <= found <= {*phases.MEANS, "step"}


def test_promises_are_judged() -> None:
    """Met, missed, without a result; and what a benchmark judged itself."""
    own = bench.judged("store time", 12.0, least=17)
    tree = {"summary": {"contenders": {"tree, a tenth": {"lost_share": 0.04}}, "must_reach": [own]}}
    none = {"summary": {"contenders": {"tree, a tenth": {"lost_share": None}}}}
    results = {"needles, tree": tree, "needles, tree, one of four": none, "memory": {"error": "broken"}}
    rows = {row["figure"]: row for row in bench.judge(results)}
    assert (rows["one needle, tree"]["measured"], rows["one needle, tree"]["met"]) == (0.96, True)
    assert rows["one of four, tree"]["met"] is rows["peak memory over full KV"]["met"] is None
    assert rows["store time"]["met"] is False and "architectures wrong" not in rows
    assert bench.as_table(rows.values()).row_count == len(rows)
