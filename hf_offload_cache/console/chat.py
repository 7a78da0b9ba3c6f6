"""`hf-offload-cache chat`: a conversation about documents, in one cache. What was read is kept in a library."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OURS, ConfigError
from ..report.report import size_text
from .arguments import (
    PROGRAM,
    OutputFileError,
    PromptFileError,
    PromptTooLongError,
    add_cache_arguments,
    add_model_arguments,
    add_verb,
    cell,
    complain,
    in_options,
    new_console,
    new_table,
    positive,
    printable,
    read_text,
    say,
)

if TYPE_CHECKING:
    from ..contexts.library import ContextLibrary
    from .answer import Chat

_HELP = """\
/context    tokens, positions left, and what is stored where
/report     the cache's report
/save DIR   save the documents and the conversation as a context
/new        drop the conversation and keep the documents
/quit       end; so does Ctrl-D
Ctrl-C stops an answer. A question that begins with a slash needs a space before it."""

LIBRARY_BYTES = "20GB"
"""Default limit of the library's disk space."""
_UNSTATED = 65_536
"""Tokens for the conversation with a model that states no number of positions."""
_PLANNED = 4_096
"""Tokens for the conversation that a memory limit is planned for."""
_EXPECTED: tuple[type[Exception], ...] = (PromptTooLongError, OSError, *OURS)
"""Errors after which a conversation at a terminal goes on."""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "chat", run, "ask questions about your own documents, in a conversation",
        "Read documents (text, Markdown, HTML; PDF and DOCX with the extra `documents`), and answer questions about "
        "them. What was read is kept in a library, so that the next start on the same files does not read them again. "
        "Questions are typed, piped in (one a line), or given with --question.",
        max_bytes="--library-bytes", key="--key", encryption_key="--key", folder="--library", max_batch="",
        max_context="--set max_context",
    )  # fmt: skip
    add_model_arguments(parser)
    add_cache_arguments(parser)
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=Path, help="a document: .txt, .md, .html, .pdf, .docx, or other text")
    add("--question", metavar="TEXT", action="append", default=[], dest="questions",
        help="ask this and end; may be repeated: the questions of one conversation")  # fmt: skip
    add("--max-new-tokens", metavar="N", type=positive, default=256, help="most tokens of an answer (default: 256)")
    add("--prefill-chunk", metavar="N", type=positive,
        help="tokens per prefill forward (default: 1024, or all if the model requires it)")  # fmt: skip
    add("--memory", metavar="SIZE", help="memory limit: 300MiB, bytes, or a fraction of the full KV cache: 1/13")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--library", metavar="DIR", type=Path,
        help="folder of what was read before (default: in the user's cache folder)")  # fmt: skip
    place.add_argument("--no-library", action="store_true", help="keep nothing of the documents on the disk")
    add("--library-bytes", metavar="SIZE",
        help=f"most disk space of the library; the least recently used are removed (default: {LIBRARY_BYTES})")
    add("--key", metavar="FILE", type=Path, help="encryption key of the library: 32 bytes or 64 hex digits")
    add("--json", action="store_true", help="print one line of JSON an answer instead of the text")


def run(arguments: argparse.Namespace) -> int:
    if arguments.no_library and (arguments.library_bytes is not None or arguments.key is not None):
        arguments.parser.error("--library-bytes and --key are for a library: leave out --no-library")
    text = join_documents([(path, read_document_file(path)) for path in arguments.files])

    from ..interop.reuse import Reuse
    from . import named_cache
    from .answer import Chat, document_part, question_part

    fields = dict(arguments.fields)
    name = arguments.cache or named_cache.default_for(None)
    named_cache.offloading_class(name)
    named_cache.check_fields(name, fields, arguments.path, arguments.memory)
    named_cache.check_library_key(None if arguments.no_library else "", fields, ", or --no-library")
    library = _library(arguments)

    tokenizer = named_cache.load_tokenizer(arguments.model)
    document = document_part(tokenizer, text)
    positions = named_cache.load_positions(arguments.model)
    first = question_part(tokenizer, (arguments.questions or [""])[0])
    asked = document.shape[1] + first.shape[1], arguments.max_new_tokens
    _check_length(*asked, positions)
    planned = document.shape[1] + (_UNSTATED if arguments.memory is None else _PLANNED)
    if (chosen := fields.pop("max_context", None)) is not None:
        planned = chosen
        if chosen < sum(asked):
            needed = f"{sum(asked):,} tokens of the documents, a question and an answer"
            raise ConfigError(f"--set max_context={chosen} is less than the {needed}: raise it, or leave it out")
    elif arguments.memory is None:
        planned = positions or planned
    limit = min(planned, positions or planned)

    model, tokenizer = named_cache.load_for(arguments)
    with contextlib.ExitStack() as closing, warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: say(
            f"{PROGRAM}: {in_options(' '.join(str(message).split()), arguments)}"
        )
        reuse = None if library is None else closing.enter_context(contextlib.closing(Reuse(library)))
        settings = {"path": arguments.path, "fields": fields, "memory": arguments.memory}
        chat = Chat(model, tokenizer, document, name, reuse, limit, arguments.prefill_chunk, **settings)
        closing.enter_context(contextlib.closing(chat))
        chat.begin()
        say(chat.said)
        return _converse(chat, arguments)


# ------------------------------------------------------------------------------------------------------ documents


def read_document_file(path: Path) -> str:
    """The text of a document, by the file's ending. Raises `PromptFileError`, also if there is no text, and
    `ConfigError` if a package for this kind of file is missing."""
    kind = path.suffix.lower()
    if kind in (".pdf", ".docx"):
        text = _unpacked(path, kind)
    elif kind in (".html", ".htm", ".xhtml"):
        text = html_text(read_text(path, "file", PromptFileError))
    else:
        text = read_text(path, "file", PromptFileError)
    if not text.strip():
        scanned = ": if its pages are pictures, it needs OCR first" if kind == ".pdf" else ""
        raise PromptFileError(f"file {str(path)!r} has no text ({len(text):,} characters){scanned}")
    return text


def _unpacked(path: Path, kind: str) -> str:
    """The text of a PDF or DOCX file."""
    module, package = {".pdf": ("pypdf", "pypdf"), ".docx": ("docx", "python-docx")}[kind]
    try:
        reader: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"file {str(path)!r} needs the package {package}, which is not installed: "
            "pip install 'hf-offload-cache[documents]'"
        ) from error
    try:
        with open(path, "rb") as file:
            if kind == ".pdf":
                return "\n\n".join(page.extract_text() for page in reader.PdfReader(file).pages)
            return "\n\n".join(_docx_blocks(reader.Document(file)))
    except OSError as error:
        raise PromptFileError(f"file {str(path)!r} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # its type depends on what is wrong with the file
        raise PromptFileError(f"file {str(path)!r} cannot be read as {kind[1:].upper()}: {error}") from error


def _docx_blocks(document: Any) -> Iterator[str]:
    """Paragraphs, and tables with a line a row."""
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            yield "\n".join("\t".join(cell.text for cell in row.cells) for row in block.rows)
        elif block.text.strip():
            yield block.text


def join_documents(documents: Sequence[tuple[Path, str]]) -> str:
    """One text of all documents; each begins with its file's name if there are several."""
    if len(documents) == 1:
        return documents[0][1].strip()
    return "\n\n".join(f"{path.name}:\n\n{text.strip()}" for path, text in documents)


def html_text(html: str) -> str:
    """The visible text of an HTML page: an empty line between blocks, a line an item or table row."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return parser.text()


class _Text(HTMLParser):
    """Collects the text of a page."""

    _HIDDEN = re.compile("script|style|template|noscript|svg|math")
    _BLOCK = re.compile(
        "address|article|aside|blockquote|body|d[dlt]|details|div|fieldset|figcaption|figure|footer|form|h[1-6r]|header|"
        "main|nav|ol|p|pre|section|summary|table|title|ul"
    )
    _LINE = re.compile("br|li|tr|option|caption")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden = self._as_is = 0
        self._breaks = 0
        """Line ends before the next text."""
        self._bullet = False
        """A list item has begun, and its text has not."""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += self._HIDDEN.fullmatch(tag) is not None
        self._as_is += tag == "pre"
        self._break(tag)
        self._bullet = tag == "li" or (self._bullet and self._BLOCK.fullmatch(tag) is not None)
        if tag in ("td", "th") and not self._breaks:
            self._parts.append("\t")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (self._HIDDEN.fullmatch(tag) is not None))
        self._as_is = max(0, self._as_is - (tag == "pre"))
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._as_is:
            words = " ".join(data.split())
            data = f"{' ' * data[:1].isspace()}{words}{' ' * (data[-1:].isspace() and bool(words))}"
        if (self._breaks or self._bullet) and not data.strip():
            return
        if self._breaks or self._bullet:
            data = data if self._as_is else data.lstrip()
            self._parts.append("\n" * self._breaks + "- " * self._bullet)
        self._parts.append(data)
        self._breaks, self._bullet = 0, False

    def _break(self, tag: str) -> None:
        least = 2 if self._BLOCK.fullmatch(tag) else 1 if self._LINE.fullmatch(tag) else 0
        self._breaks = max(self._breaks, 1 if self._bullet and least else least)

    def text(self) -> str:
        """The text so far, without blanks at the ends of lines."""
        text = "".join(self._parts).replace(" \t", "\t")
        return "\n".join(line.rstrip() for line in text.splitlines()).strip()


# ------------------------------------------------------------------------------------------------------ the console


def _library(arguments: argparse.Namespace) -> ContextLibrary | None:
    """The library of the options. Raises `ConfigError`, `ContextError`, `EncryptionKeyError`."""
    if arguments.no_library:
        return None
    from ..contexts.library import ContextLibrary
    from .default_model import NoHomeError, models_folder

    folder = arguments.library
    if folder is None:
        try:
            folder = models_folder().parent / "library"
            folder.parent.mkdir(parents=True, exist_ok=True)
        except (NoHomeError, OSError) as error:
            say(f"nothing is kept in a library: {error}")
            return None
    return ContextLibrary(folder, arguments.library_bytes or LIBRARY_BYTES, key=arguments.key)


def _check_length(prompt_tokens: int, new_tokens: int, positions: int | None) -> None:
    """Raise `PromptTooLongError` unless documents, a question and an answer fit."""
    if positions is not None and prompt_tokens + new_tokens > positions:
        raise PromptTooLongError(
            f"the documents and a question have {prompt_tokens:,} tokens and an answer may have {new_tokens:,}, "
            f"together {prompt_tokens + new_tokens:,}, but the model has {positions:,} positions: name a model for "
            f"longer texts with --model (`hf-offload-cache models` lists some), or shorten the documents by "
            f"{prompt_tokens + new_tokens - positions:,} tokens"
            + (f", or give --max-new-tokens {positions - prompt_tokens}" if prompt_tokens < positions else "")
        )


def _converse(chat: Chat, arguments: argparse.Namespace) -> int:
    """Answer the questions, and carry out commands; the exit code."""
    typed = not arguments.questions and sys.stdin is not None and sys.stdin.isatty()
    if typed:
        say("/help lists the commands; Ctrl-C stops an answer")
    for line in arguments.questions or _lines(typed):
        try:
            if line.startswith("/") and not arguments.questions:
                if line.split()[0] == "/quit":
                    break
                _command(chat, line)
            elif line.strip():
                _ask(chat, line.strip(), arguments)
        except BrokenPipeError:
            raise
        except _EXPECTED as error:
            if not typed:
                raise
            complain(error, arguments)
    return 0


def _lines(typed: bool) -> Iterator[str]:
    """Lines of stdin. At a terminal, Ctrl-C drops the line, and Ctrl-D ends."""
    if not typed:
        yield from () if sys.stdin is None else (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
    while True:
        try:
            if sys.stdout.isatty():
                line = input("> ")
            else:
                print("> ", end="", file=sys.stderr, flush=True)
                line = input()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D ends the conversation")
            continue
        yield line


def _ask(chat: Chat, question: str, arguments: argparse.Namespace) -> None:
    """Print the answer: its text as it comes, or a line of JSON."""
    stored, answer = chat.cache.tokens, None
    show = _Shown(sys.stdout.isatty()) if not arguments.json else lambda text: None
    try:
        answer = chat.ask(question, arguments.max_new_tokens, show)
    finally:
        if not arguments.json:
            print(flush=True)
    if arguments.json:
        values = answer.to_dict()
        del values["report"]  # of all answers; /report shows it
        values = {"question": question, "stopped": chat.stopped, **values}
        values |= {"computed_tokens": answer.prompt_tokens - stored, "document_tokens": chat.document.shape[1]}
        values |= {"library_tokens": chat.from_library, "read_seconds": chat.read_seconds, "tokens_left": chat.left}
        print(json.dumps(values), flush=True)
    elif chat.stopped != "end":
        say({"interrupted": "(stopped)", "length": "(cut off: --max-new-tokens, or no tokens are left)"}[chat.stopped])


class _Shown:
    """Prints the pieces of an answer without blanks before and line ends behind it; on a terminal, characters that act
    on it are escapes."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self._pending = terminal, ""
        self._begun = False

    def __call__(self, text: str) -> None:
        text = self._pending + (text if self._begun else text.lstrip())
        shown = text.rstrip()
        self._pending, self._begun = text[len(shown) :], self._begun or bool(shown)
        print(printable(shown, keep="\n\t\u200d") if self._terminal else shown, end="", flush=True)


def _command(chat: Chat, line: str) -> None:
    """Carry out a line that begins with a slash. Raises `ConfigError`, `OutputFileError`."""
    name, _, rest = line.strip().partition(" ")
    if name == "/save":
        if not rest.strip():
            raise ConfigError("/save needs a folder: /save DIR")
        folder = Path(rest.strip()).expanduser()
        if os.path.lexists(folder) or not folder.parent.is_dir():
            why = "it exists already" if folder.parent.is_dir() else f"there is no folder {str(folder.parent)!r}"
            raise OutputFileError(f"/save {str(folder)!r} cannot be made: {why}")
        chat.cache.save(folder, tokenizer=chat.tokenizer)
        say(f"saved {chat.cache.tokens:,} tokens in {folder}")
    elif name == "/context":
        new_console(stderr=True).print(_context(chat))
    elif name == "/report":
        print(chat.cache.report(), file=sys.stderr)
    elif name == "/new":
        chat.begin()
        say(chat.said)
    elif name == "/help":
        say(_HELP)
    else:
        raise ConfigError(f"there is no command {name!r}: /help lists them; a question needs a space before the slash")


def _context(chat: Chat) -> Any:
    """A table of what the conversation holds."""
    report = chat.cache.report()
    library = "-" if chat.reuse is None else str(chat.reuse.library.folder)
    table = new_table("", "", show_header=False)
    for name, value in (
        ("documents", f"{chat.document.shape[1]:,} tokens"),
        ("conversation", f"{chat.ids.shape[1] - chat.document.shape[1]:,} tokens, {chat.answers:,} answers"),
        ("left", f"{chat.left:,} of {chat.limit:,} tokens"),
        ("cache", type(chat.cache).__name__),
        ("memory", f"{size_text(report.memory_bytes)} of {size_text(report.full_kv_bytes)} with full KV"),
        ("disk", size_text(report.disk_bytes)),
        ("library", library),
    ):
        table.add_row(name, cell(value))
    return table
