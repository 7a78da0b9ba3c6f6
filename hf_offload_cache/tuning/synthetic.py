"""Contexts put into a cache without a prefill: keys and values that are known already, or made up."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..core.layer import OffloadLayer
from ..errors import UnsupportedModelError
from ..history.records import RecordFormat
from ..model.attention_call import AttentionCall
from ..model.config_values import config_value
from ..model.place import decoder_blocks, inner_model


def attention_modules(model: Any) -> dict[int, torch.nn.Module]:
    """The self-attention of each decoder block, by layer index."""
    return {layer_idx: attention for layer_idx, _, attention in decoder_blocks(inner_model(model))}


def fill(
    layer: OffloadLayer,
    module: torch.nn.Module,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor | None = None,
) -> None:
    """Put keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) into an empty layer; `module` is its attention, `queries`
    (B, H, n, Dk) are the latest of those that came with them, None: not known.

    The way of a prefill in one piece, with an attention function that computes nothing: the layer is "tagged" then, its
    groups are sealed and written, and its summary is made. Both tensors are copied. Nothing is told to the look-ahead.
    """
    config = getattr(module, "config", None)
    heads = config_value(config, "num_attention_heads") if config is not None else None
    with torch.no_grad():
        returned, other = layer.update(keys, values)
        query = keys.new_zeros(keys.shape[0], heads or keys.shape[1], 1, keys.shape[3]) if queries is None else queries
        layer.attend(AttentionCall(_no_attention, module, query, returned, other, None))


def _no_attention(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


def random_keys_and_values(
    form: RecordFormat, tokens: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (1, Hk, T, Dk) and values (1, Hv, T, Dv) of one sequence, the same for the same arguments; never zeros.

    Keys are a mean, a part of low rank that drifts slowly from token to token, so that neighbours are similar as in
    text, and noise: most of their energy fits a compact copy, not all. Values are noise.
    """
    rank, span = 24, 64
    of: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float32, "device": "cpu"}
    corners = torch.randn(tokens // span + 2, rank, **of)
    drift = torch.nn.functional.interpolate(corners.T[None], size=tokens, mode="linear", align_corners=True)[0].T
    keys = drift @ (torch.randn(rank, form.key_width, **of) / rank**0.5)
    keys += torch.randn(form.key_width, **of)
    keys += 0.5 * torch.randn(tokens, form.key_width, **of)
    values = torch.randn(tokens, form.num_value_heads * form.value_dim, **of)
    shaped = [
        part.view(1, tokens, heads, -1).transpose(1, 2).to(device=device, dtype=form.dtype).contiguous()
        for part, heads in ((keys, form.num_key_heads), (values, form.num_value_heads))
    ]
    return shaped[0], shaped[1]


def two_blocks(model: Any) -> Any:
    """A model without head of the first two decoder blocks of `model`, which stays as it is; the weights are shared.

    Raises `UnsupportedModelError` where the blocks are not in one list, or fewer than two.
    """
    backbone: Any = inner_model(model).base_model
    blocks = [block for _, block, _ in decoder_blocks(backbone)]
    lists = [
        module
        for module in backbone.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) >= 2 and list(module) == blocks
    ]
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} does not keep its decoder blocks in one list of two or more: a block cannot be "
            "timed alone, so it cannot be tuned; choose the fields by hand, or with for_budget"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    memo[id(lists[0])] = torch.nn.ModuleList([copy.deepcopy(block, memo) for block in blocks[:2]])
    twin = copy.deepcopy(backbone, memo)
    config = twin.config.get_text_config(decoder=True)
    config.num_hidden_layers = 2
    if isinstance(config_value(config, "layer_types"), list):
        config.layer_types = config.layer_types[:2]
    return twin.eval()
