"""Tuning end to end with a tiny model: what comes out fits its budget and generates; what is refused; interruptions.

Other runs of the tuner are slow: `test_solve.py` has the solver on tables made by hand."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import WORDS, tiny_llama, token_ids, tokenizer
from transformers import MistralConfig, MistralForCausalLM

from hf_offload_cache import DiskSwapCache, OffloadCache, registry, tune
from hf_offload_cache.console import main as cli
from hf_offload_cache.console import named_cache as load_model
from hf_offload_cache.errors import BudgetError, ConfigError, StoreError, UnsupportedModelError
from hf_offload_cache.methods.disk_swap.tuning import by_solver, coarse, lookup, profile
from hf_offload_cache.model import Geometry
from hf_offload_cache.model.fingerprint import fingerprint
from hf_offload_cache.testing import open_descriptors
from hf_offload_cache.tuning import Tuned, measured_caches, sample, tuner

ASKED: dict[str, Any] = {
    "memory": "1/3", "max_context": 6144, "max_batch": 3, "texts": [token_ids(1200)], "quick": True, "samples": 2,
    "time_limit": 1.0, "num_selected": 64, "progress": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(profile, "_LEAST_FILE", 1 << 20)
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before
    model = tiny_llama()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.fixture(scope="module", params=["coded", pytest.param("int8", marks=pytest.mark.slow)])
def tuned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tuned:
    folder = tmp_path_factory.mktemp("disk")
    kind = {} if request.param == "coded" else {"summary_dtype": request.param}
    found = tune(tiny_llama(), path=folder, **ASKED, **kind)
    assert list(folder.iterdir()) == []
    return found


def test_a_row_for_every_pair_with_its_share_of_the_budget(tuned: Tuned) -> None:
    values = json.loads(json.dumps(tuned.values))
    full = 6144 * 3 * 3 * 2 * 32 * 4  # tokens, layers, keys and values, width, bytes
    assert values["memory"] == full // 3
    assert [(row["batch"], row["context"]) for row in tuned.rows] == [(b, s) for b in (1, 2, 3) for s in (4096, 6144)]
    for row in tuned.rows:
        assert row["memory"] == values["memory"] * row["batch"] // 3
        assert row["planned_bytes"] <= row["memory"]
        assert row["fields"]["num_selected"] == 64 and row["fields"]["candidates"]
        assert row["record_bytes"] == 4096
        assert row["fields"]["group_size"] == 16  # the largest whose record is one block
        size = "rank" if row["fields"]["summary_dtype"] == "int8" else "summary_bytes"
        assert row["sigma"] == pytest.approx(32 * 4 / row["fields"][size])
        assert ("adapter" in row["fields"]) == (size == "rank")
        assert row["hidden"] == (row["hidden_share"] >= 0.85)
        assert row["io_seconds"] >= 0
        assert row["model_seconds"] > 0
    assert values["left_out"] == []
    assert values["sample"] == {"texts": 2, "context": 1184, "steps": 16, "source": "given"}


def test_what_was_measured_is_in_the_file(tuned: Tuned) -> None:
    values = tuned.values
    assert values["tables"]["reuse"]["capacities"] == list(range(0, 257, 16))
    assert list(values["tables"]["reuse"]["mean"]) == [16]
    compression, coded = values["tables"]["compression"], tuned.adapter is None
    assert compression["sizes"][0] == (8 if coded else 16)  # a quarter of a byte an element, or the default rank
    assert len(compression["sizes"]) == len(compression["kept"]) == len(compression["least_kept"])
    if coded:
        assert all(0.9 < kept <= 1 for kept in compression["kept"])  # of a model whose attention is all but even
    assert values["profiles"]["io"]["counts"][4096][-1] == 3 * 5  # sequences, groups of 16 of 64 and of the sinks
    assert values["profiles"]["model"]["batches"] == [1, 3]
    assert values["profiles"]["model"]["contexts"] == [4096, 6144]
    if tuned.adapter is not None:
        assert sorted(tuned.adapter.projections) == [0, 1, 2]
    assert values["model"] == fingerprint(tiny_llama())
    assert set(values["machine"]) >= {"store", "cores", "device", "torch"}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_takes_it_and_keeps_the_budget(tuned: Tuned, tmp_path: Path, batch: int) -> None:
    tuned.save(tmp_path / "config.json")
    model = tiny_llama()
    with DiskSwapCache(model, config=str(tmp_path / "config.json"), max_batch=batch, path=tmp_path) as cache:
        ids = torch.stack([token_ids(900, seed) for seed in range(batch)])
        output = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert output.shape == (batch, 904)
        report = cache.report()
        assert report.peak_memory_bytes <= tuned.values["memory"] * batch // 3
        assert report.selected_fraction is not None
        assert report.selected_fraction < 0.3


@pytest.mark.slow
def test_fields_are_kept_in_every_row() -> None:
    found = tune(tiny_llama(), **{**ASKED, "max_batch": 1, "max_context": 4096}, engine="mapped", num_recent=16,
                 candidates=False)  # fmt: skip
    assert [(row["batch"], row["context"]) for row in found.rows] == [(1, 4096)]
    assert found.rows[0]["fields"]["engine"] == "mapped"
    assert found.rows[0]["fields"]["num_recent"] == 16
    assert found.rows[0]["fields"]["candidates"] is False


@pytest.mark.slow
def test_sigma_max_holds_for_codes_that_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "kept_mass", lambda keys, queries, scaling, sizes, *more: [1.0] * len(sizes))
    for sigma_max in (16.0, 32.0):
        found = tune(tiny_llama(), **{**ASKED, "max_context": 4096, "max_batch": 1}, sigma_max=sigma_max)
        assert found.rows[0]["fields"]["summary_bytes"] == 32 * 4 // sigma_max
        assert found.rows[0]["sigma"] == sigma_max


@pytest.mark.slow
def test_the_largest_pair_must_fit_and_others_are_left_out_by_name() -> None:
    geometry, fields = Geometry.of(tiny_llama()), {"num_selected": 64, "look_ahead": None, "group_size": 16}
    fields["summary_dtype"] = "coded"

    def fits(memory: int, batch: int) -> bool:
        try:
            return bool(DiskSwapCache.fit(geometry, memory, 4096, batch, fields))
        except BudgetError:
            return False

    least, enough = 0, 1 << 24
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if fits(middle, 4) else (middle, enough)
    found = tune(tiny_llama(), **{**ASKED, "max_context": 4096, "max_batch": 4, "memory": enough})
    left = [batch for batch in (1, 2, 3, 4) if not fits(enough * batch // 4, batch)]
    assert left[0] == 1  # what a cache of one sequence needs is more than a quarter of what one of four needs
    assert left[-1] < 4
    assert [row["batch"] for row in found.values["left_out"]] == left
    assert [row["batch"] for row in found.rows] == [batch for batch in (1, 2, 3, 4) if batch not in left]
    assert all("need at least" in row["why"] for row in found.values["left_out"])


def test_too_little_memory_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_solver.Reader, "read", lambda *args: pytest.fail("it ran"))
    with pytest.raises(BudgetError, match="need at least"):
        tune(tiny_llama(), **{**ASKED, "memory": 100_000})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["measure_io", "measure_model", "solve"])
def test_interrupted_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(by_solver, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(tiny_llama(), path=tmp_path, **ASKED)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_in_the_middle_of_the_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[Any] = []
    end_step = OffloadCache.end_step

    def interrupted(cache: OffloadCache, output: Any = None) -> Any:
        steps.append(cache)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return end_step(cache, output)

    monkeypatch.setattr(OffloadCache, "end_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(tiny_llama(), path=tmp_path, **ASKED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "rank cannot be set"),
        ({"summary_bytes": 8}, "summary_bytes cannot be set"),
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1, got 0"),
        ({"max_context": 2.5}, "max_context must be a whole number"),
        ({"samples": -1}, "samples must be"),
        ({"memory": "lots"}, "memory must be"),
        ({"alpha": 1.5}, "alpha must be"),
        ({"look_ahead": False}, "nothing to hide"),
        ({"num_select": 8}, "did you mean 'num_selected'"),
        ({"texts": [token_ids(100)]}, "at least 144 tokens, the longest has 100"),
        ({"texts": None}, "tokenizer must be given"),
    ],
)
def test_what_is_refused_before_anything_runs(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_solver.Reader, "read", lambda *args: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=message):
        tune(tiny_llama(), **{**ASKED, **change})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        tune(tiny_llama(), **ASKED, path=tmp_path / "nowhere")


def test_a_model_that_keeps_layers_in_memory() -> None:
    config = MistralConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                           num_key_value_heads=2, intermediate_size=64, sliding_window=16)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="keeps 2 of its layers in memory"):
        tune(MistralForCausalLM(config), **ASKED)


@pytest.mark.slow
def test_a_class_of_ones_own_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    settle = OwnCache.prepare

    def watched(self: OwnCache, model: Any) -> None:
        used.append("prepare")
        settle(self, model)

    monkeypatch.setattr(OwnCache, "prepare", watched)
    monkeypatch.setattr(OwnCache, "planned_by_us", used, raising=False)
    found = tune(tiny_llama(), cache=OwnCache, path=tmp_path, **{**ASKED, "max_context": 4096, "max_batch": 1})
    assert found.values["cache"] == "OwnCache"
    assert used.count("prepare") > 2
    assert "plan" in used
    with pytest.raises(ConfigError, match=r"got OffloadCache: use OffloadCache\.for_budget"):
        tune(tiny_llama(), cache=OffloadCache, **ASKED)
    with pytest.raises(ConfigError, match="one of disk-swap"):
        tune(tiny_llama(), cache="disk_swap", **ASKED)
    monkeypatch.setattr(load_model, "load", lambda *args: pytest.fail("it loaded"))
    monkeypatch.chdir(tmp_path)
    call = ["tune", "--memory", "1/3", "--context", "4096", "--out", "config.json"]
    assert cli.main([*call, "--cache", "hf_offload_cache:OffloadCache"]) == 2


class OwnCache(DiskSwapCache):
    """Says when it is planned for."""

    planned_by_us: list[str]

    @classmethod
    def plan(cls, *arguments: Any) -> Any:
        cls.planned_by_us.append("plan")
        return super().plan(*arguments)


def test_rows_and_grids() -> None:
    assert sample.rows_for(8, 32768) == (list(range(1, 9)), list(range(4096, 32769, 2048)))
    assert sample.rows_for(1, 3000) == ([1], [3000])
    assert sample.rows_for(3, 10000) == ([1, 2, 3], [4096, 6144, 8192, 10000])
    batches, contexts = sample.rows_for(64, 1 << 20)
    assert (batches[0], batches[-1], contexts[0], contexts[-1]) == (1, 64, 4096, 1 << 20)
    assert len(batches) <= 17
    assert len(contexts) <= 33
    assert coarse([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert coarse([1, 2, 3, 4, 5, 6, 7, 8], 2) == [1, 8]
    assert coarse([7], 2) == [7]


@pytest.mark.parametrize("kind", [[], pytest.param(["--set", "summary_dtype=int8"], marks=pytest.mark.slow)])
def test_the_console(
    kind: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_model, "load", lambda *args: (tiny_llama(), tokenizer))
    monkeypatch.setattr(tuner, "_QUICK_SECONDS", 1.0)
    text, out = tmp_path / "text.txt", tmp_path / "config.json"
    text.write_text(WORDS)
    call = ["tune", "--memory", "1/3", "--context", "4096", "--batch", "2", "--out", str(out), "--text", str(text),
            "--quick", "--path", str(tmp_path), "--set", "num_selected=64"]  # fmt: skip
    assert cli.main([*call, *kind]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 rows" in printed.err
    values = json.loads(out.read_text())
    adapters = [values["rows"][0]["fields"]["adapter"]] if kind else []
    assert sorted(os.listdir(tmp_path)) == [*adapters, "config.json", "text.txt"]
    assert (values["quick"], values["max_batch"], values["max_context"]) == (True, 2, 4096)
    assert values["sample"]["source"] == "given"
    with DiskSwapCache(tiny_llama(), config=out) as cache:
        assert cache.config.num_selected == 64  # type: ignore[attr-defined]


def test_the_console_compares_all_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_model, "load", lambda *args: (tiny_llama(), tokenizer))
    monkeypatch.setattr(load_model, "load_geometry", lambda *args: (Geometry.of(tiny_llama()), None))
    text, out = tmp_path / "text.txt", tmp_path / "caches.json"
    text.write_text(WORDS)
    room = ["--memory", "9/10", "--context", "900"]
    call = ["tune", "--compare", *room, "--out", str(out), "--text", str(text), "--quick"]
    assert cli.main(call) == 0
    printed = capsys.readouterr()
    cells = measured_caches(out)
    names = ["DynamicCache", *registry.CACHES]
    assert [cell["cache"] for cell in cells] == names
    rows = [line.split() for line in printed.out.splitlines() if line.strip().startswith(tuple(names))]
    assert [row[0] for row in rows] == names and {len(row) for row in rows} == {4}
    assert all(cell["cache"] in printed.out for cell in cells) and f"wrote {out}" in printed.err
    plan = ["plan", "--compare", *room, "--measured", str(out)]
    assert cli.main([*plan, "--json", str(tmp_path / "plan.json")]) == 0
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    nearest = min(cells[1:], key=lambda cell: cell["kl"])["cache"]
    assert chosen["fidelity"]["name"] == nearest
    assert f"for fidelity: {nearest}: at 900 tokens" in capsys.readouterr().out
    half = Geometry.uniform(3, 4, 2, 16, torch.bfloat16)
    monkeypatch.setattr(load_model, "load_geometry", lambda *args: (half, None))
    assert cli.main([*plan, "--model", "a/model"]) == 2
    told = capsys.readouterr()
    assert "with LlamaForCausalLM, and this is a/model: dtype was float32, here it is bfloat16" in told.err
    assert told.out == ""
    assert cli.main([*call, "--batch", "2"]) == 2
    assert "--batch and --compare: all caches are measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--out", "nowhere/config.json"], "--out .* cannot be written: there is no folder"),
        (["--text", "nowhere.txt"], "SampleFileError: --text 'nowhere.txt' cannot be read"),
    ],
)
def test_the_console_says_what_is_wrong_before_it_loads(
    changed: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load_model, "load", lambda *args: pytest.fail("it loaded"))
    assert cli.main(["tune", "--memory", "1/3", "--context", "4096", "--out", "config.json", *changed]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert os.listdir(tmp_path) == []
