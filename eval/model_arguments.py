"""lm-eval's `--model_args`: what of them is for lm-eval's own model, for the cache, and for `from_pretrained`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel

from hf_offload_cache.console import DYNAMIC, offloading_class
from hf_offload_cache.errors import ConfigError


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs", "model_args"}


_OF_HF = _parameters(HFLM.__init__)
BITS = _parameters(BitsAndBytesConfig.__init__)
"""Arguments that make a quantization configuration."""
_LOADING = _parameters(PreTrainedModel.from_pretrained) | BITS | {
    "adapter_kwargs", "allow_all_kernels", "attn_implementation", "code_revision", "device_map",
    "experts_implementation", "key_mapping", "max_memory", "offload_buffers", "torch_dtype", "use_kernels", "variant",
}  # fmt: skip
"""Arguments of `from_pretrained`, the last ones among its `kwargs`."""
_READING = ("revision", "subfolder", "trust_remote_code", "gguf_file")
_OF_A_NAME = {
    "autogptq", "delta", "gguf_file", "gptqmodel", "parallelize", "peft", "revision", "subfolder", "tp_plan",
    "trust_remote_code",
}  # fmt: skip
"""Arguments of lm-eval's own that decide how a model is loaded."""


class ModelArguments(NamedTuple):
    """Arguments by name."""

    of_hf: dict[str, Any]
    of_cache: dict[str, Any]
    loading: dict[str, Any]
    """Arguments of `from_pretrained`."""


def sort_arguments(given: Mapping[str, Any], cache: str, pretrained: Any) -> ModelArguments:
    """Give each argument to `hf`, the cache or `from_pretrained`: to the first of these that knows its name.

    `pretrained`: a name or folder, whose configuration's attributes `from_pretrained` takes, too; or a model, or None
    for the default one. Raises `ConfigError` for what nobody takes, before a model is loaded.
    """
    cls = None if cache == DYNAMIC else offloading_class(cache)
    fields = set() if cls is None else {field.name for field in dataclasses.fields(cls.config_class)}
    found = ModelArguments({}, {}, {})
    unknown: dict[str, Any] = {}
    for name, value in given.items():
        kinds = ((_OF_HF, found.of_hf), (fields, found.of_cache), (_LOADING, found.loading))
        own = next((kept for names, kept in kinds if name in names), unknown)
        own[name] = value
    if unknown and isinstance(pretrained, str):
        of_model = _attributes(pretrained, {name: given[name] for name in _READING if name in given})
        found.loading.update({name: unknown.pop(name) for name in [*unknown] if name in of_model})
    for name in unknown:
        near = difflib.get_close_matches(name, sorted(fields | _OF_HF | _LOADING), 1)
        hint = f"did you mean {near[0]!r}?" if near else "see the fields of the cache, and those of --model hf"
        raise ConfigError(f"model_args: {name!r} is neither a field of cache={cache} nor taken by a model; {hint}")
    lost = sorted({*found.loading, *(name for name in _OF_A_NAME & found.of_hf.keys() if found.of_hf[name])})
    if lost and not isinstance(pretrained, str):
        raise ConfigError(f"model_args: {', '.join(lost)} is for a model that is loaded by name: give pretrained=NAME")
    return found


def _attributes(pretrained: str, options: dict[str, Any]) -> set[str]:
    """Attributes of a model's configuration; none if it cannot be read, because loading tells why."""
    try:
        return set(AutoConfig.from_pretrained(pretrained, **options).to_dict())
    except (OSError, ValueError):
        return set()
