"""Tiny models whose positions have several dimensions, with prompts that have a picture. No tests in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import transformers
from vision_models import END, PICTURE, START, VIDEO, Inputs, qwen2_5_vl, qwen2_vl, text_config

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION: dict[str, Any] = {
    "depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 14,
}  # fmt: skip
DEEP: dict[str, Any] = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
AUDIO: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64,
    "num_mel_bins": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN = {"image_token_id": PICTURE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
OMNI: dict[str, Any] = {
    **QWEN, "audio_token_id": 189, "audio_start_token_id": 188, "audio_end_token_id": 187, "audio_config": AUDIO
}  # fmt: skip
OTHERS = {"image_token_id": PICTURE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END}
GLM = {**OTHERS, "video_start_token_id": 190, "video_end_token_id": 191}


def _made(name: str, text: dict[str, Any], vision: dict[str, Any], ids: dict[str, Any], rope: Any = None) -> Any:
    config_class = getattr(transformers, f"{name}Config")
    text = text_config(rope_parameters={**ROPE, **(rope or {})}, vocab_size=199, **text)
    config = config_class(text_config=text, vision_config=vision, **ids)
    return harness.build(getattr(transformers, f"{name}ForConditionalGeneration"), config)


def _glm(name: str, **text: Any) -> Any:
    return _made(name, text, {**VISION, "image_size": 112}, GLM, {"partial_rotary_factor": 1.0})


def qwen3_5() -> Any:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2}
    vision = {**VISION, "num_position_embeddings": 64}
    return _made("Qwen3_5", {**heads, **dims, **kinds}, vision, QWEN, {"partial_rotary_factor": 1.0})


def glm4v_moe() -> Any:
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return _glm("Glm4vMoe", num_experts_per_tok=2, moe_intermediate_size=32, **groups)


def ernie() -> Any:
    text = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 32], "moe_num_shared_experts": 1}
    vision = {key: value for key, value in VISION.items() if key != "out_hidden_size"}
    return _made("Ernie4_5_VLMoe", text, vision, GLM, {"mrope_section": [3, 3, 2]})


def paddleocr_vl() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return _made("PaddleOCRVL", {}, {**vision, "image_size": 112, "patch_size": 14}, QWEN)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": lambda: _made("Qwen3VL", {}, DEEP, QWEN),
    "qwen3_vl_moe": lambda: _made("Qwen3VLMoe", {**EXPERTS, "decoder_sparse_step": 1}, DEEP, QWEN),
    "qwen3_5": qwen3_5,
    "glm4v": lambda: _glm("Glm4v"),
    "glm4v_moe": glm4v_moe,
    "glm_ocr": lambda: _glm("GlmOcr"),
    "ernie4_5_vl": ernie,
    "paddleocr_vl": paddleocr_vl,
    "qwen2_5_omni": lambda: _made("Qwen2_5OmniThinker", {}, VISION, OMNI),
    "qwen3_omni": lambda: _made("Qwen3OmniMoeThinker", {**EXPERTS, "decoder_sparse_step": 1}, DEEP, OMNI),
}
"""Name -> what makes the model."""


def with_a_picture(name: str, before: int = 60, after: int = 20, height: int = 8, seed: int = 3) -> Inputs:
    """Words, a picture of `height` x 8 patches of which four are a token, words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, 180, (1, before + after), generator=generator)
    patches, tokens = height * 8, height * 2
    ids = torch.cat([words[:, :before], torch.full((1, tokens), PICTURE), words[:, before:]], 1)
    ids[0, before - 1], ids[0, before + tokens] = START, END
    flat = name in ("ernie4_5_vl", "paddleocr_vl")
    shape = (patches, 3, 14, 14) if name == "paddleocr_vl" else (patches, 3 * (1 if flat else 2) * 14 * 14)
    kinds = (ids == PICTURE).int()
    given = {
        "input_ids": ids, "pixel_values": torch.randn(shape, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, 8]]),
    }  # fmt: skip
    if not name.endswith("omni"):
        given["mm_token_type_ids"] = kinds
    if name == "ernie4_5_vl":
        given["moe_mm_token_type_ids"] = kinds
    return given


def together(one: Inputs, other: Inputs) -> Inputs:
    """Both as one batch, padded on the left."""
    widest = max(one["input_ids"].shape[1], other["input_ids"].shape[1])

    def padded(row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(row, (widest - row.shape[1], 0))

    found = {"attention_mask": torch.cat([padded(torch.ones_like(each["input_ids"])) for each in (one, other)])}
    for name, value in one.items():
        of_tokens = name == "input_ids" or name.endswith("token_type_ids")
        found[name] = torch.cat([padded(value), padded(other[name])] if of_tokens else [value, other[name]])
    return found
