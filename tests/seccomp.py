"""System calls of this process that fail from now on, as in a container or a sandbox that forbids them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {
    "io_uring_setup": 425, "io_uring_enter": 426, "fadvise64": 221, "madvise": 28, "fallocate": 285, "linkat": 265,
    "flock": 73, "renameat2": 316, "statfs": 137, "fstatfs": 138, "fchmod": 91, "preadv": 295, "copy_file_range": 326,
    "clone3": 435, "mincore": 27, "statx": 332, "memfd_create": 319, "sched_getaffinity": 204, "prctl": 157,
    "sendfile": 40, "pwritev": 296, "fdatasync": 75, "fsync": 74, "clone": 56,
}  # fmt: skip
"""Of x86-64."""

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_F_SETFL, _O_TMPFILE, _O_DIRECT = 4, 0o20000000, 0o40000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def unavailable() -> str:
    """Why `forbid` cannot be used here; empty where it can be tried."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the numbers of system calls are of Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    return ""


def forbid(names: list[str], number: int) -> None:
    """Each of `names` fails with `number` from now on, in every thread that begins now or later.

    "O_TMPFILE" and "O_DIRECT" are `openat` and `fcntl` with that flag. Raises `OSError` where the kernel refuses.
    """
    code = [_instruction(_LOAD, 0, 0, 0)]
    for name in names:
        if name in ("O_TMPFILE", "O_DIRECT"):  # openat(dir, path, flags), fcntl(fd, F_SETFL, flags)
            call, flag = (257, _O_TMPFILE) if name == "O_TMPFILE" else (72, _O_DIRECT)
            second = (
                [] if name == "O_TMPFILE" else [_instruction(_LOAD, 0, 0, 24), _instruction(_EQUAL, 0, 4, _F_SETFL)]
            )
            code += [
                _instruction(_EQUAL, 0, 5 + len(second), call),
                *second,
                _instruction(_LOAD, 0, 0, 32),  # the third argument
                _instruction(_AND, 0, 0, flag),
                _instruction(_EQUAL, 0, 1, flag),
                _instruction(_RETURN, 0, 0, _ERRNO | number),
                _instruction(_LOAD, 0, 0, 0),
            ]
        else:
            code += [_instruction(_EQUAL, 0, 1, NUMBERS[name]), _instruction(_RETURN, 0, 0, _ERRNO | number)]
    code.append(_instruction(_RETURN, 0, 0, _ALLOW))
    memory = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.addressof(memory))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")


def _instruction(code: int, jump: int, skip: int, value: int) -> bytes:
    return struct.pack("HBBI", code, jump, skip, value)
