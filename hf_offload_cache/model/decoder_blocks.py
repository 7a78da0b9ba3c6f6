"""Where in a model its decoder blocks are, whatever the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_blocks(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module, torch.nn.Module]]:
    """Layer index, block and its self-attention: a module with a `layer_idx`, named for attention, within the block."""
    for name, attention in model.named_modules():
        layer_idx = getattr(attention, "layer_idx", None)
        path, _, leaf = name.rpartition(".")
        if isinstance(layer_idx, int) and path and "attention" in type(attention).__name__.lower():
            block = model.get_submodule(path)
            if "attention" not in type(block).__name__.lower() and "cross" not in leaf:
                yield layer_idx, block, attention


def attention_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """By layer index, where the attention of each decoder block makes its keys."""
    found: dict[int, torch.device] = {}
    for layer_idx, _, attention in decoder_blocks(model):
        moved = getattr(getattr(attention, "_hf_hook", None), "execution_device", None)  # accelerate's
        held = next((p.device for p in attention.parameters() if p.device.type != "meta"), None)
        found[layer_idx] = torch.device(moved) if moved is not None else held or model.device
    return found
