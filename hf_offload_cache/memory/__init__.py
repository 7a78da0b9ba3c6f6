"""The account of what is held, and plans of what will be."""

from .account import MemoryAccount as MemoryAccount
from .account import Workspace as Workspace
from .account import lasting_empty as lasting_empty
from .machine import SPARE_DESCRIPTORS as SPARE_DESCRIPTORS
from .machine import check_descriptors as check_descriptors
from .machine import free_descriptors as free_descriptors
from .machine import free_disk as free_disk
from .machine import free_memory as free_memory
from .plan import LayerPlan as LayerPlan
from .plan import MemoryPlan as MemoryPlan
from .plan import Planned as Planned
