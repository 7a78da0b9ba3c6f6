"""A published context in an object store: s3fs, and an emulation of S3 in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import prompt
from lanes_in_order import stream_first
from long_llama import long_model
from moto.server import ThreadedMotoServer
from transformers import DynamicCache
from web_store import Reply, web_store

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import ObjectError, StoreError
from hf_offload_cache.streaming import NAME, loader

CONTEXT, SIZE, BUCKET = 256, 64, "contexts"


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


def test_an_object_store_has_it(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    stream_first(monkeypatch)
    model, ids, url = long_model(), prompt(long_model(), 1, CONTEXT + 30), f"s3://{BUCKET}/manual"
    with DiskSwapCache(model, path=tmp_path) as cache:
        with torch.no_grad():
            model(ids[:, :CONTEXT], past_key_values=cache)
        manifest = publish_context(cache, url, level="lossless", chunk_tokens=SIZE, options=options)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            publish_context(cache, url, chunk_tokens=SIZE, options=options)
    store = s3fs.S3FileSystem(**options)
    named = {cell.name for row in manifest.cells for cell in row if cell is not None}
    assert {path.rpartition("/")[2] for path in store.ls(f"{BUCKET}/manual")} == {NAME, manifest.learnt.name, *named}
    lost = manifest.cells[1][1]
    assert lost is not None
    store.rm(f"{BUCKET}/manual/{lost.name}")
    with stream_context(url, model, ids, path=tmp_path, options=options) as cache:
        report = cache.stream_report
        assert report is not None and (report.lost, report.computed, report.streamed) == (1, 1, report.cells - 1)
        with torch.no_grad():
            found = model(ids[:, CONTEXT:], past_key_values=cache).logits
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, CONTEXT:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(StoreError, match="no published context"):
        stream_context(f"s3://{BUCKET}/other", model, ids, path=tmp_path, options=options)


@pytest.mark.parametrize(("status", "answer"), [(403, "refused"), (400, "refused"), (500, "later"), (503, "later")])
def test_a_bucket_that_does_not_say_is_not_empty(
    status: int, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, whatever s3fs makes of the status; and where the name of a listing may not be asked for."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    model, ids = long_model(), prompt(long_model(), 1, 80)
    with web_store() as store, DiskSwapCache(model, path=tmp_path) as cache, torch.no_grad():
        store.reply = lambda asked: Reply(status)
        given = {
            "key": "nobody", "secret": "nothing", "skip_instance_cache": True,
            "client_kwargs": {"endpoint_url": store.url, "region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"total_max_attempts": 1}},
        }  # fmt: skip
        model(ids, past_key_values=cache)
        with pytest.raises(ObjectError, match=r"reading stream\.json") as caught:
            publish_context(cache, f"s3://{BUCKET}/manual", chunk_tokens=SIZE, options=given)
        assert caught.value.answer == answer and store.asked and not store.of("PUT")
        with pytest.raises(ObjectError) as caught:
            stream_context(f"s3://{BUCKET}/manual", model, ids, path=tmp_path, options=given)
        assert caught.value.answer == answer


@pytest.mark.parametrize("url", [f"s3://{BUCKET}/a?b=1", f"s3://{BUCKET}/a#b/", f"s3://{BUCKET}/a%20b"])
def test_a_key_may_have_any_letter(url: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A question mark begins no query there."""
    import s3fs

    model, ids = long_model(), prompt(long_model(), 1, 80)
    with DiskSwapCache(model, path=tmp_path) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        publish_context(cache, url, level="lossless", chunk_tokens=SIZE, options=options)
    folder = url.removeprefix("s3://").rstrip("/")
    assert f"{folder}/{NAME}" in s3fs.S3FileSystem(**options).ls(folder)
    with stream_context(url, model, torch.cat([ids, ids[:, :2]], 1), path=tmp_path, options=options) as cache:
        assert cache.tokens == 80 and cache.stream_report.lost == 0
