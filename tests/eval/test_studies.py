"""Every study runs as a command on a tiny model; what all of them count by is right."""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import Letters
from long_llama import long_model
from words import words as tokens

from eval.studies import common, fields, quality_needles_budget, watch
from hf_offload_cache.registry import cache_class
from hf_offload_cache.streaming import loader

TEXT = "--tokens 700 --steps 4 --samples 1"
CLUSTERS = "num_selected=64,reuse_capacity=32,cluster_size=16"
SMALL = {
    "long_decode": f"--prompt 320 --steps 32 --every 8 --set adaptive:cache=cluster,{CLUSTERS}",
    "native_sparse": "--tokens 256 300 --look-ahead",
    "long_growth": f"--prompt 320 --marks 32 64 --set adaptive:cache=cluster,{CLUSTERS}",
    "quality": f"{TEXT} --memory none --set a:num_selected=48",
    "quality --of fields": f"{TEXT} --set a:adapter=calibrated,num_selected=48",
    "quality --of guess": f"{TEXT} --set a:cache=spec,num_selected=8",
    "quality --of bits": f"{TEXT} --set a:cache=spec",
    "quality --of chunks": f"{TEXT} --set a:cache=abstract-tree,num_selected=48",
    "quality_needles_budget": "--tokens 800 --samples 1 --set a:num_selected=64",
    "speed --of parts": "--tokens 1100 --steps 20 --memory none",
    "speed --of chunks": "--memory none",
    "speed --of links": "--tokens 1100 --steps 20 --memory none",
    "speed --of guess": "--tokens 700 --steps 20 --devices ufs",
    "remainder": "--memory none --texts help changed chat --set a:num_selected=64",
    "stream_costs": "--tokens 512 --chunk 256",
    "stream_quality": "--tokens 300 --steps 4 --needles 0",
    "stream_speed": "--tokens 640 --chunk 128",
}
SLOW = (*(name for name in SMALL if name.startswith("speed --of")), "quality --of bits")


def studies() -> list[Any]:
    place = Path(common.__file__).parent
    names = sorted(path.stem for path in place.glob("*.py") if "STUDY = Study(" in path.read_text())
    assert set(names) == {name.split()[0] for name in SMALL}
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in SMALL]


@pytest.mark.parametrize("name", studies())
def test_a_study_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quick, on a tiny model; its rows are on disk and are not measured again. Its plots are drawn of them."""
    monkeypatch.setattr(loader, "LEAST_TOKENS", 128)
    given = SMALL[name]
    name, *question = name.split()
    study = importlib.import_module(f"eval.studies.{name}").STUDY
    words = ["--quick", "--json", str(tmp_path / "out.json"), "--path", str(tmp_path), *question, *given.split()]
    loaded = long_model(), tokens() if name == "quality_needles_budget" else Letters()
    found = common.main(study, words, loaded)
    assert found["rows"] and found["summary"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["summary"] == json.loads(json.dumps(found["summary"])) and written["study"] == name
    drawn = {option: tmp_path / f"{option}.png" for option in study.plots or () if find_spec("matplotlib")}
    plots = [word for option, path in drawn.items() for word in (f"--{option}", str(path))]
    again = common.main(study, [*words, "--resume", *plots], loaded)
    assert again["rows"] == written["rows"]
    assert all(path.stat().st_size > 1000 for path in drawn.values())
    for row in found["rows"] if name == "native_sparse" else ():
        ahead = row["name"].startswith("read ahead")
        assert (row.get("ahead_bytes", 0) > 0) == ahead == (row.get("ready_rate", 0) > row.get("hit_rate", 0))


def counting(arguments: argparse.Namespace, rows: common.Rows, loaded: Any = None) -> dict[str, Any]:
    before = len(rows.rows)
    for index in range(before, arguments.count):
        rows.add(index=index)
        if not before and index == 2:
            raise KeyboardInterrupt
    return {"must_reach": [common.judged("counted", len(rows.rows) - before, least=3)]}


def test_a_study_resumes_where_it_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
        figure.subplots().plot([row["index"] for row in rows])

    study = common.Study("count", "How far?", counting, {"count": (5, "numbers")}, {"count": 2}, plots={"plot": plot})
    words = ["--json", str(tmp_path / "out.json")]
    with pytest.raises(KeyboardInterrupt):
        common.main(study, words)
    assert len(common.main(study, [*words, "--resume"])["rows"]) == 5
    assert "must reach: counted: 2 (at least 3): missed" in capsys.readouterr().out
    for wrong in ([*words, "--resume", "--count", "4"], ["--resume"]):
        with pytest.raises(SystemExit):
            common.main(study, wrong)
    assert len(common.main(study, ["--quick"])["rows"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    if find_spec("matplotlib"):
        common.main(study, ["--quick", "--plot", str(tmp_path / "out.png")])
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [*fields.contenders(fields.OWN), *fields.contenders(fields.OUTPUT)])
def test_values_that_are_tried_are_valid(name: str) -> None:
    given = {**fields.contenders(fields.OWN), **fields.contenders(fields.OUTPUT)}[name]
    config = cache_class(given["cache"]).config_class(**{key: one for key, one in given.items() if key != "cache"})
    label = name.partition(": ")[2]
    shown = {} if label == fields.DEFAULT else dict(pair.split("=") for pair in label.split(", "))
    assert {key: str(getattr(config, key)) for key in shown} == shown
    assert not shown or given.keys() - shown.keys() <= {"cache", "look_ahead"}


def test_weights_of_a_hand_made_attention() -> None:
    """Two query heads of one key head; keys in two parts; exp of the scaled scores is 1, 2, 5 and 1, 1, 1."""
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [5.0, 0.0]]).log().nan_to_num(neginf=0.0)[None, None]
    query = torch.tensor([[2.0, 0.0], [0.0, 3.0]])[None, :, None]
    weights = watch.attention_weights(query, [keys[:, :, :2], keys[:, :, 2:]], 0.5)
    torch.testing.assert_close(weights, torch.tensor([[1 / 8, 2 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3]]))
    look = watch.Look(0, weights, [torch.tensor([0, 2])])
    assert look.mass == pytest.approx((6 / 8 + 2 / 3) / 2)
    assert [look.important(share) for share in (0.3, 0.6, 1.0)] == [0.5, 0.5, 1.0]
    weights = torch.tensor([[0.5, 0.1, 0.2, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1, 0.1]])
    columns = [torch.tensor([0, 1, 4]), torch.tensor([0, 2, 3, 4])]
    assert watch.Look(0, weights, columns).between(1, 4) == pytest.approx(((0.25 + 2 / 3) / 2, (0.5 + 2 / 3) / 2))


def test_needles_are_lost_of_those_that_the_full_cache_finds() -> None:
    rows = [
        {"name": name, "sample": sample, "prompt": prompt, "code": str(sample), "answered": answered}
        for name, answers in {"DynamicCache": (1, 1, 0, 1), "small": (1, 0, 0, 0)}.items()
        for (sample, prompt), answered in zip([(0, 9), (1, 9), (2, 9), (0, 99)], answers, strict=True)
    ]
    rows += [{**rows[0], "sample": 3, "code": "3"}, {**rows[-1], "sample": 3, "code": "3", "prompt": 9}]
    rows[-1] |= {"answered": None, "refused": "too little"}
    row = quality_needles_budget.lost(rows)["small"]
    assert (row["asked"], row["lost"], row["of"], row["refused"], row["of_refused"]) == (4, 2, 3, 1, 1)
    assert row["lost_share"] == pytest.approx(2 / 3)
