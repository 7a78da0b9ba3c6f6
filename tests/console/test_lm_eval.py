"""lm-eval through a cache: its plain scores where all is attended to, one prefill a context, and nothing left."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.utils
import peft
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from long_llama import SPARSE, long_model, some
from rope_models import long_rope
from walk import tiny_model
from words import words

from hf_offload_cache import ContextLibrary, DiskSwapCache
from hf_offload_cache.console import OffloadLM, offloading_class
from hf_offload_cache.console import main as cli
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.model import Geometry, foreign_hooks
from hf_offload_cache.registry import CACHES

OPTIONS: dict[str, Any] = {"max_length": 2000, "device": "cpu"}


def text(count: int, step: int) -> str:
    return " ".join(f"w{5 + (step * word * word) % 180}" for word in range(count))


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=place, metadata=("a task", place, 1))
        for place, one in enumerate(arguments)
    ]


def plain(**options: Any) -> Any:
    return HFLM(long_model(), tokenizer=words(), **{**OPTIONS, **options})


def ours(tmp_path: Path, **options: Any) -> Any:
    return OffloadLM(long_model(), tokenizer=words(), path=str(tmp_path), **{**OPTIONS, **options})


def likeliest(document: str) -> str:
    """The two words that the model would go on with."""
    ids = torch.tensor([words()(document)["input_ids"]])
    found = long_model().generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)[0, -2:]
    return "".join(f" w{int(word)}" for word in found)


LENGTHS = ((700, 3), (90, 5))
CHOICES = [(text(length, step), f" {text(size, 7 * size)}") for length, step in LENGTHS for size in (1, 2, 5)]
"""Three continuations of a long context, and of a short one."""
ALIKE = [(text(700, 3), end) for end in (" w7 w8", " w7 w9", " w11", " w7 w8", f" {text(9, 4)}")]
"""More of the long one: two that differ in their last word, one of another length, one once more."""


def close(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> bool:
    return all(
        own[0] == pytest.approx(theirs[0], abs=1e-4) and own[1] == theirs[1]
        for own, theirs in zip(found, expected, strict=True)
    )


SOME_CACHES = [
    pytest.param(name, marks=[] if name in ("disk-swap", "cluster") else pytest.mark.slow) for name in CACHES
]


@pytest.mark.parametrize(
    ("name", "batch"),
    [("disk-swap", 1), ("cluster", 8), *(pytest.param(name, 3, marks=pytest.mark.slow) for name in CACHES)],
)
def test_exact_scores_are_the_plain_ones(name: str, batch: int, tmp_path: Path) -> None:
    document = text(400, 3) + " w9 w8"
    first, second = likeliest(document).split()
    greedy = [(document, f" {pair}") for pair in (f"{first} {second}", first, f"{first} w3", f"w3 {second}")]
    assert "w3" not in (first, second)
    asked = instances("loglikelihood", [*CHOICES, *ALIKE, ("", " w5 w6"), *greedy])
    expected = plain().loglikelihood(asked, disable_tqdm=True)
    lm = ours(tmp_path, cache=name, exact=True, batch_size=batch)
    assert close(lm.loglikelihood(asked, disable_tqdm=True), expected)
    assert [best for _, best in expected[-4:]] == [True, True, False, False]
    rolling = instances("loglikelihood_rolling", [(text(300, 3),), (text(2500, 5),)])  # the second in windows
    expected = plain().loglikelihood_rolling(rolling, disable_tqdm=True)
    assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("disk-swap", 3),
     *(pytest.param(name, 1, marks=[] if name == "cluster" else pytest.mark.slow) for name in CACHES)],
)  # fmt: skip
def test_bitwise_scores_and_texts_are_the_plain_ones_to_the_last_bit(
    name: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where a sum in another order is another number; and all of it went through caches."""
    model, options = copy.deepcopy(long_model()).to(torch.bfloat16), {"tokenizer": words(), **OPTIONS}
    scored = instances("loglikelihood", [*CHOICES, *ALIKE])
    texts = [(text(length, length), {"max_gen_toks": 9, "do_sample": False}) for length in (700, 301, 80)]
    asked, rolling = instances("generate_until", texts), instances("loglikelihood_rolling", [(text(2500, 5),)])
    plain, made, close = HFLM(model, batch_size=batch, **options), [], offloading_class(name).close
    monkeypatch.setattr(offloading_class(name), "close", lambda self: made.append(self.get_seq_length()) or close(self))
    lm = OffloadLM(model, cache=name, path=str(tmp_path), exact="bitwise", batch_size=batch, **options)
    for kind, given in (("loglikelihood", scored), ("loglikelihood_rolling", rolling), ("generate_until", asked)):
        expected = getattr(plain, kind)(given, disable_tqdm=True)
        assert getattr(lm, kind)(given, disable_tqdm=True) == expected
        assert max(made) > 700
        made.clear()


def test_scores_of_keys_that_depend_on_the_length_are_the_plain_ones(tmp_path: Path) -> None:
    """Contexts that are shorter than the original positions, with continuations that end beyond them."""
    model, options = long_rope(700), {"tokenizer": words(), **OPTIONS}
    context = text(695, 3)
    asked = instances("loglikelihood", [*CHOICES, *((context, f" {text(length, length)}") for length in (3, 9, 9, 12))])
    expected = HFLM(model, **options).loglikelihood(asked, disable_tqdm=True)
    lm = OffloadLM(model, cache="disk-swap", path=str(tmp_path), exact=True, batch_size=3, **options)
    assert close(lm.loglikelihood(asked, disable_tqdm=True), expected)


def test_a_request_of_no_tokens_is_refused(tmp_path: Path) -> None:
    """And of more than the model has room for."""
    lm = ours(tmp_path, max_length=6)
    for context, continuation, told in (
        ([5], [], "continuation must have a token"), ([], [5], "context must have a token"),
        ([5], [6] * 7, "continuation must have at most max_length=6 tokens, got 7"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            lm._loglikelihood_tokens([(None, context, continuation)])
    asked = [(None, [5], [6, 7, 8, 9, 10, 11])]
    assert close(lm._loglikelihood_tokens(asked), plain(max_length=6)._loglikelihood_tokens(asked))


@pytest.mark.parametrize("name", SOME_CACHES)
def test_a_batch_has_the_scores_of_one_by_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache selects, and in fewer forwards: one for each token of the longest of a batch."""
    asked = instances("loglikelihood", [*CHOICES, *ALIKE])
    alone = ours(tmp_path, cache=name, **some(name)).loglikelihood(asked, disable_tqdm=True)
    shapes = forwards(monkeypatch)
    batched = ours(tmp_path, cache=name, batch_size=5, **some(name)).loglikelihood(asked, disable_tqdm=True)
    assert close(batched, alone)
    steps = [rows for rows, tokens in shapes if tokens <= 2]  # one cache adds a token of its own, once without another
    assert {rows: steps.count(rows) - (name == "spec") for rows in steps} == {5: 9, 3: 5}
    assert not close(batched, ours(tmp_path, exact=True).loglikelihood(asked, disable_tqdm=True))


@pytest.mark.parametrize("name", ["Lfm2", "Gemma3Text", pytest.param("Jamba", marks=pytest.mark.slow)])
def test_states_and_windows_go_with_a_batch(name: str, tmp_path: Path) -> None:
    """Convolutions; a state that goes on in steps of one token alone; windows."""
    model = tiny_model(getattr(transformers, f"{name}Config"))
    document, *questions = (list(torch.randint(5, 60, (count,)).tolist()) for count in (300, 20, 30))
    asked = [(None, document + question, end) for question in questions for end in ([5], [6, 7], [6, 8], [9, 9, 9])]
    asked.append((None, [7, 5], [6, 7]))
    options = {"tokenizer": words(), **OPTIONS}
    expected = HFLM(model, **options)._loglikelihood_tokens(asked, disable_tqdm=True)
    lm = OffloadLM(model, path=str(tmp_path), exact=True, batch_size=4, **options)
    assert close(lm._loglikelihood_tokens(asked, disable_tqdm=True), expected)


def test_a_model_that_keeps_a_state_alone_is_plain(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(transformers.MambaConfig)
    asked = [(None, [7, 5, 9], [6, 7]), (None, [7, 5, 9], [8])]
    lm = OffloadLM(model, tokenizer=words(), **OPTIONS)
    expected = HFLM(model, tokenizer=words(), **OPTIONS)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert lm._loglikelihood_tokens(asked, disable_tqdm=True) == expected
    assert "nothing to offload" in caplog.text


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_exact_texts_are_the_plain_ones(batch: int, tmp_path: Path) -> None:
    options = {"max_gen_toks": 9, "until": ["w4"], "do_sample": False}
    asked = instances("generate_until", [(text(length, length), options) for length in (300, 301, 80, 12, 1)])
    expected = plain(batch_size=batch).generate_until(asked, disable_tqdm=True)
    lm = ours(tmp_path, batch_size=batch, exact=True)
    assert lm.generate_until(asked, disable_tqdm=True) == expected
    assert lm.report is not None and lm.report.tokens > 1


def test_a_batch_of_texts_has_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its rows, padded ones too; each batch has a cache of its own."""
    asked = instances("generate_until", [(text(length, 3), {"max_gen_toks": 5}) for length in (1500, 1400, 1300)])
    lm, peaks, of_batch = ours(tmp_path, memory="1/3", batch_size=2), [], OffloadLM._model_generate

    def noted(self: OffloadLM, context: torch.Tensor, max_length: int, *args: Any, **kwargs: Any) -> Any:
        found = of_batch(self, context, max_length, *args, **kwargs)
        full = Geometry.of(self.model).full_kv_bytes(max_length, len(context))
        peaks.append((len(context), self.report.peak_memory_bytes * 3 / full))
        return found

    monkeypatch.setattr(OffloadLM, "_model_generate", noted)
    assert len(lm.generate_until(asked, disable_tqdm=True)) == 3
    assert [rows for rows, _ in peaks] == [2, 1] and all(0.2 < share <= 1 for _, share in peaks)
    info = lm.get_model_info()
    assert (info["cache"], info["cache_memory"], info["cache_fields"]) == ("disk-swap", "1/3", {})
    with pytest.raises(BudgetError):
        ours(tmp_path, memory=1000).loglikelihood(instances("loglikelihood", CHOICES), disable_tqdm=True)
    with pytest.raises(ConfigError, match="floor must be"):
        ours(tmp_path, memory="1/13", floor="1/2")


def test_goal_chooses_the_fields_of_a_request(tmp_path: Path) -> None:
    asked = instances("generate_until", [(text(1900, 3), {"max_gen_toks": 2})])
    lms = {goal: ours(tmp_path, memory="2MiB", goal=goal) for goal in (None, "speed")}
    for lm in lms.values():
        lm.generate_until(asked, disable_tqdm=True)
    by_default, quick = (lm.report.selected_fraction for lm in lms.values())
    assert by_default > quick  # it selects 560 tokens, and speed 400
    assert [lm.get_model_info()["cache_goal"] for lm in lms.values()] == [None, "speed"]
    for goal, memory, message in (("best", "1/3", "goal must be"), ("speed", None, "give memory too")):
        with pytest.raises(ConfigError, match=message):
            ours(tmp_path, memory=memory, goal=goal)
    with pytest.raises(ConfigError, match="no fields, path, memory or goal"):
        ours(tmp_path, cache="dynamic", goal="speed")


def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Told the rows and tokens of each forward."""
    shapes: list[tuple[int, int]] = []
    forward = type(long_model()).forward

    def counted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(long_model()), "forward", counted)
    monkeypatch.setattr(foreign_hooks, "_KNOWN", (*foreign_hooks._KNOWN, __name__))  # else it would keep guesses away
    return shapes


@pytest.mark.parametrize("fields", [{"exact": True}, SPARSE])
def test_a_context_is_prefilled_once_and_what_is_shared_once(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions of three answers each about one document, and one about another."""
    document, shapes = text(400, 3), forwards(monkeypatch)
    asked = [(f"{document} {text(20, seed)}", f" w{answer}") for seed in (7, 11) for answer in (5, 6, 9)]
    lm = ours(tmp_path, cache="disk-swap", **fields)
    lm.loglikelihood(instances("loglikelihood", [*asked, (text(90, 5), " w5 w6")]), disable_tqdm=True)
    shared = 400 + _common_words(text(20, 7), text(20, 11))
    whole = [419, 419, 89] if fields is SPARSE else [shared, 420 - shared, 420 - shared, 91]
    assert sorted(tokens for _, tokens in shapes if tokens > 2) == sorted(whole)
    assert len(shapes) == len(whole) + (4 if fields is SPARSE else 0)  # answers differ in their last token


@pytest.mark.parametrize("batch", [1, 8])
def test_a_second_run_begins_with_what_a_library_has(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scores and texts are the plain ones, with a key too; a damaged library costs time and nothing else."""
    key = None if batch == 1 else tmp_path / "key"
    if key is not None:
        key.write_bytes(bytes(range(32)))
    asked = instances("loglikelihood", [*CHOICES, *ALIKE])
    texts = instances("generate_until", [(text(300, 3), {"max_gen_toks": 5, "do_sample": False})])
    expected = plain().loglikelihood(asked, disable_tqdm=True), plain().generate_until(texts, disable_tqdm=True)
    shapes, tokens, library = forwards(monkeypatch), [], tmp_path / "library"
    for run in ("first", "second", "damaged"):
        if run == "damaged":
            for file in library.glob("*/*.records"):
                file.write_bytes(bytes(file.stat().st_size))
        shapes.clear()
        lm = ours(tmp_path, cache="disk-swap", exact=True, batch_size=batch, library=str(library), key=key)
        assert close(lm.loglikelihood(asked, disable_tqdm=True), expected[0])
        tokens.append(sum(count for _, count in shapes))
        assert lm.generate_until(texts, disable_tqdm=True) == expected[1]
        assert lm.get_model_info()["cache_reused_tokens"] > 0 or run != "second"
        assert ("the library is not used for the rest" in caplog.text) is (run == "damaged")
    assert tokens[1] < 0.2 * tokens[0] <= 0.2 * tokens[2]
    assert {one.manifest.key_check is None for one in ContextLibrary(library, key=key).entries()} == {key is None}
    with pytest.raises(ConfigError, match="library: with exact=bitwise"):
        ours(tmp_path, exact="bitwise", library=str(library))
    lm = ours(tmp_path, memory="2MiB", library=str(tmp_path / "small"), library_bytes="1KB", exact=True)
    assert close(lm.loglikelihood(asked, disable_tqdm=True), expected[0])
    assert "a context was not kept: max_bytes is" in caplog.text


def _common_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=True)
    return next(place for place, pair in enumerate(pairs) if pair[0] != pair[1])


def test_scores_go_through_the_selection(tmp_path: Path) -> None:
    """The first token's, too; as one generates by hand, whatever was scored before."""
    lm, model = ours(tmp_path, cache="disk-swap", **SPARSE), long_model()
    found = lm.loglikelihood(instances("loglikelihood", CHOICES), disable_tqdm=True)
    exact = ours(tmp_path, exact=True).loglikelihood(instances("loglikelihood", CHOICES), disable_tqdm=True)
    for (context, continuation), own in zip(CHOICES, found, strict=True):
        ids, following = (torch.tensor([lm.tok_encode(one)]) for one in (context, continuation.strip()))
        with DiskSwapCache(model, path=tmp_path, **SPARSE) as cache, torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
            given = torch.cat([ids[:, -1:], following[:, :-1]], 1)
            logits = torch.cat([model(one, past_key_values=cache).logits[0] for one in given.split(1, 1)])
        expected = logits.log_softmax(-1).gather(1, following[0][:, None]).sum()
        assert own[0] == pytest.approx(float(expected), abs=1e-4)
    assert max(abs(own[0] - theirs[0]) for own, theirs in zip(found[:3], exact[:3], strict=True)) > 1e-3


def test_requests_that_are_too_short_for_a_share_are_answered_plainly_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact, quiet = plain(), {"disable_tqdm": True}
    scored = instances("loglikelihood", [(text(40, 3), " w5 w6"), (text(40, 3), " w7"), (text(1900, 3), " w6 w8")])
    asked = instances("generate_until", [(text(length, 3), {"max_gen_toks": 5}) for length in (40, 1900)])
    lm = ours(tmp_path, memory="1/3")
    assert close(lm.loglikelihood(scored, **quiet)[:2], exact.loglikelihood(scored[:2], **quiet))
    assert "memory=1/3 was too little for some of 3" in caplog.text and "and 2 transformers' own" in caplog.text
    assert lm.generate_until(asked, **quiet)[0] == exact.generate_until(asked[:1], **quiet)[0]
    assert "and 3 transformers' own" in caplog.text and lm.get_model_info()["cache_plain_requests"] == 3
    assert lm.get_model_info()["cache_floor_requests"] == 0
    assert lm.get_model_info()["cache"] == "disk-swap, but dynamic for 3 of 5 requests"
    short = ours(tmp_path, memory="1/3")
    short.loglikelihood(scored[:2], **quiet)
    assert short.get_model_info()["cache"] == "dynamic, though disk-swap was asked for"
    strict = ours(tmp_path, memory="1/3", strict=True)
    for own, requests in ((strict.loglikelihood, scored), (strict.generate_until, asked)):
        with pytest.raises(BudgetError):
            own(requests, **quiet)


@pytest.mark.parametrize(
    ("memory", "model", "steps"),
    [("1/3", None, [44]), (None, None, [39, 1, 1, 1, 1, 1]), ("1/3", transformers.JambaConfig, [39, 1, 1, 1, 1, 1])],
)
def test_what_is_answered_plainly_goes_in_one_piece(
    memory: str | None, model: Any, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short request is no slower than by `hf`."""
    lm, seen = ours(tmp_path, memory=memory), []
    if model is not None:
        options = {"tokenizer": words(), **OPTIONS}
        lm = OffloadLM(tiny_model(model), path=str(tmp_path), memory=memory, **options)
    forward = lm._forward

    def noted(ids: torch.Tensor, cache: Any, **kept: int) -> Any:
        seen.append(ids.shape[1])
        return forward(ids, cache, **kept)

    monkeypatch.setattr(lm, "_forward", noted)
    asked = instances("loglikelihood", [(text(40, 3), f" {text(5, 7)}")])
    found = lm.loglikelihood(asked, disable_tqdm=True)
    assert seen == steps
    theirs = HFLM(lm.model, tokenizer=words(), **OPTIONS)
    assert close(found, theirs.loglikelihood(asked, disable_tqdm=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model and its tokenizer, to be loaded by name."""
    folder = tmp_path_factory.mktemp("model")
    long_model().save_pretrained(folder)
    words().save_pretrained(folder)
    return str(folder)


def test_what_from_pretrained_takes_goes_to_the_model(saved: str, tmp_path: Path) -> None:
    """And what is an attribute of its configuration; fields go to the cache, hf's own arguments to hf."""
    lm = OffloadLM(saved, path=str(tmp_path), device="cpu", dtype="bfloat16", trust_remote_code=True, num_selected=40,
                   attn_implementation="eager", use_safetensors=True, rms_norm_eps=0.5, max_length=2000)  # fmt: skip
    config = lm.model.config
    assert (config._attn_implementation, config.rms_norm_eps, lm.model.dtype) == ("eager", 0.5, torch.bfloat16)
    assert lm.fields == {"num_selected": 40}
    found = lm.loglikelihood(instances("loglikelihood", CHOICES), disable_tqdm=True)
    assert all(score < 0 for score, _ in found)


@pytest.mark.parametrize(("wrong", "hint"), [
    ({"num_selekted": 3}, "did you mean 'num_selected'"), ({"load_in_4bits": True}, "did you mean 'load_in_4bit'"),
    ({"colour": "blue"}, "neither a field of cache=disk-swap"), ({"cache": "dynamic", "num_selected": 3}, "neither"),
])  # fmt: skip
def test_what_nobody_takes_is_refused(wrong: dict[str, Any], hint: str, saved: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        OffloadLM(saved, **wrong)


def test_what_there_is_not_is_refused_before_a_model_is_loaded() -> None:
    """And what decides how a model is loaded needs a name."""
    for wrong in ({"cache": "disc"}, {"num_selekted": 3}, {"memory": "a lot"}, {"cache": "dynamic", "memory": "1/2"},
                  {"dtype": "flot16"}, {"library": "a", "encryption_key": "b"}):  # fmt: skip
        with pytest.raises(ConfigError):
            OffloadLM("there is no such model", **wrong)
    for wrong in ({"attn_implementation": "eager"}, {"peft": "a folder"}, {"load_in_4bit": True}):
        for model in (None, long_model()):
            with pytest.raises(ConfigError, match="give pretrained=NAME"):
                OffloadLM(model, **wrong)


def test_adapters_that_are_prompts_are_refused() -> None:
    """Each forward would put them in again."""
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(copy.deepcopy(long_model()), options)
    with pytest.raises(ConfigError, match="cache=dynamic"):
        OffloadLM(adapted, tokenizer=words(), **OPTIONS)


def command(does: Any, *arguments: str) -> int:
    """The exit code of this library's command, whose lm-eval does just that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.__main__.cli_evaluate", does)
        return cli.main(["lm-eval", *arguments])


def test_the_table_says_which_cache_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And how many requests did not use it."""
    monkeypatch.setattr("lm_eval.utils.make_table", lambda results, *others: f"table of {results['results']}")
    before = lm_eval.utils.make_table

    def run() -> None:
        counts = {"cache_requests": 5, "cache_plain_requests": 3, "cache_floor_requests": 2}
        used = "disk-swap, but dynamic for 3 of 5 requests"
        print(lm_eval.utils.make_table({"results": "a task", "config": {"cache": used, **counts}}))
        counts["cache_reused_tokens"] = 1234
        print(lm_eval.utils.make_table({"results": "another", "config": {"cache": used, **counts}}))
        print(lm_eval.utils.make_table({"results": "hf's", "config": {}}, "groups"))

    assert command(run) == 0
    said = ["cache: disk-swap, but dynamic for 3 of 5 requests", "requests: 5, left plain: 3, at floor: 2"]
    read = "tokens from the library: 1,234"
    assert capsys.readouterr().out.splitlines() == [
        *said, "table of a task", *said, read, "table of another", "table of hf's"
    ]  # fmt: skip
    assert lm_eval.utils.make_table is before


@pytest.mark.parametrize("error", [ConfigError("did you\n mean 'disk-swap'?"), ValueError("Tasks not found: nedle")])
def test_a_typo_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert command(fail) == 2
    said = capsys.readouterr().err
    assert said == f"hf-offload-cache: {type(error).__name__}: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_an_error_of_an_evaluation_keeps_its_traceback(kind: type[Exception]) -> None:
    code = compile("def evaluate():\n    raise kind('a bug')", "evaluator.py", "exec")
    made: dict[str, Any] = {"kind": kind}
    exec(code, made)
    with pytest.raises(kind, match="a bug"):
        command(made["evaluate"])


OWN = ["--memory", "1/13", "--set", "num_selected=40", "--cache", "cluster", "--strict", "--library", "a folder",
       "--library-bytes", "20GB", "--key", "key.bin"]  # fmt: skip
THEIRS = ["--model", "hf", "--model_args", "pretrained=a/b,dtype=bfloat16", "--tasks", "one", "two", "-b", "4"]
GIVEN = {"cache": "cluster", "memory": "1/13", "strict": True, "num_selected": 40, "library": "a folder",
         "library_bytes": "20GB", "key": "key.bin"}  # fmt: skip


@pytest.mark.parametrize("words", [[*OWN, *THEIRS], [*THEIRS, *OWN], [*OWN[:2], *THEIRS[:6], *OWN[2:], *THEIRS[6:]],
                                   [*OWN, "run", *THEIRS]])  # fmt: skip
def test_an_existing_command_line_stays_as_it_is(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model `hf` is `hf-offload`, and all other arguments are lm-eval's, wherever this library's options are."""
    called: list[dict[str, Any]] = []
    (tmp_path / "key.bin").write_bytes(bytes(range(32)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", lambda **given: called.append(given))
    monkeypatch.setattr("lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks", lambda self, metadata: None)
    before = sys.argv
    assert cli.main(["lm-eval", *words]) == 0
    assert called[0]["model"] == "hf-offload" and called[0]["batch_size"] == "4"
    assert called[0]["tasks"] == ["one", "two"]
    assert called[0]["model_args"] == {"pretrained": "a/b", "dtype": "bfloat16", **GIVEN}
    assert sys.argv is before and "simple_evaluate" not in vars(lm_eval)
    assert get_model("hf-offload") is OffloadLM and get_model("hf") is HFLM


def test_arguments_of_a_file_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", lambda **given: called.append(given))
    monkeypatch.setattr("lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks", lambda self, metadata: None)
    (tmp_path / "own.yaml").write_text("model: hf\nmodel_args: {pretrained: a/b}\ntasks: [one]\n")
    assert cli.main(["lm-eval", "--config", str(tmp_path / "own.yaml"), "--memory", "1/3"]) == 0
    assert called[0]["model_args"] == {"pretrained": "a/b", "memory": "1/3"} and called[0]["use_cache"] is None


def test_answers_that_lm_eval_keeps_are_of_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files of answers (`--use_cache`) have names of their own, except with `hf`'s own cache."""
    names: list[str] = []
    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", lambda **given: names.append(given["use_cache"]))
    monkeypatch.setattr("lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks", lambda self, metadata: None)
    plain, options = ["--tasks", "one", "--use_cache", "answers"], ["--memory", "1/3", "--set", "exact=True"]
    for added in (options, options, ["--model_args", "memory=1/3,exact=True,dtype=float32"], ["--memory", "1/4"], [],
                  ["--cache", "dynamic"], ["--cache", "cluster"]):  # fmt: skip
        assert cli.main(["lm-eval", *plain, *added]) == 0
    first, again, as_arguments, *others = names
    assert first == again == as_arguments and re.fullmatch(r"answers_disk-swap-[0-9a-f]{8}", first)
    assert len({first, *others}) == 5 and others[2] == "answers" and others[3].startswith("answers_cluster-")


@pytest.mark.parametrize(("words", "told"), [
    (["--model", "vllm", "--memory", "1/3"], "--model must be hf or hf-offload, got 'vllm'"),
    (["--model_args", "memory=1/2", "--memory", "1/3"], "memory is both an option and in --model_args"),
    (["--model_args", "library=a", "--library", "b"], "library is both an option and in --model_args"),
    (["--library-bytes", "1GB"], "--library-bytes is for a library: give --library DIR too"),
    (["--key", "nowhere"], "--key is for a library: give --library DIR too"),
    (["--floor", "1MiB"], "--floor 1MiB is for a memory that is a fraction"),
    (["--library", "a", "--set", "exact=bitwise"], "--library: with --set exact=bitwise each text is computed in one"),
    (["--library", "a", "--library-bytes", "a lot"], "--library-bytes must be"),
    (["--library", "no/folder"], "Error: folder 'no/folder' cannot be made"),
    (["--library", "a", "--key", "nowhere"], "EncryptionKeyError: --key: 'nowhere' cannot be read"),
    (["--library", "a", "--set", "encryption_key=b"], "too: give --key FILE, and no other key"),
    (["--model_args", "library=a,encryption_key=b"], "too: give --key FILE, and no other key"),
    (["--memory", "much"], "--memory must be"), (["--set", "num_selekted=3"], "did you mean 'num_selected'"),
    (["--model_args", "pretrained=a/b,dtype=flot16"], "dtype must be a type of torch"),
])  # fmt: skip
def test_what_this_library_cannot_do_is_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed before lm-eval looks for its tasks, and nothing is written."""
    asked: list[Any] = []
    monkeypatch.setattr("lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks", asked.append)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lm-eval", "--tasks", "one", *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"hf-offload-cache: \w+Error: ", said) and told in said
    assert asked == [] and not any(tmp_path.iterdir())


def test_other_words_of_lm_eval_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """And so is an option that nobody knows."""
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", "--memory", "1/3", "--model", "hf", "--taks", "one"])
    assert end.value.code == 2 and "lm-eval" in capsys.readouterr().err


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert cli.main(["lm-eval", "--tasks", "one"]) == 2
    assert "pip install 'hf-offload-cache[eval]'" in capsys.readouterr().err
