"""Memory in use by owner, and plans of the memory that a cache will need."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .account import MemoryAccount as MemoryAccount
    from .account import Workspace as Workspace
    from .account import lasting_empty as lasting_empty
    from .dry_run import DryRun as DryRun
    from .machine import SPARE_DESCRIPTORS as SPARE_DESCRIPTORS
    from .machine import check_descriptors as check_descriptors
    from .machine import free_descriptors as free_descriptors
    from .machine import free_disk as free_disk
    from .machine import free_memory as free_memory
    from .plan import LayerPlan as LayerPlan
    from .plan import MemoryPlan as MemoryPlan
    from .plan import Planned as Planned

_HOME = {
    "DryRun": "dry_run",
    "LayerPlan": "plan",
    "MemoryAccount": "account",
    "MemoryPlan": "plan",
    "Planned": "plan",
    "SPARE_DESCRIPTORS": "machine",
    "Workspace": "account",
    "check_descriptors": "machine",
    "free_descriptors": "machine",
    "free_disk": "machine",
    "free_memory": "machine",
    "lasting_empty": "account",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
