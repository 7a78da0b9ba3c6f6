"""Contexts that outlive the process: saved, opened, forked; what they belong to and how they are kept."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import prompt_of as prompt_of
    from .data_files import MANIFEST_NAME as MANIFEST_NAME
    from .data_files import open_file as open_file
    from .data_files import read_small as read_small
    from .data_files import write_file as write_file
    from .file_system import FileSystem as FileSystem
    from .folder import entries as entries
    from .folder import open_folder as open_folder
    from .folder import reading as reading
    from .library import bytes_of as bytes_of
    from .listing import total_bytes as total_bytes
    from .manifest import Manifest as Manifest
    from .open import capture_kept as capture_kept
    from .open import open_context as open_context
    from .open import restore_kept as restore_kept
    from .open import select_kept_rows as select_kept_rows
    from .protocol import StoredLayer as StoredLayer
    from .reader import read_manifest as read_manifest
    from .removal import remove as remove
    from .removal import sweep as sweep
    from .save import fork as fork
    from .state import pack as pack
    from .state import unpack as unpack

_HOME = {
    "FileSystem": "file_system",
    "MANIFEST_NAME": "data_files",
    "Manifest": "manifest",
    "StoredLayer": "protocol",
    "bytes_of": "library",
    "capture_kept": "open",
    "entries": "folder",
    "fork": "save",
    "open_context": "open",
    "open_file": "data_files",
    "open_folder": "folder",
    "pack": "state",
    "prompt_of": "configuration",
    "read_manifest": "reader",
    "read_small": "data_files",
    "reading": "folder",
    "remove": "removal",
    "restore_kept": "open",
    "select_kept_rows": "open",
    "sweep": "removal",
    "total_bytes": "listing",
    "unpack": "state",
    "write_file": "data_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
