"""Steps of `SpecCache` are topped up where the store is fast enough."""

from __future__ import annotations

import contextlib
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import prompt
from long_llama import LENGTH, long_model
from spec_fields import SMALL

from hf_offload_cache import SpecCache
from hf_offload_cache.methods.spec import TRIED, TopUp
from hf_offload_cache.methods.spec import layer as spec_top_up


def after(asked: bool | str, reads: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[TopUp, list[str | None]]:
    """Steps of one second beside what they read."""
    now = 0.0
    monkeypatch.setattr(spec_top_up, "time", types.SimpleNamespace(perf_counter=lambda: now))
    top_up, said = TopUp(asked), []
    for read in reads:
        with top_up.reading(torch.device("cpu")):
            now += read
        said.append(top_up.end_step(1 + read))
    return top_up, said


def test_a_store_that_takes_longer_than_the_rest_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    top_up, said = after(True, [1.5] * TRIED, monkeypatch)
    assert not top_up.on and said[:-1] == [None] * (TRIED - 1)
    assert "took 1500 ms a step, the rest of the step 1000 ms" in str(said[-1])


@pytest.mark.parametrize(
    ("asked", "reads"),
    [(True, [1.0] * 20), (True, [5.0] + [0.4] * 20), (True, [0.0, 9.0] + [0.0] * 20), ("always", [9.0] * 20)],
    ids=["as long", "one outlier", "few reads", "always"],
)
def test_others_are(asked: bool | str, reads: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    top_up, said = after(asked, reads, monkeypatch)
    assert top_up.on and said == [None] * len(reads)


def test_what_is_not_asked_for_is_off() -> None:
    assert not TopUp(False).on and TopUp(True).on and TopUp("always").on


@pytest.mark.parametrize("asked", [True, "always"])
def test_a_slow_store(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, model, topped = TopUp.reading, long_model(), list[bool]()

    @contextlib.contextmanager
    def slow(top_up: TopUp, device: torch.device) -> Iterator[None]:
        with reading(top_up, device):
            yield
            time.sleep(0.1)

    monkeypatch.setattr(TopUp, "reading", slow)
    fields = {"num_selected": 20, "top_up": asked, **SMALL}
    with warnings.catch_warnings(record=True) as said, SpecCache(model, **fields) as cache:
        warnings.simplefilter("always")
        top_up = cache.layers[0].top_up
        ids = prompt(model, 1, LENGTH)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for step in range(TRIED + 4):
                model(ids[:, step : step + 1], past_key_values=cache)
                topped.append(top_up.on)
        told = [str(one.message) for one in said if "topped up no more" in str(one.message)]
        assert cache.warnings == told
    if asked == "always":
        assert all(topped) and not told
    else:
        assert topped[0] and not topped[-1] and len(told) == 1
