"""Nothing of these tests goes into the real home: what the console keeps, it keeps in a folder that pytest removes."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`$XDG_CACHE_HOME`, one for all tests, so that the default model is unpacked once."""
    folder = tmp_path_factory.mktemp("xdg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
