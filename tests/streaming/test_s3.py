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

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import StoreError
from hf_offload_cache.streaming import loader
from hf_offload_cache.streaming.stream_manifest import NAME

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
        s3fs.S3FileSystem(**given).mkdir(BUCKET)
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
