"""A published context behind a web server that knows nothing of it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import prompt
from lanes_in_order import stream_first
from long_llama import long_model
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import StoreError
from hf_offload_cache.streaming import loader

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
CONTEXT, SIZE = 512, 64

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder that is served, and its URL."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, own = tmp_path / "served", tmp_path / "nginx"
    folder.mkdir()
    own.mkdir()
    places = "".join(f"{name}_temp_path {own}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = own / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {own}/pid; error_log {own}/error.log; events {{}} "
        f"http {{ access_log off; {places} server {{ listen 127.0.0.1:{port}; location / {{ root {folder}; }} }} }}"
    )
    process = subprocess.Popen([NGINX, "-e", f"{own}/error.log", "-c", str(config)])
    try:
        for _ in range(200):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield folder, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def test_nginx_serves_it(server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    stream_first(monkeypatch)
    folder, url = server
    model, ids = long_model(), prompt(long_model(), 1, CONTEXT + 30)
    with DiskSwapCache(model, path=tmp_path) as cache:
        with torch.no_grad():
            model(ids[:, :CONTEXT], past_key_values=cache)
        publish_context(cache, str(folder / "manual"), level="lossless", chunk_tokens=SIZE)
    with stream_context(f"{url}/manual", model, ids, path=tmp_path) as cache:
        report = cache.stream_report
        assert report is not None and not report.trouble and report.streamed == report.cells
        with torch.no_grad():
            found = model(ids[:, CONTEXT:], past_key_values=cache).logits
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, CONTEXT:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(StoreError, match="404"):
        stream_context(f"{url}/nowhere", model, ids, path=tmp_path)
