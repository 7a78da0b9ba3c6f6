"""What makes stored keys belong to a model: names of fields and their values, cheap to compute and to compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

_SAMPLE = 64
"""Elements sampled of every parameter, evenly spaced."""


def fingerprint(model: Any) -> dict[str, str]:
    """Field names and values of a PreTrainedModel that must be equal for its keys to be interchangeable.

    For what is calibrated or tuned to a model. What keeps a model's own keys and values asks for more:
    `contexts.identity`.
    """
    config = model.config.get_text_config(decoder=True)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    fields = ("model_type", *shape)
    found = {name: str(config_value(config, name)) for name in fields}
    found["rope"] = str(config_value(config, "rope_parameters"))
    found["weights"] = digest(_samples(model))
    return found


def config_value(config: Any, name: str) -> Any:
    """A field of a configuration; None where it has none, or one that differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # what transformers raises for a field that has no one value
        return None


def digest(entries: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> str:
    """32 hex digits of xxh3_128 over labels and, after each, the raw bytes of its tensors (any device), in order."""
    hasher = xxhash.xxh3_128()
    for label, tensors in entries:
        hasher.update(label.encode())
        for tensor in tensors:
            hasher.update(raw_bytes(tensor))
    return hasher.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements in order, on the host: its own memory where they lie so already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _samples(model: torch.nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """A sample of every parameter; name and shape alone where the weights are not in memory."""
    for name, parameter in model.named_parameters():
        tensors = []
        if parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            tensors.append(flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE])
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype}", tensors
