"""`hf-offload-cache publish`, `stream` and `serve`: contexts over a network. The answer goes to stdout."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.progress import Progress
from ..report.report import size_text
from .arguments import add_cache_arguments, add_model_arguments, add_verb, port, positive
from .generate import read_document

if TYPE_CHECKING:
    from ..streaming.cells import Cells

_LEVELS = ("lossless", "fine", "default", "small", "smallest")


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "publish", publish, "publish a saved context, so that others can stream it",
        "Write a saved context as objects and a manifest, which any static web server or object store can serve.",
        encryption_key="--key",
    )  # fmt: skip
    add_model_arguments(parser)
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="a context that `generate --save` made")
    add("url", metavar="URL", help="a folder, or a URL that fsspec supports: s3://..., hf://..., http(s) by PUT")
    add("--level", choices=_LEVELS, default="default", help="compression of keys and values (default: %(default)s)")
    add("--chunk-tokens", metavar="N", type=positive, default=1024, help="tokens per object (default: %(default)s)")
    add("--private", metavar="A:B", type=_range, action="append", default=[],
        help="token range to leave out; may be repeated")  # fmt: skip
    add("--key", metavar="FILE", type=Path, help="encryption key of the context and of the publication")
    add("--plain-context", action="store_true", help="the context is not encrypted: --key is for the publication")
    add("--active-mass", metavar="X", type=float, help="measure which blocks get this share of attention, e.g. .98")
    add("--overwrite", action="store_true", help="replace an existing manifest")
    add("--no-check", action="store_true", help="do not read back and compare the written objects")

    parser = add_verb(
        verbs, "stream", stream, "answer a question about a document whose context is streamed",
        "As generate, but load the document's context from a URL, as far as that is faster.", encryption_key="--key",
    )  # fmt: skip
    add_model_arguments(parser)
    add_cache_arguments(parser)
    add = parser.add_argument
    add("url", metavar="URL")
    add("--prompt-file", metavar="FILE", type=Path, required=True, help="the document, UTF-8 text")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    add("--private", metavar="A:B", type=_range, action="append", default=[],
        help="token range not to request; may be repeated")  # fmt: skip
    add("--sparse", action="store_true", help="compute only with the active blocks, if they were published (lossy)")
    add("--key", metavar="FILE", type=Path, help="encryption key of the publication")

    parser = add_verb(
        verbs, "serve", serve, "serve published contexts, for local testing",
        "A static web server for the contexts published to FOLDER or its subfolders. It serves only their files, to 32 "
        "clients at a time. For anything beyond testing, use a production web server; any static one works.",
    )  # fmt: skip
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=port, default=8000, help="default: %(default)s; 0: any free port")


def _range(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise argparse.ArgumentTypeError(f"a range of tokens is A:B, from A up to but not including B, got {text!r}")
    return int(start), int(stop)


def publish(arguments: argparse.Namespace) -> int:
    from ..streaming.publish import publish_context
    from . import named_cache

    model, tokenizer = named_cache.load_for(arguments)
    try:
        with Progress("publish", unit="layers") as bar:
            manifest = publish_context(
                arguments.directory, arguments.url, tokenizer, arguments.key, model=model, level=arguments.level,
                chunk_tokens=arguments.chunk_tokens, private=arguments.private, overwrite=arguments.overwrite,
                active_mass=arguments.active_mass, check=not arguments.no_check,
                context_key=False if arguments.plain_context else None,
                on_progress=bar.update,
            )  # fmt: skip
    except FileExistsError:
        arguments.parser.error(
            f"{arguments.url} already contains a published context; choose another folder or pass --overwrite"
        )
    nbytes = sum(cell.bytes for row in manifest.cells for cell in row if cell is not None)
    places = itertools.product(range(manifest.chunks), range(1, manifest.layers))
    full = sum(manifest.shape(*place).nbytes for place in places)
    size = f"{manifest.tokens:,} tokens in {manifest.chunks} chunks: {size_text(nbytes)}"
    print(f"{size}, {nbytes / max(1, full):.3f} of their size in a cache ({manifest.level})")
    return 0


def stream(arguments: argparse.Namespace) -> int:
    text = read_document(arguments.prompt_file)

    import torch

    from ..streaming.stream_context import stream_context
    from . import named_cache
    from .answer import check_length, document_part, generate_answer, question_part

    name, fields = arguments.cache or named_cache.default_for(None), dict(arguments.fields)
    named_cache.check_fields(name, fields, arguments.path)
    cls = named_cache.offloading_class(name)
    model, tokenizer = named_cache.load_for(arguments)
    ids = torch.cat([document_part(tokenizer, text), question_part(tokenizer, arguments.question)], 1)
    check_length(model, ids.shape[1], arguments.max_new_tokens)
    started = time.perf_counter()
    with Progress("stream", unit="cells") as bar:
        cache = stream_context(
            arguments.url, model, ids, cls, key=arguments.key, tokenizer=tokenizer, path=arguments.path,
            private=arguments.private, sparse=arguments.sparse, on_progress=functools.partial(_show, bar), **fields,
        )  # fmt: skip
    with cache:
        print(cache.stream_report, file=sys.stderr)
        answer = generate_answer(
            model, tokenizer, ids, cache, arguments.max_new_tokens, started=started,
            on_text=functools.partial(print, end="", flush=True),
        )  # fmt: skip
        print(flush=True)
        print(f"first token after {answer.first_token_seconds:.2f} s", file=sys.stderr)
        print(answer.report, file=sys.stderr)
    return 0


def serve(arguments: argparse.Namespace) -> int:
    if not arguments.folder.is_dir():
        arguments.parser.error(f"{arguments.folder} is not a folder: publish a context to it first")
    from ..streaming.context_server import ContextServer

    try:
        made = ContextServer(arguments.folder, (arguments.host, arguments.port))
    except (OSError, UnicodeError) as error:  # a port in use or privileged; no such host
        why = getattr(error, "strerror", None) or error
        arguments.parser.error(f"--host {arguments.host} --port {arguments.port}: {why}; name others, or --port 0")
    with made as server:
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        print(f"http://{host}:{server.server_port}/", flush=True)
        server.serve_forever()
    return 0


def _show(bar: Progress, cells: Cells) -> None:
    """Show how many cells were computed and how many streamed."""
    from ..streaming.cells import State

    counts = cells.of_state()
    computed, streamed = counts[State.COMPUTED], counts[State.RECEIVED]
    total, name = cells.chunks * (cells.layers - 1), f"{computed:,} cells computed, {streamed:,} streamed"
    bar.update(computed + streamed, total, name)
