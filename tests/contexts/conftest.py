"""What no test of contexts may leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) == before


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """No thread and no descriptor, beside the small model's."""
    from nothing_left import no_threads_and_descriptors
    from small_contexts import model

    model()
    with no_threads_and_descriptors():
        yield


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of `saved_contexts`, which no test changes."""
    from saved_contexts import prefilled

    folder = tmp_path_factory.mktemp("once") / "context"
    with prefilled() as cache:
        cache.save(folder)
    return folder
