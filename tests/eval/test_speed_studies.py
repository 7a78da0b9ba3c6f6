"""The studies of `AbstractTreeCache`'s steps and of long outputs: what they run, and what they make of it."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from long_llama import long_model

from eval import compare
from eval.profiles import Profile
from eval.studies import (
    cluster_reads,
    common,
    long_decode,
    long_equal_mass,
    long_growth,
    speed_ablation,
    speed_chunks,
    speed_compress,
    speed_growth,
)
from eval.synthetic import Shape

MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def arguments_of(study: common.Study, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path")
    study.arguments(parser)
    return parser.parse_args(words)


def with_times(monkeypatch: pytest.MonkeyPatch, module: Any, seconds: Any) -> list[tuple[Any, ...]]:
    """The study's steps take `seconds(profile, batch, contender)`; what was run."""
    asked: list[tuple[Any, ...]] = []

    def in_turns(model: Any, ids: torch.Tensor, *sizes: Any, profile: Any, **options: Any) -> dict[str, Any]:
        tokens, steps, chunk, ours, in_memory = sizes
        asked.append((profile, len(ids), tokens, steps, in_memory, options["shared_prefill"]))
        assert ids.shape[1] == tokens + steps + 1
        found = {}
        for name in ("model alone", *ours):
            taken = seconds(profile, len(ids), name)
            found[name] = {"median_seconds": taken, "waited_seconds": taken / 2, "unpack_seconds": taken / 4}
            found[name] |= {"compressed_fraction": 0.5, "first_over_settled": 1.5, "looked_share": 0.03}
            found[name] |= {"bytes_read_a_step": 1e6 * taken, "kl": taken / 100}
        return found

    monkeypatch.setattr(module, "in_turns", in_turns)
    monkeypatch.setattr(module, "sample_ids", lambda texts, tokenizer: [torch.arange(3000) % 100])
    return asked


def test_each_disk_and_batch_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the better of the two that judge all keys; what was measured before is not measured again."""

    def seconds(profile: Any, batch: int, name: str) -> float:
        slow = {"all keys": 8.0, "all keys, ahead, by chunk": 12.0 if batch == 1 else 6.0}
        return slow.get(name, 2.0 if name == "tree, 1/13" else 1.0) * (2 if profile == "emmc" and name in slow else 1)

    asked = with_times(monkeypatch, speed_chunks, seconds)
    given = arguments_of(speed_chunks.STUDY, "--tokens", "1000", "--steps", "30", "--batches", "1", "4")
    rows = common.Rows(say=lambda line: None)
    found = speed_chunks.run(given, rows, loaded=(None, None))
    expected = [(profile, batch, 1000, 30, (), True) for profile in ("own", "emmc") for batch in (1, 4)]
    assert asked == expected
    by_tree = {setting: one["tree, 1/13"] for setting, one in found["times faster"].items()}
    assert by_tree == {"own, batch 1": 4, "own, batch 4": 3, "emmc, batch 1": 8, "emmc, batch 4": 6}
    assert found["mean"]["tree, 1/13"] == 5.25 and found["mean"]["fixed chunks"] == 10.5
    assert [one["met"] for one in found["must_reach"]] == [True] * 6
    assert found["must_reach"][-1]["measured"] == 0.03
    assert found["first 16 steps over later ones"]["tree, 1/6"] == 1.5
    assert speed_chunks.run(given, rows, loaded=(None, None)) == found and len(asked) == 4


def test_each_part_is_compared_with_what_it_is_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, or in distance to `DynamicCache`, which is asked for; all but the first within the budget."""
    taken = dict(zip(speed_ablation.ARMS, (8.0, 4.0, 5.0, 6.0, 3.0, 2.0, 1.0), strict=True))
    asked = with_times(monkeypatch, speed_chunks, lambda profile, batch, name: taken.get(name, 1.0))
    given = arguments_of(speed_ablation.STUDY, "--tokens", "1000", "--steps", "30", "--batches", "2")
    rows = common.Rows(say=lambda line: None)
    found = speed_ablation.run(given, rows, loaded=(None, None))
    assert asked == [(profile, 2, 1000, 30, ("DynamicCache",), True) for profile in ("own", "emmc")]
    assert found["arms"]["emmc, batch 2, all"] == {"ms": 1000.0, "MB": 1.0, "kl": 0.01}
    assert [one["measured"] for one in found["must_reach"]] == pytest.approx([0.5, 0.25, 0.5, 1 / 3, 0.5] * 2)
    assert all(one["met"] for one in found["must_reach"])
    assert speed_ablation.run(given, rows, loaded=(None, None)) == found and len(asked) == 2


def test_shares_are_compared_on_each_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(profile: Profile, batch: int, name: str) -> float:
        slower = {"0.0": 4.0, "1.0": 2.0, "auto": 1.0}.get(name, 3.0)
        return slower if profile.bytes_per_second == 100e6 else 1.0 + slower * (name == "auto")

    asked = with_times(monkeypatch, speed_compress, seconds)
    given = arguments_of(speed_compress.STUDY, "--tokens", "1000", "--steps", "30", "--links", "100", "900")
    rows = common.Rows(say=lambda line: None)
    found = speed_compress.run(given, rows, loaded=(None, None))
    assert [one[0].bytes_per_second for one in asked] == [100e6, 900e6]
    assert found["idle"]["100 MB/s"]["0.0"] == 3.0 and len(rows.rows) == 2 * len(speed_compress.SHARES)
    assert [one["met"] for one in found["must_reach"]] == [True, False]
    assert [one["measured"] for one in found["must_reach"]] == [0.5, 2.0]


@pytest.mark.parametrize("study", [speed_chunks, speed_compress, pytest.param(speed_ablation, marks=pytest.mark.slow)])
def test_they_run(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender, on a tiny model, and all that the summary is made of."""
    runs = speed_chunks if study is speed_ablation else study
    monkeypatch.setattr(runs, "sample_ids", lambda texts, tokenizer: [torch.arange(3000) % 190])
    words = {"tokens": "1100", "steps": "20"}
    own = {"links": "500", "memory": "none"} if study is speed_compress else {"batches": "2", "profiles": "own"}
    if study is speed_ablation:
        own["memory"] = "none"
    if study is speed_chunks:
        monkeypatch.setattr(study, "TREES", {name: {**of, "memory": "none"} for name, of in study.TREES.items()})
    flat = [word for name, value in {**words, **own}.items() for word in (f"--{name}", value)]
    rows = common.Rows(say=lambda line: None)
    found = study.run(arguments_of(study.STUDY, *flat), rows, loaded=(long_model(), None))
    compressed = [row.get("compressed_fraction") for row in rows.rows]
    assert any(share is not None for share in compressed) and found["must_reach"]
    assert all(one["met"] is not None for one in found["must_reach"])


@MATPLOTLIB
@pytest.mark.parametrize("study", [speed_chunks, speed_compress, speed_ablation])
def test_their_plots_are_drawn(study: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = speed_chunks if study is speed_ablation else study
    with_times(monkeypatch, runs, lambda profile, batch, name: 1.0)
    rows = common.Rows(say=lambda line: None)
    found = study.run(arguments_of(study.STUDY, "--tokens", "1000", "--steps", "30"), rows, loaded=(None, None))
    common.draw(study.STUDY, found, rows.rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_is_timed_at_each_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside the model alone; what was measured is not measured again."""
    tiny = Shape(layers=3, heads=4, kv_heads=4, head_dim=64, hidden=32, intermediate=64, vocabulary=128)
    monkeypatch.setitem(compare.SHAPES, "smollm2", tiny)
    small = "--context", "2048", "4096", "--steps", "1", "--repetitions", "1", "--memory", "1/2"
    given, rows = arguments_of(speed_growth.STUDY, *small), common.Rows(say=lambda line: None)
    given.path = str(tmp_path)
    found = speed_growth.run(given, rows)
    methods = "AbstractTreeCache", "DiskSwapCache"
    kinds = [(row["tokens"], row["method"]) for row in rows.rows]
    assert sorted(kinds) == [(tokens, name) for tokens in (2048, 4096) for name in (*methods, "the model alone")]
    assert all(row["ms"] > 0 for row in rows.rows)
    assert found["alone_ms"] == {row["tokens"]: row["ms"] for row in rows.where(method="the model alone")}
    assert set(found["beyond_ms"]) == set(methods)
    assert [one["met"] for one in found["must_reach"]] == [None], "neither 8K nor 128K was measured"
    monkeypatch.setattr(speed_growth, "measured", None)
    assert speed_growth.run(given, rows) == found


def test_growth_is_of_what_a_step_takes_beyond_the_model() -> None:
    own = {131072: 130.0, 8192: 60.0}
    rows = [{"tokens": tokens, "method": "the model alone", "ms": ms} for tokens, ms in ((131072, 30), (8192, 20))]
    rows += [{"tokens": tokens, "method": "AbstractTreeCache", "ms": ms} for tokens, ms in own.items()]
    found = speed_growth.summary([*rows, {"tokens": 8192, "method": "DiskSwapCache", "left_out": "no memory"}])
    assert found["beyond_ms"] == {"AbstractTreeCache": {"8192": 40.0, "131072": 100.0}}
    (verdict,) = found["must_reach"]
    assert (verdict["measured"], verdict["at_most"], verdict["met"]) == (2.5, 3.0, True)


def decodes(study: Any, path: Path, *words: str, **contenders: dict[str, Any]) -> tuple[dict[str, Any], common.Rows]:
    """What a study of long outputs finds with a tiny model, and its rows."""
    for name, fields in contenders.items():
        words += "--set", f"{name}:{','.join(f'{key}={value}' for key, value in fields.items())}"
    given, rows = arguments_of(study.STUDY, *words), common.Rows(say=lambda line: None)
    given.path = str(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "sample_ids", lambda texts, tokenizer: [torch.arange(3000) * 7 % 190])
        found = study.run(given, rows, loaded=(long_model(), None))
        assert study.run(given, rows, loaded=(None, None)) == found, "what was measured is not measured again"
    return found, rows


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], common.Rows]:
    small = {"num_selected": 64, "reuse_capacity": 32, "cluster_size": 16}
    fields = {name: {**usual, **small} for name, usual in long_decode.USUAL.items()}
    fields[long_decode.ROWS] = {**long_decode.USUAL[long_decode.ROWS], "num_selected": 64}
    words = "--prompt", "640", "--steps", "120", "--every", "20"
    return decodes(long_decode, tmp_path_factory.mktemp("decode"), *words, **fields)


@pytest.mark.slow
def test_long_outputs_are_compared(decoded: tuple[dict[str, Any], common.Rows]) -> None:
    """Only the adaptive clusters are read for what joins them, and split; those of the prompt stay as many."""
    found, rows = decoded
    table = {row["name"]: row for row in rows.rows}
    adaptive, static, local, at_once, none = (table[name] for name in long_decode.USUAL)
    for row in (adaptive, static, local, at_once, none):
        assert len(row["mass"]) == 3 == len(row["ms"]) and row["steps"] == 114
        assert all(0 < mass <= best + 1e-6 <= 1.001 for mass, best in zip(row["mass"], row["oracle"], strict=True))
    assert 760 // 16 <= static["clusters"] <= 1.5 * 760 / 16  # and halves of those that are too large
    assert local["settling_loaded_bytes"] == 0 < adaptive["settling_loaded_bytes"] < at_once["settling_loaded_bytes"]
    assert none["run"] < adaptive["run"]
    moved = [adaptive[f"settling_{name}_bytes"] for name in ("loaded", "rewritten", "moved", "moved_singly")]
    assert moved[0] > 0 and 0 < moved[1] < moved[2] < moved[3]
    assert 0 < adaptive["settling_seconds"] < adaptive["seconds"]
    assert all(one["met"] is not None for one in found["must_reach"])
    late = next(one for one in found["must_reach"] if one["figure"] == "late mass over static")
    assert late["measured"] == pytest.approx(adaptive["mass"][2] / static["mass"][2])


@pytest.mark.slow
@MATPLOTLIB
def test_long_outputs_are_drawn(decoded: tuple[dict[str, Any], common.Rows], tmp_path: Path) -> None:
    found, rows = decoded
    common.draw(long_decode.STUDY, found, rows.rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], common.Rows]:
    small = {"num_selected": 64, "reuse_capacity": 32, "cluster_size": 16}
    fields = {name: {**long_growth.USUAL[name], **small} for name in ("adaptive", "static")}
    words = "--prompt", "320", "--marks", "64", "256", "--steps", "16"
    return decodes(long_growth, tmp_path_factory.mktemp("growth"), *words, **fields)


def test_steps_are_timed_at_each_mark(grown: tuple[dict[str, Any], common.Rows]) -> None:
    """Clusters become more with the output; the study's summary is of the rows that it has."""
    found, rows = grown
    own = rows.where(name="adaptive")
    for name in ("adaptive", "DynamicCache"):
        assert [row["generated"] for row in rows.where(name=name)] == [64, 256]
    assert own[0]["clusters"] < own[1]["clusters"] and all(0 < row["adapting"] < 1 for row in own)
    assert all(row["quartiles"] == sorted(row["quartiles"]) for row in rows.rows)
    first, last = (row["ms"] for row in own)
    assert found["ms"]["adaptive"]["slope"] == pytest.approx((last - first) / 0.192)
    verdict = next(one for one in found["must_reach"] if one["figure"].startswith("adaptive"))
    assert verdict["measured"] == pytest.approx(last / first / 4)
    static = rows.where(name="static", generated=256)[0]["ms"]
    verdict = next(one for one in found["must_reach"] if one["figure"].startswith("a step of static"))
    assert verdict["measured"] == pytest.approx(static / last) and verdict["at_least"] == 1.4


@MATPLOTLIB
def test_growth_is_drawn(grown: tuple[dict[str, Any], common.Rows], tmp_path: Path) -> None:
    found, rows = grown
    common.draw(long_growth.STUDY, found, rows.rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_steps_are_compared_at_equal_mass(tmp_path: Path) -> None:
    """Those that attend to more take in more of the attention; what each takes is told at the mass of the first."""
    usual, small = long_equal_mass.USUAL, {"reuse_capacity": 32, "cluster_size": 16}
    fields = {"adaptive, 64": {**usual["adaptive, 400"], **small, "num_selected": 64}}
    for count in (16, 400):
        fields[f"static, {count}"] = {**usual["static, 400"], **small, "num_selected": count}
    fields["token rows, 4"] = {**usual["token rows, 100"], "num_selected": 4}
    words = "--prompt", "320", "--generated", "200", "--steps", "16", "--looks", "2"
    found, rows = decodes(long_equal_mass, tmp_path, *words, **fields)
    table = found["contenders"]
    assert table["static, 16"]["mass"] < table["static, 400"]["mass"]
    assert all(row["mass"] <= row["oracle"] + 1e-6 for row in rows.rows)
    verdicts = {one["figure"]: one for one in found["must_reach"]}
    reached = {"static": "at equal mass", "token rows": "with less mass"}
    assert list(verdicts) == [f"a step of {name} over one of adaptive, {how}" for name, how in reached.items()]


def test_time_at_equal_mass_lies_between_those_measured() -> None:
    rows = [
        {"name": name, "mass": mass, "ms": ms, "MB": 1.0}
        for name, mass, ms in [
            ("adaptive, 400", 0.7, 100.0), ("static, 400", 0.5, 90.0), ("static, 800", 0.6, 110.0),
            ("static, 1600", 0.8, 190.0), ("local, 800", 0.6, 120.0), ("token rows, 100", 0.9, 210.0),
        ]
    ]  # fmt: skip
    verdicts = long_equal_mass.summary(rows)["must_reach"]
    measured = {one["figure"].partition(" of ")[2]: one["measured"] for one in verdicts}
    assert measured == {
        "static over one of adaptive, at equal mass": pytest.approx(1.5),
        "local over one of adaptive, with less mass": pytest.approx(1.2),
        "token rows over one of adaptive, at equal mass": pytest.approx(2.1),
    }


@pytest.mark.slow
def test_what_clusters_read_is_compared(tmp_path: Path) -> None:
    """Places that queries chose lie together, places in any order do not; slots answer some of what is wanted."""
    small = {"num_selected": 64, "cluster_size": 8}
    fields = {
        name: {**usual, **small, "reuse_capacity": min(32, usual["reuse_capacity"])}
        for name, usual in cluster_reads.USUAL.items()
    }
    found, _ = decodes(cluster_reads, tmp_path, "--prompt", "640", "--steps", "24", "--every", "4", **fields)
    table = found["contenders"]
    assert table["placed by queries"]["run"] > table["placed anywhere"]["run"]
    hits = {name: row["hit_rate"] for name, row in table.items()}
    assert hits["placed by queries"] == 0 < min(hits[name] for name in ("aligned", "lru", "fifo"))
    assert [one["measured"] > 0 for one in found["must_reach"]] == [True] * 5
