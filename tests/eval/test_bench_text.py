"""The benchmark on text: what it counts, on a tiny model and random ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import fresh

from eval import bench, bench_decode, bench_text
from eval.bench_text import ALONE, DYNAMIC, FIRST, SHORT, STATIC, run, text_rows
from eval.contenders import OWN


def test_bench_decode_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each length and batch, one prefill for all, the budget and fields given; the rows are judged like the others."""
    asked: list[tuple[Any, ...]] = []

    def measured(tokens: int, batch: int, steps: int, ours: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked.append((tokens, batch, steps, ours, more["in_memory"], more["shared_prefill"]))
        row = {"median_seconds": 1.0, "prefill_seconds": 2.0, "hit_rate": 0.5, "first_over_settled": 1.0}
        return {"rows": {DYNAMIC: {**row, "median_seconds": 4.0}, STATIC: {**row, "median_seconds": 2.0}, OWN: row}}

    monkeypatch.setattr(bench_text, "measure", measured)
    words = ["--text", "--batch", "1", "4", "--context", "300", "--steps", "5", "--repetitions", "2", "--threads", "1"]
    words += ["--json", str(tmp_path / "f.json"), "--set", "num_selected=64"]
    monkeypatch.setattr(sys, "argv", ["bench_decode", *words])
    assert bench_decode.main() == 0
    fields = {OWN: {"cache": "disk-swap", "memory": "1/13", "num_selected": 64}}
    assert asked == [(300, batch, FIRST + 10, fields, [DYNAMIC, STATIC], True) for batch in (1, 4)]
    found = json.loads((tmp_path / "f.json").read_text())
    assert sorted(row["measured"] for row in bench.judge({"text, 32K": found})) == [0.5, 2.0]
    words = ["--text", "--methods", "ClusterCache", STATIC, "--memory", "default", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_decode", *words])
    assert bench_decode.main() == 0
    assert asked[-1][3:] == ({"ClusterCache": {"cache": "cluster"}}, [STATIC], True)
    monkeypatch.setattr(sys, "argv", ["bench_decode", "--text", "--methods", "FlexGen"])
    with pytest.raises(SystemExit):
        bench_decode.main()


EVERYTHING = {"num_selected": 1024, "num_recent": 8, "group_size": 4, "engine": "memory"}
LITTLE = {**EVERYTHING, "num_selected": 16, "reuse_capacity": 16}


def test_rows_of_all_contenders() -> None:
    """Each is fed the same tokens: what attends to everything says what `DynamicCache` says, what selects a little does
    not. Times are there of every step, and the model alone is what others are compared with."""
    model = fresh("llama")
    ids = torch.randint(1, 190, (2, 700), generator=torch.Generator().manual_seed(0))
    said: list[str] = []
    ours = {"everything": EVERYTHING, "little": LITTLE, "planned": {**EVERYTHING, "memory": "16MiB"}}
    rows = run(model, ids, 600, FIRST + 9, 200, ours, turn=5, say=said.append)
    assert list(rows) == [ALONE, DYNAMIC, STATIC, *ours]
    assert rows[DYNAMIC]["kl"] == 0 and rows[DYNAMIC]["top1"] == 1
    for name in (STATIC, "everything"):
        assert rows[name]["kl"] < 1e-6 and rows[name]["top1"] > 0.98, name  # rounding may tip a tie
    assert rows["little"]["kl"] > 1e-3
    assert 0 < rows["little"]["hit_rate"] < 1 and rows["little"]["peak_share"] > 0
    assert rows["planned"]["kl"] < 1e-6 and rows["planned"]["fields"]["num_selected"] == 1024
    for name, row in rows.items():
        assert row["quartiles"][0] <= row["median_seconds"] <= row["quartiles"][1]
        assert row["prefill_seconds"] > 0 and row["first_over_settled"] > 0
        assert ("kl" in row) == ("beyond_the_model_seconds" in row) == (name != ALONE)
    assert len(said) == 2 * len(rows)


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forth and back, each from where it was; the model alone behind a short history."""
    places: list[tuple[str, int]] = []
    step = bench_text.Contender.step

    def told(one: bench_text.Contender) -> None:
        places.append((one.name, one.place))
        step(one)

    monkeypatch.setattr(bench_text.Contender, "step", told)
    ids = torch.randint(1, 190, (1, 200), generator=torch.Generator().manual_seed(0))
    run(fresh("llama"), ids, 96, FIRST + 2, 96, {}, (DYNAMIC,), turn=9)
    turns = [name for name, _ in places[::9]]
    assert turns == [ALONE, DYNAMIC, DYNAMIC, ALONE]
    for name, first in ((ALONE, SHORT), (DYNAMIC, 96)):
        assert [place for one, place in places if one == name] == list(range(first, first + FIRST + 2))


def test_rows_begin_at_even_distances() -> None:
    ids = torch.arange(100)
    assert text_rows(ids, 3, 40).tolist() == [list(range(start, start + 40)) for start in (0, 20, 40)]
    with pytest.raises(ValueError, match="100 tokens, and 101 are needed"):
        text_rows(ids, 1, 101)


def test_a_shared_prefill_says_the_same() -> None:
    """What one prefill in one piece leaves, put into each cache, goes on as each one's own prefill in one piece."""
    model = fresh("llama")
    ids = torch.randint(1, 190, (1, 700), generator=torch.Generator().manual_seed(0))
    other = torch.randint(1, 190, (1, 700), generator=torch.Generator().manual_seed(1))
    own, shared, rows = (
        run(model, given, 600, FIRST + 3, 600, {"little": LITTLE}, shared_prefill=sharing)
        for given, sharing in ((ids, False), (ids, True), (torch.cat([ids, other, other]), True))
    )
    assert own["little"]["kl"] == pytest.approx(shared["little"]["kl"], rel=1e-3) and own["little"]["kl"] > 1e-3
    # Keys are coded by a sample of all rows.
    assert rows["little"]["kl"] == pytest.approx(own["little"]["kl"], rel=0.05)
    assert max(shared[STATIC]["kl"], rows[STATIC]["kl"]) < 1e-6
