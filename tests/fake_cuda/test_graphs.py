"""CUDA graphs on a device that only counts: what a capture forbids, and what a replay does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import CUDA, Fake, fake_cuda, values_of


def on_the_device(*numbers: float) -> Any:
    return Fake(torch.tensor(numbers, dtype=torch.float32))


FORBIDDEN: dict[str, Callable[[Any], object]] = {
    "a value": lambda one: one.sum().item(),
    "a truth": lambda one: bool(one.any()),
    "a copy to the host": lambda one: one.cpu(),
    "numbers": lambda one: one.tolist(),
    "a size that depends on values": lambda one: one.nonzero(),
    "a mask": lambda one: one[one > 1],
    "memory that is not pinned": lambda one: one.copy_(torch.ones(2)),
    "a new tensor of the host's numbers": lambda one: torch.tensor([1.0], device=CUDA),
    "a host's index": lambda one: one[torch.tensor([0])],
    "pinned memory": lambda one: torch.ones(2).pin_memory(),
    "new pinned memory": lambda one: torch.empty(2, pin_memory=True),
    "a stream": lambda one: torch.cuda.current_stream().synchronize(),
    "the device": lambda one: torch.cuda.synchronize(),
    "an event": lambda one: torch.cuda.current_stream().record_event().synchronize(),
    "work of another stream": lambda one: on_another_stream(one, forks=False),
    "a stream that does not join": lambda one: on_another_stream(one, joins=False),
    "an event from before": lambda one: torch.cuda.current_stream().wait_event(BEFORE[0]),
    "an unknown generator": lambda one: torch.bernoulli(one),
}
BEFORE: list[Any] = []


def on_another_stream(one: Any, forks: bool = True, joins: bool = True) -> Any:
    stream, own = torch.cuda.Stream(), torch.cuda.current_stream()
    if forks:
        stream.wait_stream(own)
    with torch.cuda.stream(stream):
        made = one + 1
    if joins:
        own.wait_stream(stream)
    return made


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("seed", [None, 0])
def test_a_capture_forbids(what: str, seed: int | None) -> None:
    with fake_cuda(seed):
        one, graph = on_the_device(1, 2), torch.cuda.CUDAGraph()
        BEFORE[:] = [torch.cuda.current_stream().record_event()]
        with pytest.raises(RuntimeError), torch.cuda.graph(graph):
            FORBIDDEN[what](one)
        assert not torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="without a capture"):
            graph.replay()


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_replay_runs_what_was_recorded_on_the_same_memory(seed: int | None) -> None:
    with fake_cuda(seed) as counts:
        one, total, graph = on_the_device(1, 2), on_the_device(0, 0), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            zeros = torch.zeros(2, device=CUDA)
            zeros.add_(one)
            result = on_another_stream(zeros) * 2
            total.add_(torch.cat([result, one])[:2])
        counts.clear()
        assert values_of(total).tolist() == [0, 0]
        for times in (1, 2, 3):
            one.copy_(on_the_device(times, 2))
            graph.replay()
            assert values_of(result).tolist() == [2 * times + 2, 6]
        assert values_of(total).tolist() == [18, 18] and counts.launches.total() == 6 and not counts.syncs


def test_an_event_of_a_capture_is_not_waited_for_outside_it() -> None:
    with fake_cuda():
        one = on_the_device(1, 2)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.mul_(2)
            event = torch.cuda.current_stream().record_event()
        with pytest.raises(RuntimeError, match="outside"):
            torch.cuda.current_stream().wait_event(event)
        with pytest.raises(RuntimeError, match="outside"):
            event.synchronize()


def test_a_replay_needs_the_memory_of_its_capture() -> None:
    with fake_cuda():
        held = [on_the_device(1, 2), on_the_device(3, 4)]
        for place, kept in itertools.product(range(2), (True, False)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held[place].mul_(2)
            if kept:
                graph.replay()
                continue
            held[place] = on_the_device(5, 6)
            with pytest.raises(RuntimeError, match="freed"):
                graph.replay()
