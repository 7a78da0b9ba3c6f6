"""A published context in an object store: s3fs, and an emulation of S3 in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lanes_in_order import stream_first
from long_context import SIZE, ids, is_right, publish_short, published, streamed_short
from long_llama import long_model
from moto.server import ThreadedMotoServer
from web_store import Reply, web_store

from hf_offload_cache import stream_context
from hf_offload_cache.errors import ObjectError, StoreError
from hf_offload_cache.streaming import NAME, loader

CONTEXT, BUCKET = 256, "contexts"


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    """Of s3fs, for a store with an empty bucket."""
    import s3fs

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = {"endpoint_url": f"http://{host}:{port}", "region_name": "eu-west-1"}
    given = {"key": "nobody", "secret": "nothing", "client_kwargs": endpoint, "skip_instance_cache": True}
    try:
        s3fs.S3FileSystem(**given).makedirs(BUCKET, exist_ok=True)
        yield given
    finally:
        server.stop()


def test_an_object_store_has_it(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    stream_first(monkeypatch)
    url, given = f"s3://{BUCKET}/manual", {"tokens": ids()[:, :CONTEXT], "options": options}
    manifest = published(url, tmp_path, **given)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        published(url, tmp_path, **given)
    store = s3fs.S3FileSystem(**options)
    named = {cell.name for row in manifest.cells for cell in row if cell is not None}
    assert {path.rpartition("/")[2] for path in store.ls(f"{BUCKET}/manual")} == {NAME, manifest.fitted.name, *named}
    lost = manifest.cells[1][1]
    assert lost is not None
    store.rm(f"{BUCKET}/manual/{lost.name}")
    with stream_context(url, long_model(), ids(), path=tmp_path, options=options) as cache:
        report = cache.stream_report
        assert report is not None and (report.lost, report.computed, report.streamed) == (1, 1, report.cells - 1)
        is_right(cache)
    with pytest.raises(StoreError, match="no published context"):
        stream_context(f"s3://{BUCKET}/other", long_model(), ids(), path=tmp_path, options=options)


@pytest.mark.parametrize(("status", "answer"), [(403, "refused"), (400, "refused"), (500, "later"), (503, "later")])
def test_a_bucket_that_does_not_say_is_not_empty(
    status: int, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, whatever s3fs makes of the status; and where the name of a listing may not be asked for."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with web_store() as store:
        store.reply = lambda asked: Reply(status)
        given = {
            "key": "nobody", "secret": "nothing", "skip_instance_cache": True,
            "client_kwargs": {"endpoint_url": store.url, "region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"total_max_attempts": 1}},
        }  # fmt: skip
        for ask in (publish_short, streamed_short):
            with pytest.raises(ObjectError, match=r"stream\.json") as caught:
                ask(f"s3://{BUCKET}/manual", tmp_path, options=given)
            assert caught.value.answer == answer and store.asked and not store.of("PUT")


@pytest.mark.parametrize("url", [f"s3://{BUCKET}/a?b=1", f"s3://{BUCKET}/a#b/", f"s3://{BUCKET}/a%20b"])
def test_a_key_may_have_any_letter(url: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A question mark begins no query there."""
    import s3fs

    publish_short(url, tmp_path, options=options)
    folder = url.removeprefix("s3://").rstrip("/")
    assert f"{folder}/{NAME}" in s3fs.S3FileSystem(**options).ls(folder)
    assert streamed_short(url, tmp_path, options=options).lost == 0


def test_a_chain_of_file_systems_keeps_the_query(tmp_path: Path) -> None:
    """fsspec keeps a thread and a connection for the next time, so that nothing is counted here."""
    with web_store() as store:
        publish_short(f"{store.url}/ctx?sig=1", tmp_path)
        assert streamed_short(f"simplecache::{store.url}/ctx?sig=1", tmp_path).lost == 0
        assert {one.query for one in store.asked} == {"sig=1"}
