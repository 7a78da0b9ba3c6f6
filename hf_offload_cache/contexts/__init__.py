"""Contexts that outlive the process: saving, opening and forking caches, and folders of contexts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import prompt_of as prompt_of
    from .file_system import FileSystem as FileSystem
    from .folder import MANIFEST_NAME as MANIFEST_NAME
    from .folder import entries as entries
    from .folder import open_file as open_file
    from .folder import open_folder as open_folder
    from .folder import read_small as read_small
    from .folder import reading as reading
    from .folder import write_file as write_file
    from .library import bytes_of as bytes_of
    from .listing import total_bytes as total_bytes
    from .manifest import Manifest as Manifest
    from .manifest import read_manifest as read_manifest
    from .open import capture_kept as capture_kept
    from .open import open_context as open_context
    from .open import restore_kept as restore_kept
    from .open import select_kept_rows as select_kept_rows
    from .removal import remove as remove
    from .removal import sweep as sweep
    from .save import fork as fork
    from .state import StoredLayer as StoredLayer
    from .state import pack as pack
    from .state import unpack as unpack

_HOME = {
    "FileSystem": "file_system",
    "MANIFEST_NAME": "folder",
    "Manifest": "manifest",
    "StoredLayer": "state",
    "bytes_of": "library",
    "capture_kept": "open",
    "entries": "folder",
    "fork": "save",
    "open_context": "open",
    "open_file": "folder",
    "open_folder": "folder",
    "pack": "state",
    "prompt_of": "configuration",
    "read_manifest": "manifest",
    "read_small": "folder",
    "reading": "folder",
    "remove": "removal",
    "restore_kept": "open",
    "select_kept_rows": "open",
    "sweep": "removal",
    "total_bytes": "listing",
    "unpack": "state",
    "write_file": "folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
