"""What makes stored keys belong to a model: names of fields and their values, cheap to compute and to compare."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

_SAMPLE = 64
"""Elements sampled of every parameter, evenly spaced."""


def fingerprint(model: Any) -> dict[str, str]:
    """Field names and values of a PreTrainedModel that must be equal for its keys to be interchangeable."""
    config = model.config.get_text_config(decoder=True)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    fields = ("model_type", *shape)
    found = {name: str(config_value(config, name)) for name in fields}
    found["rope"] = str(config_value(config, "rope_parameters"))
    found["weights"] = _digest(model)
    return found


def config_value(config: Any, name: str) -> Any:
    """A field of a configuration; None where it has none, or one that differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # what transformers raises for a field that has no one value
        return None


def _digest(model: torch.nn.Module) -> str:
    """A digest of a sample of every parameter; of name and shape alone where the weights are not in memory."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
            digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
