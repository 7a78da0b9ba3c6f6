"""A context that is put on a web server, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from long_context import CONTEXT, MORE, SIZE, ids
from long_llama import long_model
from static_server import served
from transformers import DynamicCache
from web_store import web_store

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import StoreError
from hf_offload_cache.streaming import loader


def test_a_web_server_that_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    model, folder = long_model(), tmp_path / "served"
    folder.mkdir()
    expected = DynamicCache(config=model.config)
    with served(folder) as server, DiskSwapCache(model, path=tmp_path) as cache, torch.no_grad():
        place, options = f"{server.url}/context", {"level": "lossless", "chunk_tokens": SIZE}
        model(ids()[:, :CONTEXT], past_key_values=cache)
        manifest = publish_context(cache, place, **options)
        assert len(list(folder.iterdir())) == 2 + 2 * CONTEXT // SIZE  # two of three layers
        with pytest.raises(FileExistsError):
            publish_context(cache, place, **options)
        with stream_context(place, model, ids(), path=tmp_path) as found:
            asked = [model(ids()[:, held.get_seq_length() :], past_key_values=held) for held in (found, expected)]
            own, theirs = (one.logits[:, -MORE:] for one in asked)
            torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
        server.refuses = True
        (folder / manifest.cells[0][1].name).unlink()
        with pytest.raises(StoreError, match=r"writing .*403"):
            publish_context(cache, place, **options, overwrite=True)


def test_a_chain_of_file_systems_keeps_the_query(tmp_path: Path) -> None:
    """fsspec keeps a thread and a connection for the next time, so that nothing is counted here."""
    model = long_model()
    with web_store() as store, DiskSwapCache(model, path=tmp_path) as cache, torch.no_grad():
        model(ids()[:, : 2 * SIZE], past_key_values=cache)
        publish_context(cache, f"{store.url}/ctx?sig=1", level="lossless", chunk_tokens=SIZE)
        place = f"simplecache::{store.url}/ctx?sig=1"
        with stream_context(place, model, ids()[:, : 2 * SIZE + 1], path=tmp_path) as found:
            assert found.get_seq_length() == 2 * SIZE and found.stream_report.lost == 0
        assert {one.query for one in store.asked} == {"sig=1"}
