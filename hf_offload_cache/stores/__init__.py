"""Growing arrays of fixed-size records, on disk or in memory.

`base` defines a store, and what saved contexts and forks need besides. The engines are `memory`, `file` (direct),
`mapped` and `uring`; `engines` chooses and opens one. `layered` puts a growing store over frozen ones. A `guard` checks
that a record is as it was written; `encryption` also encrypts it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .atomic_file import replace_file as replace_file
    from .base import DEVICE_BLOCK as DEVICE_BLOCK
    from .base import EXIT_SECONDS as EXIT_SECONDS
    from .base import Deadline as Deadline
    from .base import FreezableStore as FreezableStore
    from .base import LateRead as LateRead
    from .base import Store as Store
    from .base import Transfer as Transfer
    from .base import aligned_empty as aligned_empty
    from .base import check_batch as check_batch
    from .base import check_range as check_range
    from .base import has_passed as has_passed
    from .base import require_freezable as require_freezable
    from .base import runs as runs
    from .base import seconds_left as seconds_left
    from .encryption import Encryption as Encryption
    from .encryption import decrypt as decrypt
    from .encryption import encrypt as encrypt
    from .encryption import key_check as key_check
    from .encryption import load_key as load_key
    from .encryption import make_guard as make_guard
    from .encryption import open_guard as open_guard
    from .engines import DryStore as DryStore
    from .engines import choose_engine as choose_engine
    from .engines import open_named as open_named
    from .engines import open_store as open_store
    from .engines import planned_ring as planned_ring
    from .engines import probe_direct as probe_direct
    from .engines import probe_uring as probe_uring
    from .file import THROUGH_BYTES as THROUGH_BYTES
    from .file import DirectStore as DirectStore
    from .file import FileStore as FileStore
    from .file import spans as spans
    from .guard import Checksums as Checksums
    from .guard import RecordGuard as RecordGuard
    from .layered import LayeredStore as LayeredStore
    from .mapped import MappedStore as MappedStore
    from .mapped import MappedTable as MappedTable
    from .memory import FreeList as FreeList
    from .memory import MemoryStore as MemoryStore
    from .record_file import BOUNCE_BYTES as BOUNCE_BYTES
    from .record_file import MOST_PARTS as MOST_PARTS
    from .record_file import RecordFile as RecordFile
    from .record_file import ScratchFile as ScratchFile
    from .record_file import copy_file as copy_file
    from .uring.queues import ring_bytes as ring_bytes
    from .uring.ring import DEPTH as DEPTH
    from .uring.ring import IO_RING as IO_RING
    from .uring.ring import Batch as Batch
    from .uring.ring import Ring as Ring
    from .uring.uring_store import UringStore as UringStore

_HOME = {
    "DryStore": "engines",
    "BOUNCE_BYTES": "record_file",
    "Batch": "uring.ring",
    "Checksums": "guard",
    "DEPTH": "uring.ring",
    "DEVICE_BLOCK": "base",
    "Deadline": "base",
    "DirectStore": "file",
    "EXIT_SECONDS": "base",
    "Encryption": "encryption",
    "FileStore": "file",
    "FreeList": "memory",
    "FreezableStore": "base",
    "IO_RING": "uring.ring",
    "LateRead": "base",
    "LayeredStore": "layered",
    "MOST_PARTS": "record_file",
    "MappedStore": "mapped",
    "MappedTable": "mapped",
    "MemoryStore": "memory",
    "RecordFile": "record_file",
    "RecordGuard": "guard",
    "Ring": "uring.ring",
    "ScratchFile": "record_file",
    "Store": "base",
    "THROUGH_BYTES": "file",
    "Transfer": "base",
    "UringStore": "uring.uring_store",
    "aligned_empty": "base",
    "check_batch": "base",
    "check_range": "base",
    "choose_engine": "engines",
    "copy_file": "record_file",
    "decrypt": "encryption",
    "encrypt": "encryption",
    "has_passed": "base",
    "key_check": "encryption",
    "load_key": "encryption",
    "make_guard": "encryption",
    "open_guard": "encryption",
    "open_named": "engines",
    "open_store": "engines",
    "planned_ring": "engines",
    "probe_direct": "engines",
    "probe_uring": "engines",
    "replace_file": "atomic_file",
    "require_freezable": "base",
    "ring_bytes": "uring.queues",
    "runs": "base",
    "seconds_left": "base",
    "spans": "file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
