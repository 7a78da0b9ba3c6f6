"""A real model on real text, teacher-forced: prefill, a step, and what it says, next to the caches in memory, in turns.
Beyond the length that the model was trained for, only times mean something."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import SelectiveCache, piece_size
from hf_offload_cache.tuning import distance, sample_ids, without_seams

from .bench import machine
from .contenders import in_turns
from .needles import parse_setting
from .profiles import PROFILES, Profile, throttle
from .studies.common import Options, one_run, say, write_json
from .studies.contexts import open_cache, peak_share, prefill, replay

ALONE, DYNAMIC, STATIC = "model alone", "DynamicCache", "StaticCache"
SHORT = 64
"""Tokens of history of the model alone."""
TOKENS = 7936
"""Tokens of the history: with the steps after it, no more positions than the model was trained for."""
FIRST = 16
"""Steps after a prefill that are told apart from those that follow."""
USUAL: dict[str, dict[str, Any]] = {"1/13": {"memory": "1/13"}, "default": {}}
"""Name -> fields of `DiskSwapCache`, or of another: see `open_cache`."""


class Contender:
    """One cache over rows of ids (B, tokens), prefilled, then fed token by token."""

    def __init__(self, name: str, model: PreTrainedModel, cache: Any, ids: torch.Tensor, tokens: int) -> None:
        self.name, self.model, self.cache, self.ids = name, model, cache, ids
        self.place = SHORT if name == ALONE else tokens
        self.seconds: list[float] = []
        self.logits: list[torch.Tensor] = []
        self.prefill_seconds = 0.0
        self.prefill_bytes = 0
        """That a prefill in pieces has read."""

    def _feed(self, first: int, last: int) -> torch.Tensor:
        with torch.no_grad():
            fed = self.ids[:, first:last]
            logits = self.model(fed, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize()
        return logits

    def prefill(self, chunk: int | None) -> None:
        """All of the history, `chunk` tokens at a time; None: 2,048, or all where the model needs that."""
        chunk = piece_size(self.model, 0, self.place, chunk, usual=2048) or self.place
        start = time.perf_counter()
        for first in range(0, self.place, chunk):
            self._feed(first, min(first + chunk, self.place))
        self.prefill_seconds = time.perf_counter() - start

    def step(self) -> None:
        """One more token of the text."""
        if not self.seconds and isinstance(self.cache, SelectiveCache):
            self.prefill_bytes = self.cache.report().bytes_read
        start = time.perf_counter()
        logits = self._feed(self.place, self.place + 1)
        self.seconds.append(time.perf_counter() - start)
        self.logits.append(logits.float())
        self.place += 1

    def row(self, reference: torch.Tensor | None, alone: float | None) -> dict[str, Any]:
        """Measured values: seconds of prefill and of a step; with `reference`, logits (B, S, V) of `DynamicCache`, the
        distance to it. `alone`: seconds of a step of the model alone."""
        first, settled = self.seconds[:FIRST], self.seconds[FIRST:]
        quartiles = statistics.quantiles(settled, n=4)
        row: dict[str, Any] = {
            "prefill_seconds": self.prefill_seconds,
            "median_seconds": quartiles[1],
            "quartiles": [quartiles[0], quartiles[2]],
            "mean_seconds": statistics.mean(settled),
            "first_over_settled": statistics.median(first) / quartiles[1],
        }
        if alone is not None:
            row["beyond_the_model_seconds"] = quartiles[1] - alone
        if reference is not None:
            row |= distance(reference, torch.stack(self.logits, 1))
        if isinstance(self.cache, SelectiveCache):
            report = self.cache.report()
            steps = max(1, report.decode_steps)
            row |= {"hit_rate": report.hit_rate, "compressed_fraction": report.compressed_fraction}
            row["waited_share"] = report.decode_stall_seconds / report.decode_seconds
            row["waited_seconds"] = report.decode_stall_seconds / steps
            row["unpack_seconds"] = report.unpack_seconds / steps
            row |= peak_share(self.cache)
            row["looked_share"] = report.look_bytes / steps / (report.full_kv_bytes / 2)  # of all keys
            row["bytes_read_a_step"] = (report.bytes_read - self.prefill_bytes) / steps
            shown = ("summary_bytes", "rank", "reuse_capacity", "num_selected", "num_opened", "look_ahead")
            row["fields"] = {name: getattr(self.cache.config, name, None) for name in shown}
        return row


def run(
    model: PreTrainedModel, ids: torch.Tensor, tokens: int, steps: int, chunk: int | None,
    ours: dict[str, dict[str, Any]], in_memory: Iterable[str] = (DYNAMIC, STATIC), turn: int = 8,
    shared_prefill: bool = False, path: str | None = None, say: Callable[[str], Any] = lambda line: None,
    profile: str | Profile = "own",
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """By contender: `Contender.row`. Each is prefilled by itself with `tokens` of ids (B, at least tokens + steps);
    then all take `turn` steps in turns. Caches in memory run on a model without seams. `shared_prefill`: the first row,
    prefilled once, is put into every row of every cache, and followed by its own text. `profile`: the
    device that ours read from, or its name in `PROFILES`."""
    plain = without_seams(model)
    shared = None
    if shared_prefill:
        ids = ids[:1].expand(len(ids), -1)
        shared = prefill(model, ids[:1, :tokens]).repeated(len(ids))
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = []
        for name in (ALONE, *in_memory, *ours):
            if name == STATIC:
                cache: Any = StaticCache(config=plain.config, max_cache_len=tokens + steps)
            elif name in (ALONE, DYNAMIC):
                cache = DynamicCache(config=plain.config)
            else:
                cache = stack.enter_context(open_cache(model, ours[name], tokens + steps, path, len(ids)))
                throttle(cache, PROFILES[profile] if isinstance(profile, str) else profile)
            one = Contender(name, model if name in ours else plain, cache, ids, tokens)
            if shared is None or name == ALONE:
                one.prefill(chunk)
            else:
                start = time.perf_counter()
                replay(cache, one.model, shared)
                one.prefill_seconds = time.perf_counter() - start
            say(f"{name}: prefill {one.prefill_seconds:.1f} s")
            contenders.append(one)
        for one, _ in in_turns(contenders, steps, turn):
            one.step()
        exact = next((torch.stack(one.logits, 1) for one in contenders if one.name == DYNAMIC), None)
        alone = statistics.median(contenders[0].seconds[FIRST:])
        rows = {}
        for one in contenders:
            rows[one.name] = one.row(None if one.name == ALONE else exact, None if one.name == ALONE else alone)
            say(f"{one.name}: {_shown(rows[one.name])}")
        return rows


def _shown(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    text = f"{1e3 * row['median_seconds']:.1f} ms a step ({1e3 * low:.0f} to {1e3 * high:.0f})"
    if "beyond_the_model_seconds" in row:
        text += f", {1e3 * row['beyond_the_model_seconds']:.1f} beyond the model"
    text += f", first {FIRST} x{row['first_over_settled']:.2f}"
    for name in ("kl", "top1", "hit_rate", "waited_share"):
        if row.get(name) is not None:
            text += f", {name} {row[name]:.3f}"
    if "peak_share" in row:
        text += f", peak 1/{1 / row['peak_share']:.1f}, {row['fields']}"
    return text


def text_rows(ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(batch, length) of ids (T,): rows begin at even distances. Raises `ValueError` where there are too few."""
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids):,} tokens, and {length:,} are needed: give fewer --tokens")
    return torch.stack([ids[(start := row * (len(ids) - length) // batch) : start + length] for row in range(batch)])


OPTIONS: Options = {
    "tokens": (TOKENS, "tokens of history"),
    "batch": (1, "rows"),
    "steps": (112, "decoding steps"),
    "chunk": (int, "tokens of a prefill call (default: 2048)"),
    "only_ours": (False, "only our caches and the model alone"),
    "shared_prefill": (False, "prefill once, in one piece, for all rows and caches"),
    "profile": ("own", "device that our caches read from", PROFILES),
    "device": ("cpu", "torch device of the model"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """A real model on real text: prefill, steps, and distance to DynamicCache."""
    given = one_run(main.__doc__, OPTIONS, argv, settings=True)
    tokens, steps = (1024, 24) if given.quick else (given.tokens, given.steps)
    asked: dict[str, Any] = {"shared_prefill": given.shared_prefill, "path": given.path, "profile": given.profile}

    model, tokenizer = load_default_model(torch.bfloat16)
    model.to(given.device)
    ids = text_rows(sample_ids(None, tokenizer)[0], given.batch, tokens + steps + 1).to(given.device)
    trained = model.config.max_position_embeddings
    if tokens + steps > trained:
        say(f"positions beyond the {trained:,} that the model was trained for: times mean something, distances less")
    usual = {"default": USUAL["default"]} if given.quick else USUAL  # a thirteenth of so few tokens is too little
    ours, in_memory = dict(map(parse_setting, given.set)) or usual, () if given.only_ours else (DYNAMIC, STATIC)
    rows = run(model, ids, tokens, steps, given.chunk, ours, in_memory, say=say, **asked)
    asked |= {"tokens": tokens, "batch": given.batch, "steps": steps, "chunk": given.chunk, "device": given.device}
    if given.json:
        found = {**asked, "beyond_training": tokens + steps > trained, "rows": rows}
        write_json(given.json, {"machine": machine(given.path), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
