"""KIVI's own 1 bit, beside the paper's: the two values of a group are its ends (SpeCache, table 5)."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.methods.spec import LowBitForm, SpecCache, SpecConfig, SpecLayer


class PlainLowBitLayer(SpecLayer):
    @classmethod
    def copy_form(cls, form: Any, config: SpecConfig) -> LowBitForm:
        return LowBitForm(form, config.bits, config.quant_group, plain=True)


class PlainLowBitCache(SpecCache):
    """`SpecCache` with equation 2 for one bit as well."""

    layer_class: ClassVar[type[OffloadLayer]] = PlainLowBitLayer
