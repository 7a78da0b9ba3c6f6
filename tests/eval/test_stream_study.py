"""The study of streaming: who computes and streams what, and a link that has the rate that is asked for."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import pytest
from letters import Letters
from long_llama import long_model

from eval.bucket_server import TRACES, bucket_server, trace
from eval.studies import common, stream_speed
from hf_offload_cache.streaming import loader
from hf_offload_cache.streaming.transport import HttpTransport, fetch


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
