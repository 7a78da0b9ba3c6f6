"""The tiny model of the pages' blocks, and a folder with a context of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from page_model import save_tiny, session_of

from hf_offload_cache import DiskSwapCache


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as a hub gives it."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def session(folder: Path) -> dict[str, Any]:
    """What the quickstart's first block leaves."""
    return session_of(folder)


@pytest.fixture
def saved(session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the context that pages name `contexts/manual`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contexts").mkdir()
    with DiskSwapCache(session["model"]) as cache, torch.no_grad():
        session["model"](session["inputs"].input_ids[:, :600], past_key_values=cache)
        cache.save("contexts/manual")
    return tmp_path
