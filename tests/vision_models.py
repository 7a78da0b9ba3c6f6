"""Tiny vision-language models with random weights, and a prompt with a picture for each. No tests in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import transformers

PICTURE, VIDEO, START, END = 195, 196, 197, 198
"""Ids that stand for a picture's patches, and around them."""

Inputs = dict[str, Any]
"""What `generate` is given: the ids (1, T), the pixels, and what the model wants to know of them."""

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


POSITIONS = 1024
BEFORE, AFTER = 620, 20
"""Words before and behind a picture: enough for a cache to learn from what it selects by."""


def text_config(**fields: Any) -> dict[str, Any]:
    return {**harness.COMMON, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": POSITIONS, **fields}


def ids(patches: int, before: int = BEFORE, after: int = AFTER) -> torch.Tensor:
    """Words, a picture in so many tokens, words."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(5, PICTURE, (1, before + after), generator=generator)
    picture = torch.full((1, patches), PICTURE)
    return torch.cat([words[:, :before], picture, words[:, before:]], 1)


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


# ---------------------------------------------------------------------------------------------- models


def _qwen(config_class: Any, model_class: Any, **vision: Any) -> Any:
    """Positions have three dimensions: time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = config_class(
        text_config=text_config(rope_parameters=rope),
        vision_config={"depth": 1, "num_heads": 2, **vision},
        image_token_id=PICTURE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return harness.build(model_class, config)


def qwen2_5_vl() -> Any:
    """A tiny Qwen2.5-VL: positions of three dimensions."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
    return _qwen(transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration, **vision)


def qwen2_vl() -> Any:
    vision = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return _qwen(transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration, **vision)


def gemma3_vl() -> Any:
    """A tiny Gemma 3 with a vision tower: sliding and full layers in the text model, a picture sees all of itself."""
    config = transformers.Gemma3Config(
        text_config=text_config(
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=PICTURE,
        boi_token_index=VIDEO,
        eoi_token_index=START,
    )
    model = harness.build(transformers.Gemma3ForConditionalGeneration, config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)  # zeros, as it is made
    return model


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text_config(num_hidden_layers=3)),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=PICTURE,
        vision_feature_select_strategy="full",
    )
    return harness.build(transformers.LlavaForConditionalGeneration, config)


def smolvlm() -> Any:
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**text_config(num_hidden_layers=3)),
        vision_config={**VISION, "image_size": 56},
        image_token_id=PICTURE,
        scale_factor=2,
    )
    return harness.build(transformers.SmolVLMForConditionalGeneration, config)


def mllama() -> Any:
    """A tiny Llama 3.2 Vision: a layer whose keys and values are the picture's, for all tokens."""
    config = transformers.MllamaConfig(
        text_config=text_config(cross_attention_layers=[1]),
        vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 28, "patch_size": 14, "max_num_tiles": 1, "vision_output_dim": 64,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
        },
        image_token_index=PICTURE,
    )  # fmt: skip
    model = harness.build(transformers.MllamaForConditionalGeneration, config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):  # closed, as they are made
            parameter.data.fill_(0.7)
    return model


def blip2() -> Any:
    """A tiny BLIP-2: its own `generate` calls that of the OPT within it, and the model itself never runs."""
    text = transformers.OPTConfig(
        vocab_size=199, hidden_size=64, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
        max_position_embeddings=POSITIONS, word_embed_proj_dim=64,
    )  # fmt: skip
    queries = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "encoder_hidden_size": 32, "vocab_size": 199,
    }  # fmt: skip
    config = transformers.Blip2Config(
        vision_config=VISION, qformer_config=queries, text_config=text.to_dict(), num_query_tokens=4,
        image_token_index=PICTURE,
    )  # fmt: skip
    model = harness.build(transformers.Blip2ForConditionalGeneration, config)
    model.language_model.generation_config.eos_token_id = None
    return model


def kosmos2() -> Any:
    """A tiny Kosmos-2: as BLIP-2, with a forward that takes a cache all the same."""
    config = transformers.Kosmos2Config(
        text_config={
            "vocab_size": 199, "embed_dim": 64, "layers": 2, "ffn_dim": 64, "attention_heads": 4,
            "max_position_embeddings": POSITIONS,
        },
        vision_config=VISION,
        latent_query_num=4,
    )  # fmt: skip
    model = harness.build(transformers.Kosmos2ForConditionalGeneration, config)
    model.text_model.generation_config.eos_token_id = None
    model.image_to_text_projection.dense.weight.data *= 100  # else all pictures look nearly alike
    return model


def git() -> Any:
    """A tiny GIT: a picture is before the prompt, in tokens that no ids stand for."""
    config = transformers.GitConfig(
        vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=POSITIONS, vision_config=VISION, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return harness.build(transformers.GitForCausalLM, config)


# ---------------------------------------------------------------------------------------------- with a picture


def _of_patches() -> Inputs:
    """8 x 8 patches, of which four are a token."""
    given = ids(16)
    given[0, BEFORE - 1], given[0, BEFORE + 16] = START, END
    kinds = (given == PICTURE).int()
    grid = torch.tensor([[1, 8, 8]])
    return {
        "input_ids": given, "pixel_values": pixels(64, 3 * 2 * 14 * 14), "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }  # fmt: skip


def _of_gemma() -> Inputs:
    given = ids(4)
    return {"input_ids": given, "pixel_values": pixels(1, 3, 28, 28), "token_type_ids": (given == PICTURE).long()}


def _of_mllama() -> Inputs:
    given = ids(1)
    one = torch.ones(1, 1, dtype=torch.long)
    return {
        "input_ids": given, "pixel_values": pixels(1, 1, 1, 3, 28, 28), "aspect_ratio_ids": one,
        "aspect_ratio_mask": one[None], "cross_attention_mask": torch.ones(1, given.shape[1], 1, 1, dtype=torch.long),
    }  # fmt: skip


def _of_kosmos() -> Inputs:
    given = ids(4)
    return {
        "input_ids": given, "pixel_values": pixels(1, 3, 28, 28), "attention_mask": torch.ones_like(given),
        "image_embeds_position_mask": (given == PICTURE).long(),
    }  # fmt: skip


WITH_A_PICTURE: dict[str, tuple[Callable[[], Any], Callable[[], Inputs]]] = {
    "qwen2_vl": (qwen2_vl, _of_patches),
    "qwen2_5_vl": (qwen2_5_vl, _of_patches),
    "gemma3": (gemma3_vl, _of_gemma),
    "llava": (llava, lambda: {"input_ids": ids(5), "pixel_values": pixels(1, 3, 28, 28)}),
    "smolvlm": (smolvlm, lambda: {"input_ids": ids(4), "pixel_values": pixels(1, 1, 3, 56, 56)}),
    "mllama": (mllama, _of_mllama),
    "blip2": (blip2, lambda: {"input_ids": ids(4), "pixel_values": pixels(1, 3, 28, 28)}),
    "kosmos2": (kosmos2, _of_kosmos),
}
"""Name -> what makes the model, and what it is given."""
