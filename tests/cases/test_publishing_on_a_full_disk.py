"""Cases b3 and s2: publishing onto a disk that is full, and publishing that is killed. What was published stays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from long_llama import long_model

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import StoreError

pytestmark = pytest.mark.slow
NAME, TOKENS = "stream.json", 2048
KILLS = 12


def ids(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, 90, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))[:, : length + 1]


def prefilled(folder: Path, length: int = TOKENS) -> Any:
    cache = DiskSwapCache(long_model(), path=folder)
    with torch.no_grad():
        long_model()(ids(length)[:, :length], past_key_values=cache)
    return cache


def streams(place: Path, folder: Path, length: int) -> None:
    with stream_context(place, long_model(), ids(length), path=folder) as cache:
        assert cache.get_seq_length() == length and cache.stream_report.lost == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own: needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(folder: Path, leave: int = 0) -> None:
    """Take all of the disk but `leave` bytes."""
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(folder / "filler", max(0, (folder / "filler").stat().st_size - leave))


@pytest.mark.parametrize("pages", [0, 1, 4, 64])
@pytest.mark.parametrize("temporary", ["elsewhere", "there"])
def test_a_full_disk_leaves_the_old_publication(
    temporary: str, pages: int, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much room there still is, and wherever the temporary folder lies."""
    with prefilled(tmp_path, 256) as old, prefilled(tmp_path) as new:
        if temporary == "there":
            (small_disk / "tmp").mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(small_disk / "tmp"))
        publish_context(old, small_disk / "pub", level="lossless", chunk_tokens=64)
        before = (small_disk / "pub" / NAME).read_bytes()
        fill(small_disk, pages * 4096)
        with pytest.raises(StoreError):
            publish_context(new, small_disk / "pub", level="lossless", chunk_tokens=64, overwrite=True)
    (small_disk / "filler").unlink()
    assert (small_disk / "pub" / NAME).read_bytes() == before
    assert temporary == "elsewhere" or not list((small_disk / "tmp").iterdir())
    streams(small_disk / "pub", tmp_path, 256)


PROGRAM = """
import os, sys
from pathlib import Path
import torch
from long_llama import long_model
from hf_offload_cache import DiskSwapCache, publish_context
torch.set_num_threads(1)
ids, folder, place = torch.load(sys.argv[1]), sys.argv[2], sys.argv[3]
long_model()
for _ in sys.stdin:  # a line is a wish for one more process that publishes until it is killed
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    cache = DiskSwapCache(long_model(), path=folder)
    with torch.no_grad():
        long_model()(ids, past_key_values=cache)
    print(os.getpid(), flush=True)
    while True:
        publish_context(cache, place, level="lossless", chunk_tokens=64, overwrite=True)
        for path in Path(place).iterdir():
            if path.name != "stream.json":
                path.unlink()
"""


def test_kills_leave_a_publication_whole(tmp_path: Path) -> None:
    """Killed at random moments: each object has the bytes of its name, and the manifest is complete."""
    place, draw = tmp_path / "pub", random.Random(3)
    with prefilled(tmp_path) as cache:
        publish_context(cache, place, level="lossless", chunk_tokens=64)
    torch.save(ids()[:, :TOKENS], tmp_path / "ids")
    root = Path(__file__).parents[2]
    paths = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "ids"), str(tmp_path), str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **paths},
    ) as parent:  # fmt: skip
        assert parent.stdin is not None and parent.stdout is not None
        for _ in range(KILLS):
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(draw.random() * 0.5)
            os.kill(child, signal.SIGKILL)
            assert json.loads((place / NAME).read_text())["tokens"] == TOKENS
            objects = [path for path in place.iterdir() if len(path.name) == 40]
            assert all(hashlib.blake2b(path.read_bytes(), digest_size=20).hexdigest() == path.name for path in objects)
        parent.stdin.close()
    with prefilled(tmp_path) as cache:
        publish_context(cache, place, level="lossless", chunk_tokens=64, overwrite=True)
    streams(place, tmp_path, TOKENS)
