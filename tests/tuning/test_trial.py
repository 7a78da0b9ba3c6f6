"""Tuning by trying, end to end with a tiny model: what is tried, what a row gets, what is refused and left."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import WORDS, tiny_llama, token_ids, tokenizer

from hf_offload_cache import AbstractTreeCache, DiskSwapCache, tune
from hf_offload_cache.console import main as cli
from hf_offload_cache.console import named_cache as load_model
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.model import Geometry
from hf_offload_cache.testing import open_descriptors
from hf_offload_cache.tuning import LEAD, RECITED, Nearness, Trial, by_trial, tuner

ASKED: dict[str, Any] = {
    "cache": "abstract-tree", "memory": "1/2", "max_context": 6144, "max_batch": 2, "texts": [token_ids(1200)],
    "quick": True, "samples": 2, "time_limit": 0.1, "num_selected": 64, "progress": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    descriptors, threads = open_descriptors(), threading.active_count()  # of tests before, too, which may end meanwhile
    yield
    assert open_descriptors() <= descriptors and threading.active_count() <= threads
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny_llama().modules())


def test_every_candidate_is_tried_and_each_row_has_the_best_that_fits_it(tmp_path: Path) -> None:
    found = tune(tiny_llama(), path=tmp_path, **ASKED)
    values = json.loads(json.dumps(found.values))
    assert list(tmp_path.iterdir()) == []
    trials = values["trials"]
    tried = [trial["fields"] for trial in trials]
    more = {"num_opened": 512}
    smaller = [{**each, "chunk_size": size} for size in (32, 16) for each in ({}, more)]
    assert tried == [{}, {**more, "chunk_size": 64}, *smaller]
    assert all(trial["seconds"] > 0 and trial["recital_distance"] > 0 for trial in trials)
    means = [Nearness(*(trial[name] for name in Nearness.__dataclass_fields__)) for trial in trials]
    best = by_trial.best_of(means)
    assert [(row["batch"], row["context"]) for row in values["rows"]] == [(b, c) for b in (1, 2) for c in (4096, 6144)]
    for row in values["rows"]:
        assert row["tried"] == tried[best] and tried[best].items() <= row["fields"].items()
        assert row["fields"]["num_selected"] == 64
        assert row["planned_bytes"] <= row["memory"] == values["memory"] * row["batch"] // 2
    # what was tried for 1,200 tokens: text that goes on, and three recitals
    assert values["sample"]["steps"] == 16 + 3 * (LEAD + RECITED) and values["sample"]["context"] == 1184
    found.save(tmp_path / "config.json")
    with AbstractTreeCache(tiny_llama(), config=tmp_path / "config.json", max_batch=1, path=tmp_path) as cache:
        assert cache.config.chunk_size == tried[best].get("chunk_size", 64)
        tiny_llama().generate(token_ids(900)[None], past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert cache.report().peak_memory_bytes <= values["memory"] // 2
    saved = json.loads((tmp_path / "config.json").read_text())
    for row in saved["rows"]:
        row["fields"]["chunk_size"] = 64  # the default too may be the fastest
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="was tuned for AbstractTreeCache, and DiskSwapConfig has no"):
        DiskSwapCache(tiny_llama(), config=tmp_path / "config.json")


@pytest.mark.slow
def test_fields_that_are_given_are_not_tried() -> None:
    given = {**ASKED, "max_batch": 1, "max_context": 4096, "chunk_size": 32, "num_opened": 100}
    found = tune(tiny_llama(), **given)
    assert [trial["fields"] for trial in found.values["trials"]] == [{}]
    assert found.rows[0]["fields"]["chunk_size"] == 32 and found.rows[0]["fields"]["num_opened"] == 100
    given |= {"memory": "1/1", "num_selected": None, "chunk_size": 16, "num_opened": None}
    shared = tune(tiny_llama(), **given)
    assert [trial["fields"] for trial in shared.values["trials"]] == [{}]


def test_an_exact_cache_is_at_no_distance_and_one_that_forgets_is() -> None:
    """The distance is the divergence from what the model says with all of the context."""
    model = tiny_llama()
    trial = Trial(model, token_ids(700), 690, 2)
    with AbstractTreeCache(model, engine="memory", num_selected=690, num_opened=690, dense_layers=0) as cache:
        all_of_it = trial.of(cache)
    assert abs(all_of_it.text_distance) < 1e-6 and abs(all_of_it.recital_distance) < 1e-6
    with AbstractTreeCache(model, engine="memory", num_selected=16, dense_layers=0, chunk_size=8) as cache:
        little = trial.of(cache)
    assert little.text_distance > 1e-3 and little.recital_distance > 1e-3
    with torch.no_grad():  # by transformers' own cache: the recitals are of the places that are said
        places = [(2 * part + 1) * (690 - LEAD - RECITED) // 4 for part in range(2)]
        ids = torch.cat([token_ids(700), *(token_ids(700)[at : at + LEAD + RECITED] for at in places)])
        logits = model(ids[None]).logits[0, 690:]
    torch.testing.assert_close(trial._exact, logits, atol=1e-3, rtol=0)


def test_the_fastest_of_the_near_ones() -> None:
    near, slow, far = Nearness(2.0, 0.01, 0.05), Nearness(3.0, 0.01, 0.049), Nearness(1.0, 0.01, 0.2)
    assert by_trial.best_of([slow, near, far]) == 1
    assert by_trial.best_of([slow, far]) == 0
    assert by_trial.best_of([Nearness(2.0, 0.0, 0.0), Nearness(1.0, 0.004, 0.004)]) == 1  # both are noise


def test_what_for_budget_takes_is_tuned_and_what_it_refuses_is_refused_alike() -> None:
    geometry, fields = Geometry.of(tiny_llama()), {"num_selected": 64}
    with pytest.raises(BudgetError, match="need at least") as refused:
        AbstractTreeCache.fit(geometry, 100_000, 4096, 1, fields)
    asked = {**ASKED, "max_context": 4096, "max_batch": 1}
    with pytest.raises(BudgetError) as told:
        tune(tiny_llama(), **{**asked, "memory": 100_000})
    assert str(told.value) == str(refused.value)
    least = int(str(refused.value).split("at least ")[1].split()[0].replace(",", ""))
    found = tune(tiny_llama(), **{**asked, "memory": least})
    assert {} in [trial["fields"] for trial in found.values["trials"]]
    assert found.rows[0]["planned_bytes"] <= least


def test_rows_that_the_budget_is_too_little_for_are_left_out() -> None:
    """A quarter of what four sequences need is less than what one needs."""
    geometry, least = Geometry.of(tiny_llama()), 0
    with pytest.raises(BudgetError) as refused:
        AbstractTreeCache.fit(geometry, 100_000, 4096, 4, {"num_selected": 64})
    least = int(str(refused.value).split("at least ")[1].split()[0].replace(",", ""))
    found = tune(tiny_llama(), **{**ASKED, "max_context": 4096, "max_batch": 4, "memory": least})
    left = [row["batch"] for row in found.values["left_out"]]
    assert left and 4 not in left and [row["batch"] for row in found.rows] == [n for n in (1, 2, 3, 4) if n not in left]
    assert all("need at least" in row["why"] for row in found.values["left_out"])


@pytest.mark.slow
def test_a_group_size_is_a_chunk_size() -> None:
    found = tune(tiny_llama(), **{**ASKED, "max_context": 4096, "max_batch": 1, "group_size": 32})
    assert [trial["fields"] for trial in found.values["trials"]] == [{}, {"num_opened": 512}]
    assert found.rows[0]["fields"]["group_size"] == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "1/2", "exact": True}, "exact cannot be set"),
        ({"chunk_sise": 64}, "did you mean 'chunk_size'"),
        ({"encryption_key": lambda: bytes(32)}, "encryption_key must fit the JSON file"),
        ({"texts": [token_ids(30)], "num_selected": 4}, "at least 112 tokens, the longest has 30"),
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1, got 0"),
        ({"texts": [token_ids(100)]}, "at least 784 tokens, the longest has 100"),
    ],
)
def test_what_is_refused_before_anything_runs(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_trial, "Trial", lambda *args: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=message):
        tune(tiny_llama(), **{**ASKED, **change})


def test_interrupted_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Trial, cache: Any) -> Nearness:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(tiny_llama(), path=tmp_path, **ASKED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(load_model, "load", lambda *args: (tiny_llama(), tokenizer))
    monkeypatch.setattr(tuner, "_QUICK_SECONDS", 0.1)
    text, out = tmp_path / "text.txt", tmp_path / "config.json"
    text.write_text(WORDS)
    call = ["tune", "--cache", "abstract-tree", "--memory", "1/2", "--context", "4096", "--out", str(out), "--text",
            str(text), "--quick", "--path", str(tmp_path), "--set", "num_selected=64"]  # fmt: skip
    assert cli.main(call) == 0
    printed = capsys.readouterr().err
    assert "1 rows" in printed and "tried" in printed and "recital" in printed
    assert json.loads(out.read_text())["cache"] == "AbstractTreeCache"


@pytest.mark.slow
def test_clusters_of_other_sizes_are_tried() -> None:
    asked = {**ASKED, "cache": "cluster", "max_context": 4096, "max_batch": 1, "memory": "4/1"}
    found = tune(tiny_llama(), **asked)
    tried = [trial["fields"] for trial in found.values["trials"]]
    assert {} in tried and {"cluster_size": 8} in tried and {"cluster_size": 32} in tried
    given = tune(tiny_llama(), **{**asked, "cluster_size": 12})
    assert {"join_every": 64} in [trial["fields"] for trial in given.values["trials"]]
    assert {row["fields"]["cluster_size"] for row in given.rows} == {12}
