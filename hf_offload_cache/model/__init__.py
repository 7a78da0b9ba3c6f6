"""The seams in a transformers model, attention, the look-ahead, and what of a model matters to a cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import PrepareInputs as PrepareInputs
    from .attach import release as release
    from .attention_call import TAG as TAG
    from .attention_call import AttentionCall as AttentionCall
    from .attention_call import Tag as Tag
    from .chosen_latents import attend_to_latents as attend_to_latents
    from .chosen_latents import bytes_of_call as bytes_of_call
    from .chosen_latents import planned_bytes as planned_bytes
    from .fingerprint import check_fingerprint as check_fingerprint
    from .fingerprint import full_fingerprint as full_fingerprint
    from .geometry import Geometry as Geometry
    from .geometry import KeptLayer as KeptLayer
    from .geometry import LayerShape as LayerShape
    from .look_ahead import LookAhead as LookAhead
    from .look_ahead import reason_against_pieces as reason_against_pieces
    from .masks import additive_mask as additive_mask
    from .masks import mask_at as mask_at
    from .masks import seen_before as seen_before
    from .masks import shown as shown
    from .media import media_of as media_of
    from .place import TESTED as TESTED
    from .place import decoder_blocks as decoder_blocks
    from .place import no_place as no_place
    from .plain_caches import may_crop as may_crop
    from .seam import Attachable as Attachable
    from .seam import Seam as Seam
    from .stream_attention import attend_block as attend_block
    from .stream_attention import attend_block_reference as attend_block_reference
    from .weights import SAMPLE as SAMPLE
    from .weights import quantized_bytes as quantized_bytes

_HOME = {
    "Attachable": "seam",
    "AttentionCall": "attention_call",
    "Geometry": "geometry",
    "KeptLayer": "geometry",
    "LayerShape": "geometry",
    "LookAhead": "look_ahead",
    "PrepareInputs": "attach",
    "SAMPLE": "weights",
    "Seam": "seam",
    "TAG": "attention_call",
    "TESTED": "place",
    "Tag": "attention_call",
    "additive_mask": "masks",
    "attend_block": "stream_attention",
    "attend_block_reference": "stream_attention",
    "attend_to_latents": "chosen_latents",
    "bytes_of_call": "chosen_latents",
    "check_fingerprint": "fingerprint",
    "decoder_blocks": "place",
    "full_fingerprint": "fingerprint",
    "mask_at": "masks",
    "may_crop": "plain_caches",
    "media_of": "media",
    "no_place": "place",
    "planned_bytes": "chosen_latents",
    "quantized_bytes": "weights",
    "reason_against_pieces": "look_ahead",
    "release": "attach",
    "seen_before": "masks",
    "shown": "masks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
