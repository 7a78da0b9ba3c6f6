"""`SpecCache` with one part as in a paper, where ours is another."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.methods.spec import LowBitForm, SpecCache, SpecConfig, SpecLayer


class PlainLowBitLayer(SpecLayer):
    @classmethod
    def copy_form(cls, form: Any, config: SpecConfig) -> LowBitForm:
        return LowBitForm(form, config.bits, config.quant_group, plain=True)


class PlainLowBitCache(SpecCache):
    """KIVI's own 1 bit: the two values of a group are its ends, by equation 2 (SpeCache, table 5)."""

    layer_class: ClassVar[type[OffloadLayer]] = PlainLowBitLayer
