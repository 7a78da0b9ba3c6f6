"""PEFT's adapters in a model, as they act now: which, how strongly, merged or switched off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from .config_values import flat, text
from .weights import sampled_digest

# Fields of an adapter's configuration that describe its source or its training.
_SOURCE = ("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode")
_MAKING = ("task_type", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config")
_IGNORED = frozenset((*_SOURCE, *_MAKING, "runtime_config"))


# Adapters that PEFT puts into a cache of its own, instead of the caller's.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")


def prompt_adapter(model: Any, inner: torch.nn.Module) -> Any | None:
    """PEFT's configuration of the active adapter that is a prompt (prompt tuning, prefix tuning, ...); None: there is
    none.

    `model`: PEFT's wrapper, or the model in it, which is visible while the wrapper's `generate` runs.
    """
    wrapper = model
    if model is inner:
        method = vars(inner).get("prepare_inputs_for_generation")
        wrapper = getattr(getattr(method, "given", method), "__self__", None)
    config = getattr(wrapper, "active_peft_config", None)
    acts = getattr(config, "is_prompt_learning", False) and not getattr(wrapper, "_adapters_disabled", False)
    return config if acts else None


def is_prefix(config: Any) -> bool:
    """Whether the adapter of `prompt_adapter` consists of keys and values, not of embeddings."""
    return str(getattr(config.peft_type, "value", config.peft_type)) in _PREFIXES


def adapter_fields(model: Any, inner: torch.nn.Module) -> dict[str, str]:
    """PEFT's adapters as they act now. Weights of layers are among the model's own, those of soft prompts are not."""
    layers = list(_adapted(inner))
    configs = getattr(inner, "peft_config", None) or {}
    if not layers and getattr(model, "prompt_encoder", None):
        return {
            "adapters": text(model.active_adapters),
            "adapters.disabled": text(model._adapters_disabled),
            "adapters.prompt": sampled_digest(model.prompt_encoder),
            **flat("adapters.prompt", model.active_peft_config.to_dict(), _IGNORED),
        }
    if not layers:
        return {"adapters": "none"}
    active = sorted({name for _, state in layers for name in state["active"]})
    fields = {
        "adapters": text(active),
        "adapters.disabled": _common(state["disabled"] for _, state in layers),
        "adapters.merged": text(sorted({name for _, state in layers for name in state["merged"]})),
    }
    for name in active:
        fields |= {f"adapters.{name}.scaling": _common(state["scaling"].get(name) for _, state in layers)}
        if name in configs:
            fields |= flat(f"adapters.{name}", configs[name].to_dict(), _IGNORED)
    fields["adapters.layers"] = xxhash.xxh3_128(text(layers).encode()).hexdigest()
    return fields


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every layer that PEFT added, with its settings."""
    for path, module in model.named_modules():
        disabled = getattr(module, "disable_adapters", None)
        if not isinstance(disabled, bool):  # in a transformers model it is a method
            continue
        active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None) or []
        scaling = getattr(module, "scaling", None)
        yield (
            path.replace("_orig_mod.", ""),
            {
                "active": [active] if isinstance(active, str) else list(active),
                "disabled": disabled,
                "merged": list(getattr(module, "merged_adapters", ())),
                "scaling": scaling if isinstance(scaling, dict) else {},
            },
        )


def _common(values: Iterator[Any]) -> str:
    """The value that all share, or each different one once."""
    texts = sorted({text(value) for value in values if value is not None})
    return ", ".join(texts)
