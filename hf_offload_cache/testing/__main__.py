"""`python -m hf_offload_cache.testing MODEL`: is an exact cache right with your model and your transformers?"""

from __future__ import annotations

import argparse
import sys

from ..console.arguments import add_cache_argument
from ..console.named_cache import load
from ..registry import CACHES, cache_class
from .model_walk import as_table, maker, walk_model


def main(arguments: list[str] | None = None) -> int:
    """Walk over a model and print a table. Returns 0 if all is exact, 1 if something is not, 2 without a model or
    cache."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_offload_cache.testing",
        description="Compare an exact cache with DynamicCache on a model: greedy, beams, padding, chunked prefill; "
        "tokens and the logits of every step.",
    )
    parser.add_argument("model", help="a folder, or a Hub name")
    add_cache_argument(parser)
    parser.add_argument("--dtype", default="float32", help="of the weights; other types are not judged when streamed")
    parser.add_argument("--device", help="default: CUDA if available")
    parser.add_argument("--prompt-tokens", type=int, default=56)
    parser.add_argument("--new-tokens", type=int, default=16)
    given = parser.parse_args(arguments)
    try:
        make = maker(cache_class(given.cache or next(iter(CACHES))))
        model, _ = load(given.model, given.dtype, given.device)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    findings = walk_model(model, given.prompt_tokens, given.new_tokens, make)
    wrong = [finding for finding in findings if finding.failed]
    print(as_table(findings))
    print(f"{type(model).__name__}: {f'{len(wrong)} wrong' if wrong else 'exact'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
