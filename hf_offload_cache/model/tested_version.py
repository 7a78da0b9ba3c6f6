"""Which transformers this library was tested with, and a warning under a newer one."""

from __future__ import annotations

import functools
import warnings

import transformers
from packaging.version import Version

TESTED = "5.23"
"""The newest version that the tests ran with; setup.cfg names it beside the range that installs."""


def warn_if_untested() -> None:
    """Warns, once a process, where a newer minor version of transformers is installed than was tested."""
    _warn(transformers.__version__)


def untested() -> str | None:
    """Text for a newer minor version of transformers than was tested; None: it is not newer."""
    return _message(transformers.__version__)


@functools.cache  # what was said in this process: a user with many caches reads it once
def _warn(version: str) -> None:
    if (message := _message(version)) is not None:
        warnings.warn(message, UserWarning, stacklevel=5)


def _message(version: str) -> str | None:
    if _minor(version) <= _minor(TESTED):
        return None
    return (
        f"transformers {version} is newer than {TESTED}, which hf_offload_cache was tested with: check your model once "
        "with `python -m hf_offload_cache.testing MODEL` (a folder or a name)"
    )


def _minor(version: str) -> tuple[int, int]:
    found = Version(version)  # also "6.0rc1", or "5.24.dev0" of a checkout
    return found.major, found.minor
