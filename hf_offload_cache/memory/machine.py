"""Free memory, disk and descriptors of this machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import StoreError

SPARE_DESCRIPTORS = 8
"""Left for temporary use: a trace, a saved context being written, a file being probed."""


def free_memory(device: str = "cpu") -> int | None:
    """Bytes that a new allocation on `device` ("cpu", "cuda", "cuda:1") can take now; None if the system does not tell.

    For the host: the available memory, limited by this process's control groups.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    known = [free for free in (_available(), _control_groups()) if free is not None]
    return min(known) if known else None


def free_disk(place: str | os.PathLike[str] | int) -> int | None:
    """Bytes that this user can still write to the disk of `place`, an existing path or an open descriptor.

    None if the file system does not tell, or a sandbox forbids the call.
    """
    try:
        disk = os.fstatvfs(place) if isinstance(place, int) else os.statvfs(place)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        return None
    return None if disk.f_blocks == 0 else disk.f_bavail * disk.f_frsize


def free_descriptors() -> int | None:
    """Descriptors that this process can still open; None without a limit, or if the system does not tell."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd")) - 1  # one to list them
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - used


def check_descriptors(needed: int) -> None:
    """Raise `StoreError` (EMFILE) unless this process can open `needed` descriptors and `SPARE_DESCRIPTORS` more."""
    free = free_descriptors()
    if free is not None and free < needed + SPARE_DESCRIPTORS:
        raise StoreError(
            errno.EMFILE,
            f"the cache needs {needed} descriptors, one for each store of a layer and each file of a context, and "
            f"{SPARE_DESCRIPTORS} to spare; this process can open only {max(0, free)} more: raise the limit with "
            "`ulimit -n`, or close some",
        )


def _available() -> int | None:
    import psutil

    try:
        return psutil.virtual_memory().available
    except (OSError, psutil.Error):  # a sandbox without /proc
        return None


def _control_groups(root: Path = Path("/")) -> int | None:
    """Bytes that this process's control groups leave, in version 1 or 2; None without a limit.

    The limits of the groups above also bind a group, so every level up to the mount is read. A container may see its
    own group as the mount, under a path that exists only outside; the mount itself is always read.
    """
    mount = root / "sys/fs/cgroup"
    left = []
    for controllers, path in _groups_of_this_process(root):
        top = mount / "memory" if controllers else mount
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(top):
                left.append(_left_in(level / names[0], level / names[1]))
    return min((free for free in left if free is not None), default=None)


def _groups_of_this_process(root: Path) -> list[tuple[str, str]]:
    """The groups that limit memory, as pairs of controllers ("" in version 2) and path."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [("", "/"), ("memory", "/")]
    groups = [(parts[1], parts[2]) for parts in (line.split(":", 2) for line in lines) if len(parts) == 3]
    return [group for group in groups if not group[0] or "memory" in group[0].split(",")]


def _left_in(limit: Path, used: Path) -> int | None:
    """Bytes between the numbers in two files; None without a limit."""
    try:
        text = limit.read_text().strip()
        return max(0, int(text) - int(used.read_text())) if text.isdecimal() else None
    except (OSError, ValueError):
        return None
