"""How long does a step take, and what does it read, with a model that chooses by its own indexer what it attends to?

Attention of DeepSeek V3.2's and GLM-5's shape: two layers with random weights, and an expert's MLP instead of all of
them. Histories are made without a prefill. Random weights choose without regard to a text; see `Inputs` for how alike
the choices of successive steps are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.memory import free_memory
from hf_offload_cache.tuning import without_seams

from ..contenders import in_turns
from ..synthetic import Inputs, Shape, attend_to_nothing
from .common import Rows, Study, main

DYNAMIC = "DynamicCache"
LIKENESS = 0.97
"""Likeness of successive inputs, as that of `bench_decode`, which has a real model's hit rate on text there."""


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention with an indexer. `latents`: those that are stored, without and with a rotary embedding."""

    prefix: str
    """Name of the architecture's classes in transformers."""
    hidden: int
    intermediate: int
    heads: int
    query_rank: int
    latents: tuple[int, int]
    key_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    topk: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a layer of `DynamicCache`, in 16 bits: latents and the indexer's key."""
        return 2 * (sum(self.latents) + self.index_dim)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of a token's keys and values in a layer, which attention is given, in 16 bits."""
        return 2 * self.heads * (self.key_dim + self.latents[1] + self.value_dim)

    def build(self) -> Any:
        """A model of two layers in bfloat16."""
        config = getattr(transformers, f"{self.prefix}Config")(
            vocab_size=256, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=2,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, q_lora_rank=self.query_rank,
            kv_lora_rank=self.latents[0], qk_rope_head_dim=self.latents[1], qk_nope_head_dim=self.key_dim,
            v_head_dim=self.value_dim, index_topk=self.topk, index_n_heads=self.index_heads,
            index_head_dim=self.index_dim, first_k_dense_replace=2, mlp_layer_types=["dense"] * 2,
            max_position_embeddings=262144, eos_token_id=None, pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.prefix}ForCausalLM")
        return model._from_config(config, dtype=torch.bfloat16).eval()


SHAPES = {
    "deepseek-v3.2": Attention("DeepseekV32", 7168, 2048, 128, 1536, (512, 64), 128, 128, 64, 128, 2048),
    "glm-5": Attention("GlmMoeDsa", 6144, 2048, 64, 2048, (512, 64), 192, 256, 32, 128, 2048),
    "deepseek-v3.2, an eighth": Attention("DeepseekV32", 896, 256, 16, 192, (512, 64), 128, 128, 8, 128, 512),
    "tiny": Attention("DeepseekV32", 64, 32, 4, 32, (32, 8), 16, 16, 4, 16, 24),
}
"""An eighth has as wide latents and an eighth of the heads, and chooses a quarter as many tokens."""


class Contender:
    """A cache with a history, and a model. Its seconds are those of this thread, so that other work on the machine
    counts little."""

    def __init__(self, name: str, cache: Any, model: Any, shape: Attention, tokens: int) -> None:
        self.name, self.cache, self.model, self.shape = name, cache, model, shape
        self.inputs = Inputs(Shape(hidden=shape.hidden), LIKENESS)
        self.seconds: list[float] = []
        self.wall: list[float] = []
        self.piece_seconds: list[float] = []
        self.ahead_bytes = 0
        """Bytes of reads for guesses."""
        for layer_idx in range(2 if tokens else 0):
            self._fill(layer_idx, tokens)
        if name != DYNAMIC:
            cache.storage.prefetcher.flush()
            self._count_ahead(cache.storage.prefetcher)

    def _count_ahead(self, prefetcher: Any) -> None:
        """Add to `ahead_bytes` from now on."""
        read = prefetcher.read

        def counted(store: Any, ids: Any, out: torch.Tensor, *, guess: bool = False) -> Any:
            self.ahead_bytes += guess * out.nbytes
            return read(store, ids, out, guess=guess)

        prefetcher.read = counted

    def _fill(self, layer_idx: int, tokens: int) -> None:
        """As `synthetic.fill`: latents and indexer's keys as their norms leave them."""
        generator = torch.Generator().manual_seed(layer_idx)
        with torch.no_grad():
            latents = [
                torch.randn(1, 1, tokens, width, generator=generator).bfloat16() for width in self.shape.latents
            ]
            keys = torch.randn(1, tokens, self.shape.index_dim, generator=generator).bfloat16()
            returned = self.cache.update(*latents, layer_idx)
            self.cache.update_indexer(keys, layer_idx)
            if self.name != DYNAMIC:
                query = returned[0].new_zeros(1, self.shape.heads, 1, returned[0].shape[3])
                attend_to_nothing(self.cache, self.model, layer_idx, query, *returned)

    def _run(self, embeddings: torch.Tensor) -> tuple[float, float]:
        """Seconds of this thread, and of the clock."""
        start = time.thread_time(), time.perf_counter()
        with torch.no_grad():
            self.model(inputs_embeds=embeddings, past_key_values=self.cache, logits_to_keep=1)
        return time.thread_time() - start[0], time.perf_counter() - start[1]

    def step(self) -> None:
        """Decode one token."""
        own, clock = self._run(self.inputs.next())
        self.seconds.append(own)
        self.wall.append(clock)

    def piece(self, tokens: int) -> None:
        """The next piece of a prompt."""
        self.piece_seconds.append(self._run(torch.cat([self.inputs.next() for _ in range(tokens)], 1))[0])

    def row(self, tokens: int) -> dict[str, Any]:
        """Figures of the steps since `restart`."""
        shape = self.shape
        given = tokens if self.name == DYNAMIC else min(tokens, shape.topk)
        row: dict[str, Any] = {"ms": median(self.seconds), "wall_ms": median(self.wall), "steps": len(self.seconds)}
        row |= {"cache_bytes": 2 * shape.token_bytes * tokens, "expanded_bytes": shape.expanded_bytes * given}
        if self.name != DYNAMIC:
            report, stores = self.cache.report(), self.cache.storage.stores
            steps = len(self.seconds)
            row |= {"cache_bytes": report.memory_bytes, "hit_rate": report.hit_rate}
            row |= {"ready_rate": report.prefetch_hit_rate, "ahead_bytes": self.ahead_bytes / steps}
            row["bytes_read"] = sum(store.bytes_read for store in stores) / steps
            row["wait_ms"] = 1e3 * report.decode_stall_seconds / steps
        return row

    def restart(self) -> None:
        """Begin to count."""
        self.seconds, self.wall, self.ahead_bytes = [], [], 0
        if self.name != DYNAMIC:
            self.cache.storage.reset_counters()


Contending = tuple[str, float | None, int | None, bool]
"""Name, slots, `indexer_bits` and `look_ahead`; slots None: `DynamicCache`."""


def median(seconds: list[float]) -> float:
    """In milliseconds."""
    return 1e3 * statistics.median(seconds)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each shape, length and contender: `DynamicCache` where its keys and values fit the free memory, and
    a `DiskSwapCache` for each number of slots, in units of what the indexer chooses; for other bits of an indexer's
    key, with the most slots; and those that read ahead, whose processor time includes the guesses."""
    ours: list[Contending] = [(f"slots: {many}", many, None, False) for many in arguments.slots]
    ours += [(f"indexer_bits={bits}", arguments.slots[-1], bits, False) for bits in arguments.bits]
    if arguments.look_ahead:
        ours += [(f"read ahead, slots: {many}", many, None, True) for many in arguments.slots]
    for name in arguments.shapes:
        shape, model = SHAPES[name], None
        for tokens in arguments.tokens:
            if rows.has(shape=name, tokens=tokens):
                continue
            model = shape.build() if model is None else model
            if (free_memory() or 0) > 3 * shape.expanded_bytes * tokens:
                contenders = [(DYNAMIC, None, None, False), *ours]
            else:
                contenders = ours
                rows.say(f"{name}, {tokens:,} tokens: {DYNAMIC} would not fit")
            for row in _measured(shape, model, tokens, contenders, arguments):
                rows.add(shape=name, tokens=tokens, **row)
    return summary(rows.rows)


def _measured(
    shape: Attention, model: Any, tokens: int, contenders: list[Contending], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each contender. All take their steps in turns."""
    plain, made = without_seams(model), list[Contender]()
    try:
        for name, slots, bits, ahead in contenders:
            if slots is None:
                cache, own = DynamicCache(config=plain.config), plain
            else:
                fields = {"reuse_capacity": int(slots * shape.topk), "indexer_bits": bits, "path": arguments.path}
                fields["look_ahead"] = ahead
                cache, own = DiskSwapCache(model, **fields), model
            made.append(Contender(name, cache, own, shape, tokens))
        for one, step in in_turns(made, arguments.steps + arguments.settles, arguments.settles):
            if step == arguments.settles:
                one.restart()
            one.step()
        found = {one.name: one.row(tokens) for one in made}
        if arguments.piece:
            last = [one for one in made if one.name.startswith("slots")][-1]
            for one, _ in in_turns([made[0], last], arguments.pieces, 1):
                one.piece(arguments.piece)
                one.cache.crop(-arguments.piece)
            for one in (made[0], last):
                found[one.name]["piece_ms"] = median(one.piece_seconds)
            if arguments.prompt:
                for one in (made[0], last):
                    one.cache.crop(-one.cache.get_seq_length())
                    one.piece_seconds = []
                for one, _ in in_turns([made[0], last], tokens // arguments.piece, 4):
                    one.piece(arguments.piece)
                for one in (made[0], last):
                    found[one.name]["prompt_ms"] = 1e3 * sum(one.piece_seconds)
        return [{"name": name, **row} for name, row in found.items()]
    finally:
        for one in made:
            if one.name != DYNAMIC:
                one.cache.close()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By shape and length: times of `DynamicCache` over those of the cache with most slots, hits by slots, and what was
    in slots or read ahead."""
    table: dict[str, dict[str, Any]] = {}
    for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in rows):
        each = {row["name"]: row for row in rows if (row["shape"], row["tokens"]) == (shape, tokens)}
        full, found = each.pop(DYNAMIC, None), {}
        last = [row for row in each.values() if row["name"].startswith("slots")][-1]
        for name in ("ms", "piece_ms", "prompt_ms"):
            if full is not None and name in full:
                found[f"{name} of {DYNAMIC} over ours"] = full[name] / last[name]
        ahead = {name: row for name, row in each.items() if row["ahead_bytes"]}
        found |= {f"hits, {name}": row["hit_rate"] for name, row in each.items() if name not in ahead}
        found |= {f"in memory when needed, {name}": row["ready_rate"] for name, row in ahead.items()}
        table[f"{shape}, {tokens}"] = found
    return {"shapes": table}


STUDY = Study(
    "native_sparse", __doc__, run,
    {
        "shapes": (["deepseek-v3.2", "glm-5"], "attention's shape", list(SHAPES)),
        "tokens": ([32768, 131072], "tokens of a history"),
        "slots": ([0.0, 1.0, 2.0, 4.0], "slots in memory, over the tokens that an indexer chooses"),
        "bits": ([8, 0], "also these bits of an indexer's key in memory, with the most slots"),
        "look_ahead": (False, "also read ahead, with each number of slots"),
        "steps": (8, "timed steps"),
        "settles": (2, "steps before them"),
        "piece": (0, "also pieces of a prompt of so many tokens after that history, with the most slots"),
        "pieces": (4, "how many pieces"),
        "prompt": (False, "also a complete prompt of so many tokens as the history has, in such pieces"),
    },
    {"shapes": ["tiny"], "tokens": [256], "slots": [0.0, 2.0], "steps": 4, "piece": 32, "pieces": 2, "prompt": True},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
