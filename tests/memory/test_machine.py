"""What a machine has free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_offload_cache.memory import free_disk


def test_free_disk_is_what_this_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is kept for root; the same by path and by descriptor; and None where a file system does not tell."""
    there = list(os.statvfs(tmp_path))
    there[1:5] = [4096, 1000, 300, 200]  # fragment, blocks, free, free for this user
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(there))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(there))
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert free_disk(tmp_path) == free_disk(fd) == 200 * 4096
        there[2] = 0
        assert free_disk(tmp_path) is None and free_disk(fd) is None
    finally:
        os.close(fd)
