"""`hf-offload-cache publish`, `stream` and `serve`: contexts over a network. The answer goes to stdout."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import generate as documents
from .arguments import add_cache_argument, add_field_argument, add_model_arguments, new_console, port, positive

if TYPE_CHECKING:
    from ..report.progress import Progress
    from ..streaming.cells import Cells

_LEVELS = ("lossless", "fine", "default", "small", "smallest")


def add(verbs: Any) -> None:
    """Declare the verbs among the console's `verbs`."""
    parser = verbs.add_parser("publish", help="put a saved context where others can stream it from")
    parser.description = (
        "Write a saved context as objects and a manifest, which any static web server or object store can serve."
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="a context that `generate --save` made")
    add("url", metavar="URL", help="a folder, or a URL of fsspec's: s3://..., hf://..., http(s) by PUT")
    add("--level", choices=_LEVELS, default="default", help="how much is kept (default: %(default)s)")
    add("--chunk-tokens", metavar="N", type=positive, default=1024, help="of an object (default: %(default)s)")
    add("--private", metavar="A:B", type=_range, action="append", default=[], help="token range to leave out")
    add("--key", metavar="FILE", type=Path, help="encryption key of the context, and of what is published")
    add("--plain-context", action="store_true", help="the context is not encrypted: --key is of what is published")
    add("--active-mass", metavar="X", type=float, help="measure which blocks have so much of the attention, e.g. .98")
    add("--overwrite", action="store_true", help="replace the manifest that is there")
    add("--no-check", action="store_true", help="do not read back and compare what was written")
    parser.set_defaults(run=publish, parser=parser, argument_names={"encryption_key": "--key"})

    parser = verbs.add_parser("stream", help="answer a question about a document whose context is streamed")
    parser.description = "As generate, but the document's context comes from a URL, as far as that is faster."
    add_model_arguments(parser)
    add_cache_argument(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("url", metavar="URL")
    add("--prompt-file", metavar="FILE", type=Path, required=True, help="the document, UTF-8 text")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    add("--private", metavar="A:B", type=_range, action="append", default=[], help="token range not to ask for")
    add("--sparse", action="store_true", help="compute with the active blocks alone, if they were published (lossy)")
    add("--key", metavar="FILE", type=Path, help="encryption key of what is published")
    parser.set_defaults(run=stream, parser=parser, argument_names={"encryption_key": "--key"})

    parser = verbs.add_parser("serve", help="serve published contexts, for trying")
    parser.description = (
        "A static web server of the contexts that were published to FOLDER, or to folders below it. It gives their "
        "files only, to 32 clients at a time. For more than trying take a real one: nothing of it is special."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=port, default=8000, help="default: %(default)s; 0: any that is free")
    parser.set_defaults(run=serve, parser=parser)


def _range(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise argparse.ArgumentTypeError(f"a range of tokens is A:B, from A up to before B, got {text!r}")
    return int(start), int(stop)


def publish(arguments: argparse.Namespace) -> int:
    from ..report.progress import Progress
    from ..report.report import size_text
    from ..streaming.publish import publish_context
    from . import named_cache

    model, tokenizer = named_cache.load(arguments.model, arguments.dtype, arguments.device)
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
        arguments.parser.error(f"{arguments.url} has a published context: name another, or give --overwrite")
    nbytes = sum(cell.bytes for row in manifest.cells for cell in row if cell is not None)
    whole = sum(manifest.shape(chunk).nbytes for chunk in range(manifest.chunks)) * (manifest.layers - 1)
    told = f"{manifest.tokens:,} tokens in {manifest.chunks} chunks: {size_text(nbytes)}"
    print(f"{told}, {nbytes / max(1, whole):.3f} of what they take in a cache ({manifest.level})")
    return 0


def stream(arguments: argparse.Namespace) -> int:
    text = documents.read_document(arguments.prompt_file)

    import torch

    from ..report.progress import Progress
    from ..streaming.stream_context import stream_context
    from . import named_cache
    from .answer import check_length, document_part, generate_answer, question_part

    name, fields = arguments.cache or named_cache.default_for(None), dict(arguments.fields)
    named_cache.check_fields(name, fields, arguments.path)
    cls, console = named_cache.offloading_class(name), new_console(stderr=True)
    console.print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    model, tokenizer = named_cache.load(arguments.model, arguments.dtype, arguments.device)
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
        arguments.parser.error(f"{arguments.folder} is no folder: publish a context to it first")
    from ..streaming.context_server import ContextServer

    try:
        made = ContextServer(arguments.folder, (arguments.host, arguments.port))
    except (OSError, UnicodeError) as error:  # a port that is taken, or not for everybody; no such host
        why = getattr(error, "strerror", None) or error
        arguments.parser.error(f"--host {arguments.host} --port {arguments.port}: {why}; name others, or --port 0")
    with made as server:
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        print(f"http://{host}:{server.server_port}/", flush=True)
        server.serve_forever()
    return 0


def _show(bar: Progress, cells: Cells) -> None:
    """How many cells are filled, and in which way."""
    from ..streaming.cells import State

    found = cells.of_state()
    computed, streamed = found[State.COMPUTED], found[State.RECEIVED]
    total, name = cells.chunks * (cells.layers - 1), f"{computed:,} cells computed, {streamed:,} streamed"
    bar.update(computed + streamed, total, name)
