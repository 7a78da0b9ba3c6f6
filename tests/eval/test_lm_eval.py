"""lm-eval through a cache: its plain scores where all is attended to, one prefill a context, and nothing left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from long_llama import SPARSE, long_model
from words import words

from eval.continuations import Continuations, runs
from eval.lm_eval import OffloadLM
from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import BudgetError, ConfigError
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


def close(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> bool:
    return all(
        own[0] == pytest.approx(theirs[0], abs=1e-4) and own[1] == theirs[1]
        for own, theirs in zip(found, expected, strict=True)
    )


LENGTHS = ((700, 3), (90, 5))
CHOICES = [(text(length, step), f" {text(size, 7 * size)}") for length, step in LENGTHS for size in (1, 2, 5)]
"""Three continuations of a long context, and of a short one."""


@pytest.mark.parametrize("name", list(CACHES))
def test_exact_scores_are_the_plain_ones(name: str, tmp_path: Path) -> None:
    asked = instances("loglikelihood", [*CHOICES, (text(400, 3) + " w9 w8", " w7"), ("", " w5 w6")])
    expected = plain().loglikelihood(asked, disable_tqdm=True)
    found = ours(tmp_path, cache=name, exact=True).loglikelihood(asked, disable_tqdm=True)
    for own, theirs in zip(found, expected, strict=True):
        assert own[0] == pytest.approx(theirs[0], abs=1e-4) and own[1] == theirs[1]
    rolling = instances("loglikelihood_rolling", [(text(300, 3),), (text(2500, 5),)])  # the second in windows
    expected, lm = plain().loglikelihood_rolling(rolling, disable_tqdm=True), ours(tmp_path, cache=name, exact=True)
    assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("batch", [1, 2])
def test_exact_texts_are_the_plain_ones(batch: int, tmp_path: Path) -> None:
    options = {"max_gen_toks": 9, "until": ["w4"], "do_sample": False}
    asked = instances("generate_until", [(text(length, length), options) for length in (300, 301, 80)])
    expected = plain(batch_size=batch).generate_until(asked, disable_tqdm=True)
    lm = ours(tmp_path, batch_size=batch, exact=True)
    assert lm.generate_until(asked, disable_tqdm=True) == expected
    assert lm.report is not None and lm.report.tokens > 80


def test_dynamic_is_plain(tmp_path: Path) -> None:
    asked = instances("loglikelihood", CHOICES)
    lm = OffloadLM(long_model(), cache="dynamic", tokenizer=words(), **OPTIONS)
    assert lm.loglikelihood(asked, disable_tqdm=True) == plain().loglikelihood(asked, disable_tqdm=True)


def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Told the tokens of each forward of more than one."""
    counts: list[int] = []
    forward = type(long_model()).forward

    def counted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1:
            counts.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(long_model()), "forward", counted)
    return counts


def test_a_context_is_prefilled_once_and_what_is_shared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions of three answers each about one document, and one about another."""
    document, counts = text(400, 3), prefilled(monkeypatch)
    asked = [(f"{document} {text(20, seed)}", f" w{answer}") for seed in (7, 11) for answer in (5, 6, 9)]
    lm = ours(tmp_path, cache="disk-swap", **SPARSE)
    lm.loglikelihood(instances("loglikelihood", [*asked, (text(90, 5), " w5 w6")]), disable_tqdm=True)
    shared = 400 + _common_words(text(20, 7), text(20, 11))
    assert sorted(counts) == sorted([shared, 419 - shared, 419 - shared, 89])


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


def test_a_budget_is_of_each_request(tmp_path: Path) -> None:
    asked = instances("loglikelihood", [(text(1200, 3), " w5"), (text(1200, 3), " w6 w7")])
    lm = ours(tmp_path, memory="1/2")
    assert all(score < 0 for score, _ in lm.loglikelihood(asked, disable_tqdm=True))
    with pytest.raises(BudgetError):
        ours(tmp_path, memory=1000).loglikelihood(asked, disable_tqdm=True)
    info = lm.get_model_info()
    assert (info["cache"], info["cache_memory"], info["cache_fields"]) == ("disk-swap", "1/2", {})


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


def test_weights_of_four_bits(saved: str, tmp_path: Path) -> None:
    """transformers has no argument of the old name; the scores are those of the model as transformers loads it."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    options = {"device": "cpu", "max_length": 2000}
    lm = OffloadLM(saved, path=str(tmp_path), load_in_4bit=True, bnb_4bit_quant_type="nf4", exact=True, **options)
    assert isinstance(lm.model.model.layers[0].mlp.up_proj, bitsandbytes.nn.Linear4bit)
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, quantization_config=bits)
    asked = instances("loglikelihood", CHOICES[3:])
    expected = HFLM(model, tokenizer=words(), **options).loglikelihood(asked, disable_tqdm=True)
    assert close(lm.loglikelihood(asked, disable_tqdm=True), expected)


def test_the_default_model_goes_where_it_is_told() -> None:
    lm = OffloadLM(device="meta", dtype="bfloat16")
    assert (lm.model.device.type, lm.model.dtype, lm.device.type) == ("meta", torch.bfloat16, "meta")


@pytest.mark.parametrize(("wrong", "hint"), [
    ({"num_selekted": 3}, "did you mean 'num_selected'"), ({"load_in_4bits": True}, "did you mean 'load_in_4bit'"),
    ({"colour": "blue"}, "neither a field of cache=disk-swap"), ({"cache": "dynamic", "num_selected": 3}, "neither"),
])  # fmt: skip
def test_what_nobody_takes_is_refused(wrong: dict[str, Any], hint: str, saved: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        OffloadLM(saved, **wrong)


def test_what_decides_how_a_model_is_loaded_needs_a_name() -> None:
    for wrong in ({"attn_implementation": "eager"}, {"peft": "a folder"}, {"load_in_4bit": True}):
        for model in (None, long_model()):
            with pytest.raises(ConfigError, match="give pretrained=NAME"):
                OffloadLM(model, **wrong)


def test_what_there_is_not_is_refused_before_a_model_is_loaded() -> None:
    for wrong in ({"cache": "disc"}, {"num_selekted": 3}, {"memory": "a lot"}, {"cache": "dynamic", "memory": "1/2"}):
        with pytest.raises(ConfigError):
            OffloadLM("there is no such model", **wrong)


def test_adapters_that_are_prompts_are_refused() -> None:
    """Each forward would put them in again."""
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(copy.deepcopy(long_model()), options)
    with pytest.raises(ConfigError, match="cache=dynamic"):
        OffloadLM(adapted, tokenizer=words(), **OPTIONS)


def test_neighbours_share_what_they_have_in_common() -> None:
    one, other = tuple(range(600)), (*range(500), 7, 8, 9)
    assert list(runs(sorted([one, other, (4, 5)]))) == [([other, one], 500), ([(4, 5)], 1)]
    assert list(runs([(1,)])) == [([(1,)], 0)]
    nested = tuple(range(400)), tuple(range(600))
    assert list(runs(nested)) == [(list(nested), 399)]


def test_a_context_of_one_token_is_not_prefilled(tmp_path: Path) -> None:
    calls: list[int] = []

    def logits(ids: Any, cache: Any, *, wanted: bool) -> torch.Tensor:
        calls.append(len(ids))
        with torch.no_grad():
            found: torch.Tensor = long_model()(torch.tensor([ids]), past_key_values=cache).logits[0].log_softmax(-1)
        return found

    found = Continuations(lambda tokens: DiskSwapCache(long_model(), path=tmp_path), logits, exact=False)
    scores = dict(found.scored([((3,), (4, 5)), ((3,), (6,)), ((3,), (4, 5))]))
    assert calls == [1] * 5 and scores[0] == scores[2]
