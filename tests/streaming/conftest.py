"""A published context, which is made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_context import published, short_forwards


@pytest.fixture(scope="session")
def published_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    published(folder / "published", folder)
    return folder / "published"


@pytest.fixture
def place(published_once: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(published_once, tmp_path / "published"))


@pytest.fixture
def one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with short_forwards(monkeypatch):
        yield
