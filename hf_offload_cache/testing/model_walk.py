"""The walk on one model: does an exact cache equal `DynamicCache` in every way that `generate` decodes?"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..methods.disk_swap.cache import DiskSwapCache
from ..model.look_ahead import reason_against_pieces
from ..model.plain_caches import dynamic_cache

TOLERANCE = 2e-3
"""Largest difference of a logit, in standard deviations of the reference's logits (float32, streamed blocks)."""


@dataclass(frozen=True)
class Decoded:
    """A case's token ids (rows, length) and the logits of every step (steps, rows, vocabulary)."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """Distance of a result from its reference; `deviation` in standard deviations of the reference's logits."""

    same_tokens: bool
    deviation: float
    bitwise: bool

    @property
    def exact(self) -> bool:
        """Same tokens, and logits within the tolerance."""
        return self.same_tokens and self.deviation <= TOLERANCE


def compare(reference: Decoded, result: Decoded) -> Comparison:
    """Compare tokens and logits. The deviation is infinite if shapes or NaN differ.

    Raises `ValueError` for a reference whose logits are not numbers.
    """
    same_tokens = torch.equal(reference.tokens, result.tokens)
    expected, got = reference.logits, result.logits
    if expected.shape != got.shape:
        return Comparison(same_tokens, float("inf"), False)
    finite = expected.isfinite()
    if not finite.any() or expected.isnan().any():
        raise ValueError("the reference's logits are not numbers: the comparison would prove nothing")
    if not torch.equal(expected[~finite], got[~finite]) or not got[finite].isfinite().all():
        return Comparison(same_tokens, float("inf"), False)
    difference = (expected[finite] - got[finite]).abs().max() / expected[finite].std()
    return Comparison(same_tokens, float(difference), same_tokens and torch.equal(expected, got))


SMALL: dict[str, Any] = {"group_size": 4, "num_recent": 8, "block_tokens": 16}
"""Fields with which a short history spans many groups and several blocks."""

MODES: dict[str, bool | str] = {"streamed": True, "bitwise": "bitwise"}
"""Name -> the field `exact`."""

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"rows": 1},
    "beams": {"rows": 2, "num_beams": 3},
    "left padding": {"rows": 3, "padding": 11},
    "chunked prefill": {"rows": 1, "prefill_chunk_size": 16},
    "padded chunked prefill": {"rows": 3, "padding": 11, "prefill_chunk_size": 16},
}
"""Name -> rows, padded positions of the second row (the third has twice as many), and options of `generate`."""

MakeCache = Callable[..., Any]
"""(model, exact=True or "bitwise") -> a cache with `close`."""


@dataclass(frozen=True)
class CaseResult:
    """One case in one mode."""

    case: str
    mode: str
    comparison: Comparison | None
    """None: there is nothing to compare, because of `reason`."""
    reason: str = ""
    failed: bool = False

    def __str__(self) -> str:
        verdict = "WRONG" if self.failed else "not compared" if self.comparison is None else "exact"
        far = "" if self.comparison is None else f"{self.comparison.deviation:.1e}"
        return f"{self.case:24} {self.mode:10} {verdict:14} {far:10} {self.reason}".rstrip()


def maker(cache: Callable[..., Any]) -> MakeCache:
    """A function that makes caches of a class for the walk, without a disk."""
    return functools.partial(cache, engine="memory", **SMALL)


def walk_model(
    model: Any, prompt_tokens: int = 56, new_tokens: int = 16, make: MakeCache | None = None
) -> list[CaseResult]:
    """Compare a cache with `DynamicCache` on `model` in every case: tokens, and the logits of every step. `make` None:
    `DiskSwapCache`.

    "bitwise" must be bitwise equal. "streamed" must be exact within `TOLERANCE` if the model is float32. Narrower types
    round more than that, and a token may depend on a tie, so their deviation is reported and not judged. Cases that
    `DynamicCache` cannot run are not compared; an error of the cache is a failure. The model is left unchanged.
    """
    found: list[CaseResult] = []
    make = maker(DiskSwapCache) if make is None else make
    for case, options in CASES.items():
        chunk = options.get("prefill_chunk_size", prompt_tokens)
        if (why := reason_against_pieces(model, chunk, prompt_tokens)) is not None:
            found.append(CaseResult(case, "-", None, f"not in pieces: {why}"))
            continue
        try:
            reference = decode(model, dynamic_cache(model), prompt_tokens, new_tokens, **options)
            if not reference.logits.isfinite().any():
                raise ValueError("the logits are not finite")
        except Exception as error:  # a model may refuse a case in any way
            found.append(CaseResult(case, "-", None, f"DynamicCache: {_one_line(error)}", failed=case == "greedy"))
            continue
        for mode, exact in MODES.items():
            new = functools.partial(make, model, exact=exact)
            found.append(_compare(model, case, mode, reference, new, prompt_tokens, new_tokens))
    return found


def _compare(
    model: Any, case: str, mode: str, reference: Decoded, make: Callable[[], Any], prompt_tokens: int, new_tokens: int
) -> CaseResult:
    cache = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that cannot be sparse
            cache = make()
            result = decode(model, cache, prompt_tokens, new_tokens, **CASES[case])
        comparison = compare(reference, result)
    except Exception as error:
        return CaseResult(case, mode, None, _one_line(error), failed=True)
    finally:
        if cache is not None:
            cache.close()
    if mode == "bitwise":
        return CaseResult(case, mode, comparison, failed=not comparison.bitwise)
    if model.dtype != torch.float32:
        return CaseResult(case, mode, comparison, f"not judged: {model.dtype} rounds more than the tolerance")
    return CaseResult(case, mode, comparison, failed=not comparison.exact)


def decode(
    model: Any, cache: Any, prompt_tokens: int, new_tokens: int, *, rows: int, padding: int = 0, **options: Any
) -> Decoded:
    """Run `generate` on random ids, the same for every cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (rows, prompt_tokens), generator=_seeded())
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * padding] = 0
    ids = ids.masked_fill(mask == 0, 0)
    with torch.no_grad():
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            past_key_values=cache,
            use_cache=True,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **{"num_beams": 1, **options},
        )
    return Decoded(out.sequences.cpu(), torch.stack([step.float().cpu() for step in out.logits]))


def as_table(findings: Iterable[CaseResult]) -> str:
    """A line for each finding; deviations are in standard deviations of the logits."""
    return "\n".join([f"{'case':24} {'mode':10} {'':14} deviation", *map(str, findings)])


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
