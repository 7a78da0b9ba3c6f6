"""What a machine has free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_offload_cache.memory import free_disk, free_memory, machine


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


def made_groups(root: Path, process: str, files: dict[str, int | str]) -> Path:
    """A file system in which this process is in the groups of `process`, lines of /proc/self/cgroup."""
    for name, value in {"proc/self/cgroup": process, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"a/b/memory.max": "max", "a/b/memory.current": 300}, None),
        ({"a/b/memory.max": 1000, "a/b/memory.current": 300}, 700),
        ({"a/b/memory.max": 200, "a/b/memory.current": 300}, 0),
        ({"a/b/memory.max": 1000, "a/b/memory.current": 300, "a/memory.max": 2000, "a/memory.current": 1900}, 100),
        ({"a/b/memory.max": "max", "a/b/memory.current": 300, "a/memory.max": 2000, "a/memory.current": 1500}, 500),
        ({"memory.max": 600, "memory.current": 300}, 300),  # a container's own group is the mount
        ({"a/b/memory.max": 1000}, None),
        ({"b/memory.max": 1000, "b/memory.current": 300}, None),  # another group
    ],
)  # fmt: skip
def test_each_control_group_up_to_the_root_counts(files: dict[str, Any], left: int | None, tmp_path: Path) -> None:
    assert machine._control_groups(made_groups(tmp_path, "0::/a/b", files)) == left


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    none = 0x7FFFFFFFFFFFF000
    files = {
        "memory/a/b/memory.limit_in_bytes": none, "memory/a/b/memory.usage_in_bytes": 300,
        "memory/a/memory.limit_in_bytes": 1000, "memory/a/memory.usage_in_bytes": 400,
    }  # fmt: skip
    process = "9:name=systemd:/a\n4:cpu,memory:/a/b\n1:cpu:/\n0::/"
    assert machine._control_groups(made_groups(tmp_path, process, files)) == 600


def test_control_groups_without_proc(tmp_path: Path) -> None:
    assert machine._control_groups(tmp_path) is None
    made_groups(tmp_path, "", {"memory.max": 1000, "memory.current": 300})
    (tmp_path / "proc/self/cgroup").unlink()
    assert machine._control_groups(tmp_path) == 700


def test_free_memory_is_the_least_that_anybody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total
    for available, group, least in ((900, 700, 700), (600, 700, 600), (600, None, 600), (None, 700, 700)):
        monkeypatch.setattr(machine, "_available", lambda told=available: told)
        monkeypatch.setattr(machine, "_control_groups", lambda told=group: told)
        assert free_memory() == least


def test_free_memory_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refused)
    monkeypatch.setattr(machine, "_control_groups", lambda: None)
    assert free_memory() is None
