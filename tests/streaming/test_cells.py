"""The claim table: who brings which cell, and what happens to what both wanted."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hf_offload_cache.streaming import Cells, State


def test_streaming_comes_from_the_end_and_never_for_the_first_layer() -> None:
    cells = Cells(np.ones((2, 3), dtype=bool))
    assert [cells.claim() for _ in range(5)] == [(1, 2), (1, 1), (0, 2), (0, 1), None]


def test_what_a_plan_prefers_comes_first() -> None:
    cells = Cells(np.ones((3, 3), dtype=bool))
    cells.prefer(1, np.array([2, 1]))
    assert [cells.claim() for _ in range(6)] == [(2, 2), (2, 1), (1, 2), (0, 2), (0, 1), (1, 1)]


def test_computing_ends_where_all_above_comes() -> None:
    cancelled: list[tuple[int, int]] = []
    cells = Cells(np.ones((1, 5), dtype=bool))
    cells.cancel = cancelled.append
    assert cells.claim() == (0, 4) and cells.goes_on(0, 1, 0)
    assert cells.claim() == (0, 3) and cells.goes_on(0, 1, 1)  # layer 2 comes from nobody else
    assert not cells.goes_on(0, 1, 2) and cells.claim() is None
    assert not cells.goes_on(0, 1, 3) and cancelled == [(0, 3)]
    assert not cells.received((0, 3)) and cells.received((0, 4))
    assert cells.wait(0, 3, 0, 0)
    assert (cells.counts.computed, cells.counts.cancelled, cells.counts.streamed) == (3, 1, 1)


def test_what_is_coming_is_told() -> None:
    cells = Cells(np.ones((2, 4), dtype=bool))
    assert [cells.claim() for _ in range(4)] == [(1, 3), (1, 2), (1, 1), (0, 3)]
    cells.received((1, 2))
    assert cells.coming(0, 2, 0) == [(0, 3), (1, 1), (1, 3)] and cells.coming(1, 2, 1) == [(1, 3)]


def test_what_was_not_published_is_computed() -> None:
    published = np.ones((2, 4), dtype=bool)
    published[1, 2] = False
    cells = Cells(published)
    assert cells.claim() == (1, 3) and cells.claim() == (1, 1)
    assert not cells.comes(1) and cells.goes_on(1, 2, 0) and cells.goes_on(1, 2, 1) and not cells.goes_on(1, 2, 2)


def test_what_comes_too_late_is_computed() -> None:
    cancelled: list[tuple[int, int]] = []
    cells = Cells(np.ones((1, 3), dtype=bool))
    cells.cancel = cancelled.append
    cells.claim(), cells.claim()
    cells.received((0, 2))
    assert not cells.wait(0, 0, 0.05, 10) and cancelled == [(0, 1)]
    assert cells.goes_on(0, 1, 0) and not cells.goes_on(0, 1, 1)
    assert cells.counts.stolen == 1 and cells.of_state() == {State.COMPUTED: 1, State.RECEIVED: 1}


def test_one_layer_of_a_chunk_is_waited_for_alone() -> None:
    cells = Cells(np.ones((1, 4), dtype=bool))
    assert [cells.claim() for _ in range(2)] == [(0, 3), (0, 2)]
    cells.received((0, 3))
    assert cells.wait(0, 2, 0, 0, below=4) and not cells.wait(0, 1, 0, 0, below=3)
    assert cells.counts.stolen == 1 and cells.of_state() == {State.RECEIVED: 1, State.LOST: 1, State.FREE: 1}


@pytest.mark.parametrize("migrations", [None, 0, 5])
def test_what_nobody_has_asked_for_is_waited_for_no_longer_than_it_takes_to_compute(migrations: int | None) -> None:
    """There is no transfer to be given up."""
    cells, begun = Cells(np.ones((1, 3), dtype=bool), migrations=migrations), time.monotonic()
    assert not cells.wait(0, 1, 0.05, 30, asked=False, below=3) and time.monotonic() - begun < 10


def test_no_more_migrate_in_a_stage_than_may() -> None:
    """One in .2 seconds: the second chunk that is late is waited for until the first one's stage is over."""
    cancelled: list[tuple[int, int]] = []
    cells = Cells(np.ones((3, 2), dtype=bool), migrations=1, stage=0.2)
    cells.cancel = cancelled.append
    assert [cells.claim() for _ in range(3)] == [(2, 1), (1, 1), (0, 1)]
    begun = time.monotonic()
    assert not cells.wait(0, 0, 0, 30) and not cells.wait(1, 0, 0, 30)
    assert time.monotonic() - begun >= 0.2 and cancelled == [(0, 1), (1, 1)]
    cells.goes_on(2, 3, 1)  # computed before another stage is over: its transfer goes on, for nothing
    assert len(cancelled) == 2 and not cells.received((2, 1)) and cells.counts.cancelled == 0


def test_none_migrates_where_none_may_but_silence_ends_it() -> None:
    cells = Cells(np.ones((1, 2), dtype=bool), migrations=0)
    cells.claim()
    begun = time.monotonic()
    assert not cells.wait(0, 0, 0, 0.1) and 0.1 <= time.monotonic() - begun < 10


def test_waiting_ends_when_it_comes_or_cannot() -> None:
    cells = Cells(np.ones((2, 2), dtype=bool))
    assert cells.claim() == (1, 1) and cells.claim() == (0, 1)

    def bring() -> None:
        time.sleep(0.05)
        cells.received((1, 1))
        cells.lose((0, 1))

    thread = threading.Thread(target=bring)
    thread.start()
    assert cells.wait(1, 0, 30, 30) and not cells.wait(0, 0, 30, 30)
    thread.join()
    assert cells.counts.lost == 1 and not cells.open


def test_what_failed_may_be_asked_for_again() -> None:
    cells = Cells(np.ones((1, 2), dtype=bool))
    assert cells.claim() == (0, 1)
    cells.lose((0, 1), again=True)
    assert cells.claim() == (0, 1)
    cells.stop()
    assert cells.claim() is None and not cells.received((0, 1)) and cells.goes_on(0, 1, 0)


def test_what_is_not_worth_computing_comes_from_the_front() -> None:
    cells = Cells(np.ones((2, 3), dtype=bool))
    cells.from_the_front = True
    assert [cells.claim() for _ in range(5)] == [(0, 1), (0, 2), (1, 1), (1, 2), None]


def test_what_is_free_is_waited_for_where_that_is_asked() -> None:
    cells = Cells(np.ones((1, 3), dtype=bool))
    assert not cells.wait(0, 0, 5, 5)

    def bring() -> None:
        while (cell := cells.claim()) is not None:
            time.sleep(0.05)
            cells.received(cell)

    thread = threading.Thread(target=bring)
    thread.start()
    assert cells.wait(0, 0, 5, 5, asked=False)
    thread.join()
    cells.distrust()
    assert not cells.here(0) and (cells.counts.streamed, cells.counts.lost) == (0, 2)
