"""The study of streaming: who computes and streams what, and a link that has the rate that is asked for."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letters import Letters
from long_llama import long_model

from eval.baselines.cost_models import Roofline
from eval.bucket_server import TRACES, bucket_server, trace
from eval.busy import busy
from eval.studies import common, stream_costs, stream_plan, stream_quality, stream_requests, stream_speed
from hf_offload_cache.streaming import LEVELS, CostNetwork, HttpTransport, LayerCells, fetch, loader


def test_every_contender_fills_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_TOKENS", 128)
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default=str(tmp_path))
    stream_speed.arguments(parser)
    asked = ["--tokens", "640", "--balances", "1", "--traces", "constant", "slower", "--chunk", "128"]
    rows = common.Rows(say=lambda line: None)
    found = stream_speed.run(parser.parse_args(asked), rows, loaded=(long_model(), Letters()))
    cells = 5 * 2
    for kind in ("constant", "slower"):
        own = {row["name"]: row for row in rows.where(trace=kind)}
        assert set(own) == set(stream_speed.CONTENDERS)
        for name in set(own) - {stream_speed.LOCAL}:
            assert own[name]["computed"] + own[name]["streamed"] == cells and not own[name]["lost"]
        assert own[stream_speed.STREAMED]["streamed"] == cells
        assert 0 < own[stream_speed.SPLIT]["computed"] < cells and own[stream_speed.SPLIT]["computed"] % 2 == 0
    assert len(found["over ours"]) == 2 and all(row["met"] is not None for row in found["must_reach"][:5])
    again = common.Rows(say=lambda line: None)
    again.rows = list(rows.rows)
    assert stream_speed.run(parser.parse_args(asked), again, loaded=(long_model(), Letters())) == found


def test_the_link_is_as_slow_as_it_says_for_all_together(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"x" * 100_000)
    with bucket_server(tmp_path, lambda at: 1e6) as server:

        async def both() -> None:
            links = [HttpTransport(server.url, 10) for _ in range(2)]
            await asyncio.gather(*(link.get("object", 100_000) for link in links))
            for link in links:
                await link.close()

        begun = time.monotonic()
        asyncio.run(both())
        assert time.monotonic() - begun >= 0.19 and server.sent == 200_000
        server.restart()
        server.rate = lambda at: 1e9
        assert fetch(lambda: HttpTransport(server.url, 10), "object", 100_000, 30) == b"x" * 100_000


def test_traces_are_what_they_say() -> None:
    rates = {name: trace(name, 100.0, 10.0) for name in TRACES}
    assert [rates[name](at) for name in ("constant", "slower", "faster", "a sixth") for at in (0, 9)] == pytest.approx(
        [100, 100, 100, 25, 100, 400, 100 / 6, 100 / 6]
    )
    for name, mean, spread in (("wi-fi", 100, 0.31), ("congested", 77.6, 0.71)):
        seen = [rates[name](step + 0.5) for step in range(4000)]
        own = sum(seen) / len(seen)
        assert own == pytest.approx(mean, rel=0.05)
        deviation = (sum((one - own) ** 2 for one in seen) / len(seen)) ** 0.5
        assert deviation / own == pytest.approx(spread, rel=0.05)


def run_study(study: Any, asked: list[str], **loaded: Any) -> tuple[dict[str, Any], common.Rows]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path")
    study.arguments(parser)
    rows = common.Rows(say=lambda line: None)
    return study.run(parser.parse_args(asked), rows, **loaded), rows


def test_plans_are_near_the_bound_and_servers_send_what_they_say() -> None:
    asked = ["--tokens", "4096", "50000", "--balances", "0.3", "3", "--layers", "8", "--clients", "4"]
    found, rows = run_study(stream_plan, asked)
    assert len(rows.rows) == 8 and all(row["met"] is not None for row in found["must_reach"][:2])
    assert all(1 <= row["staircase_over"] <= row["meet_over"] < 1.2 for row in rows.where(tokens=4096))
    json.dumps([found, rows.rows])
    assert all(row["meet_over"] is None and "greedy_seconds" not in row for row in rows.where(tokens=50000))
    of = {row["balance"]: row["streamed_share"] for row in rows.where(tokens=50000, uneven=False)}
    assert of[0.3] > of[3] and found["greedy_over"][0] >= 1
    assert len(found["server"]) == 2 and all(0 < one["share"] < 1 for one in found["server"])


def test_what_a_chunk_takes_is_told_by_each(tmp_path: Path) -> None:
    asked = ["--tokens", "768", "--chunk", "128", "--masses", "1", "0.2", "--loads", "0", "--repeats", "2"]
    found, rows = run_study(stream_costs, [*asked, "--path", str(tmp_path)], loaded=(long_model(), Letters()))
    assert len(rows.rows) == 2 * 2 * 6 and set(found["errors"]) == {"dense", "mass 0.2"}
    assert all(set(of) == {"line", "roofline", "network"} for of in found["errors"].values())
    last = rows.where(mass=1.0, repeat=1)[-1]
    assert last["attended"] == [704] * 3 and len(last["seconds"]) == 3
    assert min(rows.where(mass=0.2, repeat=1)[-1]["attended"]) < 704


def test_what_is_fitted_is_found() -> None:
    attended = np.arange(1.0, 61) * 100
    nothing = np.zeros(60)
    cells = LayerCells(np.full(60, 1024.0), attended, attended // 1000, attended / 128, nothing)
    seconds = 0.1 + 1e-4 * attended
    network = CostNetwork(cells, seconds)
    assert np.abs(network.seconds(cells) / seconds - 1).mean() < 0.03
    roofline = Roofline(long_model())
    work, moved = roofline._parts(cells)
    roofline.fit(cells, np.maximum(work / 3e9, moved / 2e8))
    assert np.abs(roofline.seconds(cells) / np.maximum(work / 3e9, moved / 2e8) - 1).max() < 0.02


def test_requests_are_told_by_contender() -> None:
    rows = [
        {"name": name, "balance": 1.0, "seconds": seconds}
        for name, seconds in ((stream_speed.OURS, 2.0), (stream_speed.SPLIT, 3.0))
    ]
    reached = stream_requests.summary(rows)["must_reach"]
    assert reached == [common.judged("fixed split over ours, mean", 1.5, least=1.2)]


def test_what_is_busy_ends() -> None:
    with busy(0):
        pass


def test_the_fewer_bytes_are_streamed_the_more_is_lost() -> None:
    asked = ["--tokens", "300", "--samples", "1", "--steps", "4", "--facts", "0"]
    found, rows = run_study(stream_quality, asked, model=long_model(), tokenizer=Letters())
    of = found["levels"]
    assert list(of) == ["prefilled", *LEVELS] and of["prefilled"]["kl"] == of["lossless"]["kl"] == 0
    assert of["lossless"]["share"] > of["default"]["share"] > of["small"]["share"] > of["smallest"]["share"] > 0
    assert 0 < of["fine"]["kl"] < of["smallest"]["kl"] and len(rows.rows) == 6
    assert [one["measured"] for one in found["must_reach"][:2]] == [of["default"]["share"], of["default"]["kl"]]
