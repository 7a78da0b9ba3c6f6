"""Conflicts between training and a cache.

Entries read back from a store have no graph behind them: a backward pass through them raises. Layers that checkpoint
gradients are given no cache.
"""

from __future__ import annotations

from typing import Any

import torch

from .decoder_blocks import decoder_blocks


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "no gradient flows through a history that hf_offload_cache brought back from its store: "
            "run the forward under torch.no_grad(), or train with DynamicCache"
        )


def no_backward(tensor: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`tensor` (a leaf), whose values joined a graph that `beside` is part of: a backward pass that comes here raises
    instead of being silently wrong."""
    if not (torch.is_grad_enabled() and beside.requires_grad):
        return tensor
    return _NoBackward.apply(tensor.requires_grad_())


def checkpointing_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that keep a cache from a decoder block while they train with `gradient_checkpointing` on: the blocks
    themselves, and the modules around them."""
    blocks = {block for _, block, _ in decoder_blocks(model)}
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
        and not getattr(module, "_can_checkpoint_with_cache", False)
        and any(part in blocks for part in module.modules())
    ]
