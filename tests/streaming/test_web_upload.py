"""A context that is put on a web server, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from long_context import CONTEXT, MORE, SIZE, ids
from long_llama import long_model
from static_server import served
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import StoreError
from hf_offload_cache.streaming import loader


def test_a_web_server_that_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec keeps a thread and a connection for the next time, so that nothing is counted here."""
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
