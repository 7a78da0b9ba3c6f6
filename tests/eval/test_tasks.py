"""Tasks for lm-eval: their texts are as long as asked, the same each time, and have what they ask for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from eval import lm_eval as ours
from eval.lm_eval import TASKS
from eval.tasks.long_context import samples
from hf_offload_cache.console.default_model import load_default_tokenizer

RECALL = (
    "needle_single", "needle_multikey", "needle_multivalue", "needle_multiquery", "variable_tracking", "common_words",
    "frequent_words", "long_generation",
)  # fmt: skip
FOUND = dict(zip(RECALL, (1, 1, 4, 4, 5, 10, 3, 24), strict=True))
"""Answers of each."""


def made(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(getattr(samples, name)(**arguments)["test"])


@pytest.mark.parametrize("name", [*RECALL, "document_qa"])
def test_texts_have_what_is_asked_for_and_are_as_long_as_asked(name: str) -> None:
    tokenizer, arguments = load_default_tokenizer(), {"max_seq_lengths": [1024, 2048], "samples": 2, "seed": 3}
    found = made(name, **arguments)
    assert found == made(name, **arguments) and found != made(name, **{**arguments, "seed": 4})
    assert [one["length"] for one in found] == [1024, 1024, 2048, 2048] and found[0]["input"] != found[1]["input"]
    for one in found:
        tokens = len(tokenizer(one["input"])["input_ids"])
        assert 0.75 * one["length"] < tokens <= one["length"]  # what is left is less than a paragraph
        wanted = one["choices"] if name == "document_qa" else one["outputs"]
        assert all(answer in one["input"] for answer in wanted)
        assert len(set(wanted)) == (4 if name == "document_qa" else FOUND[name])


def test_the_most_frequent_words_are_that() -> None:
    for name in ("common_words", "frequent_words"):
        (one,) = made(name, max_seq_lengths=[2048], samples=1)
        words = one["input"].split("\n")[1].split()
        seldom = max(words.count(word) for word in set(words) - set(one["outputs"]) if word.isalpha())
        assert min(words.count(word) for word in one["outputs"]) >= seldom


def test_chains_are_apart() -> None:
    (one,) = made("variable_tracking", max_seq_lengths=[1024], samples=1)
    given = dict(line.removeprefix("VAR ").rstrip(".").split(" = ") for line in one["input"].split("\n\n")[:-1]
                 if line.startswith("VAR "))  # fmt: skip
    value = one["input"].rsplit("assigned the value ")[1].split()[0]

    def of(name: str) -> str:
        own = given[name]
        return of(own.removeprefix("VAR ")) if own.startswith("VAR ") else own

    assert {name for name in given if of(name) == value} == set(one["outputs"]) and len(given) == 10


def test_two_facts_lead_to_the_answer() -> None:
    for one in made("document_qa", max_seq_lengths=[1024], samples=4):
        text, question = one["input"].rsplit("Question: ", 1)
        keeper = question.split("where ")[1].split(" is the keeper")[0]
        room = text.split(f"{keeper} is the keeper of the ")[1].split(".")[0]
        thing = text.split(f"In the {room} they keep the ")[1].split(".")[0]
        assert one["choices"][one["answer"]] == thing


def test_recall_is_a_share() -> None:
    doc = {"outputs": ["123", "Xyz"]}
    assert [samples.recall(doc, [text])["recall"] for text in ("it is 123 and xyz", "123", "")] == [1, 0.5, 0]


def test_lm_eval_runs_them_all(tmp_path: Path) -> None:
    """With the real model, through a cache in a quarter of the memory."""
    manager = TaskManager(include_path=str(TASKS), metadata={"max_seq_lengths": [1024], "samples": 1})
    found = lm_eval.simple_evaluate(
        ours.OffloadLM(memory="1/4", path=str(tmp_path), device="cpu"), tasks=["long_context"], task_manager=manager,
        apply_chat_template=False, gen_kwargs="max_gen_toks=4",
    )  # fmt: skip
    assert found is not None and set(found["results"]) >= {*RECALL, "document_qa"}
    assert found["config"]["cache"] == "disk-swap" and found["config"]["cache_memory"] == "1/4"
    assert all(0 <= found["results"][name]["recall,none"] <= 1 for name in RECALL)


def test_the_command_line_finds_them(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["lm_eval", "validate", "--tasks", "needle_single,document_qa"]):
        with mock.patch.object(sys, "exit"):
            ours.main()
        assert sys.argv[-2:] == ["--include_path", str(TASKS)]
    assert "All tasks found and valid" in capsys.readouterr().out
