"""What this machine has free: memory and disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import StoreError

SPARE_DESCRIPTORS = 8
"""Left for others beyond what a cache needs for good: a trace, a saved context being written, a file being probed."""


def free_memory(device: str = "cpu") -> int | None:
    """Bytes that a new allocation on `device` ("cpu", "cuda", "cuda:1") may take now; None where nobody tells.

    For the host: what the kernel says is available, and no more than the control group of this process allows.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    known = [free for free in (_available(), _control_group()) if free is not None]
    return min(known) if known else None


def free_disk(place: str | os.PathLike[str] | int) -> int | None:
    """Bytes that this user may still write to the disk of `place`, an existing path or an open descriptor.

    None if the file system does not tell, or a sandbox does not allow the question.
    """
    try:
        disk = os.fstatvfs(place) if isinstance(place, int) else os.statvfs(place)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        return None
    return None if disk.f_blocks == 0 else disk.f_bavail * disk.f_frsize


def free_descriptors() -> int | None:
    """Descriptors that this process may still open; None where nobody tells, or without a limit."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd")) - 1  # one to list them
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - used


def check_descriptors(needed: int) -> None:
    """Raises `StoreError` (EMFILE) when this process may not open `needed` descriptors and `SPARE_DESCRIPTORS` more."""
    free = free_descriptors()
    if free is not None and free < needed + SPARE_DESCRIPTORS:
        raise StoreError(
            errno.EMFILE,
            f"the cache needs {needed} descriptors, one for each store of a layer and each file of a context, and "
            f"{SPARE_DESCRIPTORS} to spare; {max(0, free)} are left of this process's limit: raise the limit with "
            "`ulimit -n`, or close some",
        )


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the limit of this control group (version 2) leaves; None without a limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdecimal() else None
