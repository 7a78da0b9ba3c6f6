"""A published context in a repository of the Hub, which is emulated in this process; its client is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub import REPOSITORY, Hub, hub
from lanes_in_order import stream_first
from long_context import SIZE, ids, is_right, published
from long_llama import long_model

from hf_offload_cache import stream_context
from hf_offload_cache.errors import StoreError
from hf_offload_cache.streaming import NAME, loader
from hf_offload_cache.streaming import objects as hub_commits

CONTEXT, URL = 256, f"hf://{REPOSITORY}/contexts/manual"


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """No hub but this one is asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    with hub() as found:
        yield found


def options(repository: Hub) -> dict[str, Any]:
    return {"endpoint": repository.url, "token": "nobody's", "skip_instance_cache": True}


def publish(repository: Hub, tmp_path: Path, url: str = URL, **more: Any) -> Any:
    return published(url, tmp_path, tokens=ids()[:, :CONTEXT], **{"options": options(repository), **more})


def test_a_repository_has_it_in_two_commits(repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all objects, and behind it the manifest's; and again none of those that are there."""
    stream_first(monkeypatch)
    manifest = publish(repository, tmp_path)
    objects, last = repository.commits
    named = {cell.name for row in manifest.cells for cell in row if cell is not None} | {manifest.fitted.name}
    assert sorted(objects) == sorted(f"contexts/manual/{name}" for name in named)
    assert last == [f"contexts/manual/{NAME}"]
    with stream_context(URL, long_model(), ids(), path=tmp_path, options=options(repository)) as cache:
        report = cache.stream_report
        assert report is not None and not report.trouble and report.streamed == report.cells
        is_right(cache)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        publish(repository, tmp_path)
    publish(repository, tmp_path, overwrite=True)
    assert repository.commits[2:] == [last]


def test_a_commit_has_so_many_files_and_bytes(repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_commits, "_FILES", 4)
    manifest = publish(repository, tmp_path)
    count = 1 + sum(cell is not None for row in manifest.cells for cell in row)
    assert [len(commit) for commit in repository.commits] == [4] * (count // 4) + [count % 4] * (count % 4 > 0) + [1]
    repository.files.clear()
    repository.commits.clear()
    monkeypatch.setattr(hub_commits, "_BYTES", 1)
    publish(repository, tmp_path)
    assert [len(commit) for commit in repository.commits] == [1] * (count + 1)


def test_a_hub_that_refuses_is_named_and_nothing_is_half_there(
    repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # its client tries again, later and later
    repository.refuses = True
    with pytest.raises(StoreError, match=rf"{URL}: writing"):
        publish(repository, tmp_path)
    assert not repository.files
    repository.refuses = False
    publish(repository, tmp_path)
    assert f"contexts/manual/{NAME}" in repository.files


@pytest.mark.parametrize("status", [401, 500])
def test_a_hub_that_tells_nothing_is_not_taken_for_an_empty_one(
    status: int, repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(repository, tmp_path)
    before = dict(repository.files)
    repository.answers = status
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(StoreError, match=r"reading stream\.json"):
        publish(repository, tmp_path)
    assert repository.files == before


def test_what_others_have_removed_is_put_there_again(repository: Hub, tmp_path: Path) -> None:
    """fsspec keeps what a folder had when it was last looked at."""
    kept = {"endpoint": repository.url, "token": "nobody's"}
    manifest = publish(repository, tmp_path, options=kept)
    with stream_context(URL, long_model(), ids(), path=tmp_path, options=kept):
        pass
    lost = f"contexts/manual/{manifest.cells[1][1].name}"
    del repository.files[lost]
    publish(repository, tmp_path, options=kept, overwrite=True)
    assert lost in repository.files


def test_a_repository_that_there_is_not_is_named(repository: Hub, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="hf://someone/other: reaching it"):
        publish(repository, tmp_path, "hf://someone/other")
