"""`offload(library=...)`: turns and requests begin with what earlier ones left, and say the same as without."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import COMMON, PAD, build, padding, prompt, tiny
from long_llama import long_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_offload_cache import ContextLibrary, DiskSwapCache, offload, offload_all
from hf_offload_cache.errors import StoreFullError
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.registry import CACHES, cache_class

NEW, ADDED = 8, 20
"""Tokens of an answer, and of the question after it."""


def model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**COMMON))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no descriptor."""
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@contextlib.contextmanager
def counted(own: Any) -> Iterator[list[int]]:
    """The tokens of each forward of the model, of all rows."""
    computed: list[int] = []
    hook = own.get_input_embeddings().register_forward_hook(lambda _, given, __: computed.append(given[0].numel()))
    yield computed
    hook.remove()


def generated(own: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    with torch.no_grad():
        found: torch.Tensor = own.generate(ids, **options)
    return found


def next_turn(own: Any, ids: torch.Tensor, mask: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt after the answer `ids`, with a question, and its mask."""
    ids = torch.cat([ids, prompt(own, len(ids), ADDED, seed=turn)], 1)
    return ids, torch.nn.functional.pad(mask, (0, NEW + ADDED), value=1)


def talk(own: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, count: int = 3, **options: Any) -> Any:
    """The answers of a conversation, and the tokens that each turn computes before its first answered one."""
    mask, answers, tokens = torch.ones_like(ids) if mask is None else mask, [], []
    for turn in range(count):
        with counted(own) as computed:
            answers.append(generated(own, ids, attention_mask=mask, **options))
        tokens.append(computed[0])
        ids, mask = next_turn(own, answers[-1], mask, turn)
    return answers, tokens


def flip(folder: Path, offset: int = 100) -> None:
    """One bit in each file of records of all contexts."""
    for path in folder.glob("*/*.records"):
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------ turns


@pytest.mark.parametrize("name", CACHES)
def test_a_turn_computes_its_own_tokens_only(name: str, tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 120)
    expected, _ = talk(own, ids)
    with offload(own, name, exact=True, library=tmp_path) as done:
        answers, tokens = talk(own, ids)
    assert equal(answers, expected) and tokens == [120, ADDED + 1, ADDED + 1]
    assert done.requests == 3 and done.tokens_reused == (119 + NEW) + (119 + 2 * NEW + ADDED)
    with offload(own, name, exact=True, library=tmp_path):  # as after a restart
        answers, tokens = talk(own, ids)
    assert equal(answers, expected) and tokens == [1, 1, 1]
    assert len(ContextLibrary(tmp_path).entries()) == 1, "the longest has all the others"


def test_a_turn_in_pieces_computes_its_own_tokens_only(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 120)
    expected, _ = talk(own, ids, prefill_chunk_size=16)
    with offload(own, exact=True, library=tmp_path) as done:
        answers, tokens = talk(own, ids, prefill_chunk_size=16)
    assert equal(answers, expected) and tokens == [16, 16, 16]  # the first piece of 120, 21 and 21 tokens
    assert done.tokens_reused == (119 + NEW) + (119 + 2 * NEW + ADDED)


def test_two_conversations_alternate(tmp_path: Path) -> None:
    own = model()
    texts = [prompt(own, 1, 90, seed=1), prompt(own, 1, 100, seed=2)]
    expected = [talk(own, ids)[0] for ids in texts]
    masks, answers = [torch.ones_like(ids) for ids in texts], ([], [])  # type: ignore[var-annotated]
    with offload(own, exact=True, library=tmp_path):
        for turn in range(3):
            for row, (ids, mask) in enumerate(zip(texts, masks, strict=True)):
                with counted(own) as computed:
                    answers[row].append(generated(own, ids, attention_mask=mask))
                assert computed[0] == (ids.shape[1] if turn == 0 else ADDED + 1)
                texts[row], masks[row] = next_turn(own, answers[row][-1], mask, turn)
    assert all(map(equal, answers, expected))


@pytest.mark.parametrize("kind", ["bfloat16", "padded rows", "beams", "several answers", "candidates"])
def test_turns_in_other_modes_say_the_same(kind: str, tmp_path: Path) -> None:
    own, options, rows, mask = model(), dict[str, Any](), 1, None
    if kind == "bfloat16":
        own = copy.deepcopy(own).to(torch.bfloat16)
    elif kind == "padded rows":
        rows, mask = 2, padding(2, 80)
    elif kind == "candidates":
        options["prompt_lookup_num_tokens"] = 3
    ids = prompt(own, rows, 80)
    ids = ids if mask is None else ids.masked_fill(mask == 0, PAD)
    if kind in ("beams", "several answers"):
        options = {"num_beams": 3} if kind == "beams" else {"do_sample": True, "num_return_sequences": 3}

        def asked() -> tuple[torch.Tensor, int]:
            with counted(own) as computed:
                return generated(own, ids, **options), computed[0]

        expected, _ = asked()
        with offload(own, exact=True, library=tmp_path):
            (first, all_rows), (second, few) = asked(), asked()
        assert torch.equal(first, expected) and torch.equal(second, expected)
        assert (all_rows, few) == (3 * 80, 3), "the prompt's last token in each row"
        return
    expected, _ = talk(own, ids, mask, **options)
    with offload(own, exact=True, library=tmp_path) as done:
        answers, tokens = talk(own, ids, mask, **options)
    assert equal(answers, expected) and tokens[0] == rows * 80 and max(tokens[1:]) <= rows * (ADDED + 4)
    assert done.tokens_reused > 0 and not done.reuse.trouble


def test_a_model_with_windows_continues_complete_contexts(tmp_path: Path) -> None:
    own, ids = tiny("gemma3"), prompt(tiny("gemma3"), 1, 60)
    expected, _ = talk(own, ids)
    with offload(own, exact=True, library=tmp_path):
        answers, tokens = talk(own, ids)
        assert equal(answers, expected) and tokens == [60, ADDED + 1, ADDED + 1]
        changed = ids.clone()
        changed[0, 30] += 1
        assert talk(own, changed, count=1)[1] == [60], "its window is at the end of another text"
    assert len(ContextLibrary(tmp_path).entries()) == 4, "a longer one does not serve those that end earlier"


def test_a_prompt_that_parts_from_an_earlier_one(tmp_path: Path) -> None:
    """As a template that rewrites the last turn: the common beginning is kept, and no more."""
    own, ids = model(), prompt(model(), 1, 120)
    other = torch.cat([ids[:, :70], prompt(own, 1, 60, seed=3)], 1)
    expected = generated(own, other)
    with offload(own, exact=True, library=tmp_path), counted(own) as computed:
        generated(own, ids)
        computed.clear()
        assert torch.equal(generated(own, other), expected) and computed[0] == 60
    assert len(ContextLibrary(tmp_path).entries()) == 2


def test_another_document_after_a_common_beginning_is_fitted_anew(tmp_path: Path) -> None:
    """Directions and maps of compact keys are those of the text, not of the one that was stored first."""
    own, ids = long_model(), prompt(long_model(), 1, 1400)
    other = torch.cat([ids[:, :60], prompt(own, 1, 1340, seed=3)], 1)

    def directions(fields: dict[str, Any]) -> torch.Tensor:
        found = []
        with offload(own, num_selected=64, **fields) as done:
            if "library" in fields:
                generated(own, ids)
            plain = own.forward

            def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
                result = plain(*args, past_key_values=past_key_values, **kwargs)
                found.append(past_key_values.selective[0].predictor.fitted.fitted_at)
                return result

            own.forward = forward
            try:
                generated(own, other)
            finally:
                del own.forward
            assert done.tokens_reused == (60 if "library" in fields else 0)
        return torch.tensor(found)

    assert directions({"library": tmp_path / "library"})[-1] == directions({"path": tmp_path})[-1] > 1300


def test_contexts_that_stay_open_leave_descriptors_for_requests(tmp_path: Path, monkeypatch: Any) -> None:
    own, used = model(), len(os.listdir("/proc/self/fd")) - 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 60, used + 60))
    with offload(own, exact=True, library=tmp_path, library_memory="64MiB") as done:
        for seed in range(6):
            generated(own, prompt(own, 1, 40, seed=seed))
            done.reuse.settle()
            assert len(os.listdir("/proc/self/fd")) - used <= 30 + 1
        assert done.reuse.memory_bytes > 0 and done.requests == 6


@pytest.mark.parametrize("name", CACHES)
def test_contexts_that_stay_open_are_forked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, ids = model(), prompt(model(), 1, 120)
    expected, _ = talk(own, ids)
    with offload(own, name, exact=True, library=tmp_path, library_memory="64MiB") as done:
        answers, tokens = talk(own, ids)
        assert equal(answers, expected) and tokens == [120, ADDED + 1, ADDED + 1]
        done.reuse.settle()
        assert 0 < done.reuse.memory_bytes < 64 * 2**20
        with monkeypatch.context() as patch:
            patch.setattr(cache_class(name), "open", None)
            again, tokens = talk(own, ids, count=1)
        assert equal(again, expected[:1]) and tokens == [1], "a part of the longest, which is open"
        done.reuse.settle()
        assert done.reuse.memory_bytes and done.reuse._at_end.atexit
        done.reuse._at_end()  # as at the end of a process that never ends the `with`
        assert done.reuse.memory_bytes == 0
    with offload(own, name, exact=True, library=tmp_path / "other", library_memory=1) as done:
        talk(own, ids, count=1)
        done.reuse.settle()
        assert done.reuse.memory_bytes == 0


# ------------------------------------------------------------------------------------------------ rows of a batch


def together(*texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (1, T) as a batch, padded on the left, and its mask."""
    widest = max(text.shape[1] for text in texts)
    mask = torch.cat([torch.arange(widest)[None] >= widest - text.shape[1] for text in texts])
    padded = [torch.nn.functional.pad(text, (widest - text.shape[1], 0), value=PAD) for text in texts]
    return torch.cat(padded), mask.long()


def continued(own: Any, text: torch.Tensor, added: int, seed: int) -> torch.Tensor:
    return torch.cat([text, prompt(own, 1, added, seed=seed)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_rows_of_a_batch_begin_with_contexts_of_their_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As far as the library has all rows: with 90 of 110 tokens, behind 30 of padding, and with 100 of 140."""
    own = copy.deepcopy(model()).to(dtype)
    texts = [prompt(own, 1, length, seed=length) for length in (90, 100)]
    ids, mask = together(continued(own, texts[0], 20, 3), continued(own, texts[1], 40, 4))
    expected = generated(own, ids, attention_mask=mask)
    with offload(own, name, exact=True, library=tmp_path) as done:
        for text in texts:
            generated(own, text)
        with counted(own) as computed:
            assert torch.equal(generated(own, ids, attention_mask=mask), expected)
        assert computed[0] == 2 * 40 and done.tokens_reused == (100 - 30) + 100
        assert torch.equal(generated(own, ids[:1, 30:]), expected[:1, 30:]), "a batch leaves each row without padding"
        assert done.tokens_reused == 170 + 109, "all but the last token of the prompt"


def test_a_batch_leaves_its_rows(tmp_path: Path) -> None:
    """Another batch, in another order and with other padding, finds them."""
    own, texts = model(), [prompt(model(), 1, length, seed=length) for length in (120, 150, 90)]
    ids, mask = together(*texts)
    with offload(own, exact=True, library=tmp_path) as done:
        generated(own, ids, attention_mask=mask)
        done.reuse.settle()
        assert sorted(entry.manifest.tokens for entry in done.reuse.library.entries()) == [97, 127, 157]
        ids, mask = together(continued(own, texts[2], 20, 8), continued(own, texts[0], 20, 9))
        expected = generated(copy.deepcopy(own), ids, attention_mask=mask)
        with counted(own) as computed:
            assert torch.equal(generated(own, ids, attention_mask=mask), expected)
        assert computed[0] == 2 * 20 and done.tokens_reused == 90 + 120
        before = done.tokens_reused
        with counted(own) as computed:
            two = generated(own, ids, attention_mask=mask, do_sample=True, num_return_sequences=2)
        assert len(two) == 4 and computed[0] == 4 and done.tokens_reused == before + 2 * (109 + 139)


def test_rows_about_one_document_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, text, opened = model(), prompt(model(), 1, 100), []
    ids, mask = together(*(continued(own, text, added, added) for added in (10, 20, 30)))
    expected, plain = generated(own, ids, attention_mask=mask), ContextLibrary.open_match
    with offload(own, exact=True, library=tmp_path) as done:
        generated(own, text)
        with monkeypatch.context() as patch, counted(own) as computed:

            def noted(*args: Any, **given: Any) -> Any:
                opened.append(plain(*args, **given))
                return opened[-1]

            patch.setattr(ContextLibrary, "open_match", noted)
            assert torch.equal(generated(own, ids, attention_mask=mask), expected)
        assert len(opened) == 1 and opened[0].cache.closed
        assert computed[0] == 3 * 30 and done.tokens_reused == 80 + 90 + 100


def test_short_beginnings_of_rows_are_computed(tmp_path: Path) -> None:
    own, texts = model(), [prompt(model(), 1, 60, seed=seed) for seed in (1, 2)]
    with offload(own, exact=True, library=tmp_path) as done:
        for text in texts:
            generated(own, text)
        with counted(own) as computed:
            generated(own, torch.cat(texts))
        assert computed[0] == 2 * 60 and done.tokens_reused == 0, "59 tokens a context"


@pytest.mark.parametrize("kind", ["memory", "damage", "windows"])
def test_rows_that_cannot_be_copied_are_computed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny("gemma3") if kind == "windows" else model()
    texts = [prompt(own, 1, 200, seed=seed) for seed in (1, 2)]
    ids, mask = together(continued(own, texts[0], 20, 3), continued(own, texts[1], 30, 4))
    expected = generated(own, ids, attention_mask=mask)
    with contextlib.ExitStack() as stack:
        done = stack.enter_context(offload(own, exact=True, library=tmp_path))
        for text in texts:
            generated(own, text)
        done.reuse.settle()
        if kind == "memory":
            stack.enter_context(pytest.warns(UserWarning, match="computed from the start: memory: streaming needs"))
            hold = MemoryAccount.hold

            def full(account: MemoryAccount, owner: str, nbytes: int) -> None:
                if owner == "streaming" and nbytes > 0:
                    account.limit = account.current
                hold(account, owner, nbytes)

            monkeypatch.setattr(MemoryAccount, "hold", full)
        if kind == "damage":
            flip(tmp_path)
            stack.enter_context(pytest.warns(UserWarning, match="computed from the start: .*checksum"))
        with counted(own) as computed:
            assert torch.equal(generated(own, ids, attention_mask=mask), expected)
        assert computed[0] == 2 * 230 and done.tokens_reused == 0
        done.reuse.settle()
        batches = [entry.manifest.batch for entry in done.reuse.library.entries()]
        assert batches.count(2) == (kind == "windows"), "else each row is stored on its own"


def test_rows_are_copied_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contexts, of which one layer at a time is open, and what is on its way are in the account."""
    own, memory, booked = long_model(), 768 * 1024, set[int]()
    texts = [prompt(own, 1, length, seed=length) for length in (700, 650)]
    ids, mask = together(continued(own, texts[0], 30, 3), continued(own, texts[1], 30, 4))
    hold = MemoryAccount.hold

    def noted(account: MemoryAccount, owner: str, nbytes: int) -> None:
        hold(account, owner, nbytes)
        if owner == "streaming":
            booked.add(nbytes)

    monkeypatch.setattr(MemoryAccount, "hold", noted)
    with offload(own, memory=memory, library=tmp_path) as done, counted(own) as computed:
        for text in texts:
            generated(own, text)
        computed.clear()
        generated(own, ids, attention_mask=mask)
        assert computed[0] == 2 * 30 and done.tokens_reused == 650 + 700 and not done.reuse.trouble
        assert done.report.peak_memory_bytes <= done.report.memory_budget == memory
        assert "streaming" not in done.report.memory_by_owner
    entry = own.config.num_key_value_heads * own.config.head_dim * 2 * 4
    assert 64 * entry in booked, "a block of a context"


@pytest.mark.parametrize("name", CACHES)
def test_copied_rows_are_learnt(name: str, tmp_path: Path) -> None:
    """Steps select among copied tokens; what they select by knows all of them, and not the padding."""
    own = long_model()
    texts = [prompt(own, 1, length, seed=length) for length in (700, 650)]
    ids, mask = together(continued(own, texts[0], 100, 3), continued(own, texts[1], 100, 4))
    expected = generated(own, ids, attention_mask=mask)
    fields = {"num_recent": 8, "reuse_capacity": 60} | ({} if name == "spec" else {"num_selected": 40})
    with offload(own, name, library=tmp_path, **fields) as done:
        for text in texts:
            generated(own, text)
        with counted(own) as computed:
            found = generated(own, ids, attention_mask=mask)
        assert computed[0] == 2 * 100 and done.tokens_reused == 650 + 700
        selected = done.report.selected_fraction
        with done.private():
            generated(own, ids, attention_mask=mask)
        assert done.report.selected_fraction == pytest.approx(selected, abs=0.01) and selected < 0.2
    assert torch.equal(found[:, : 1 - NEW], expected[:, : 1 - NEW]), "the first token, after all of the prompt"


# ------------------------------------------------------------------------------------------------ damage


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.mark.parametrize("when", ["before", "between steps"])
def test_a_damaged_context_costs_a_prefill(when: str, tmp_path: Path) -> None:
    """A sampled and streamed answer is the same, and each token of it is streamed once."""
    own, ids, options = model(), prompt(model(), 1, 200), {"do_sample": True}
    longer = torch.cat([ids, prompt(own, 1, ADDED, seed=5)], 1)
    heard, expected = Heard(), generated(own, longer, **options)
    with offload(own, exact=True, engine="mapped", library=tmp_path) as done:
        generated(own, ids)
        done.reuse.settle()

        def at_step(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if sequences.shape[1] == longer.shape[1] + 3:
                flip(tmp_path)
            return scores

        options |= {"logits_processor": [at_step]} if when == "between steps" else {}
        if when == "before":
            flip(tmp_path)
        with pytest.warns(UserWarning, match="computed from the start"):
            assert torch.equal(generated(own, longer, streamer=heard, **options), expected)
        assert heard.tokens == [*expected[0].tolist(), -1]
        assert done.requests == 2 and done.requests_repeated == 1
        done.reuse.settle()
        assert done.tokens_reused == 0
        with counted(own) as computed:
            assert torch.equal(generated(own, longer, **{**options, "logits_processor": None}), expected)
        assert computed[0] == 1, "it was stored again"


def test_a_manifest_that_cannot_be_read_costs_a_prefill(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 80)
    expected = generated(own, ids)
    with offload(own, exact=True, library=tmp_path) as done:
        generated(own, ids)
        done.reuse.settle()
        (manifest,) = tmp_path.glob("*/manifest.json")
        manifest.write_bytes(b"{}")
        with pytest.warns(UserWarning, match="passed over"):
            assert torch.equal(generated(own, ids), expected)
    assert done.requests == 2 and done.tokens_reused == 0


def test_a_full_disk_loses_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, ids = model(), prompt(model(), 1, 80)
    expected = generated(own, ids)

    def full(*_: Any, **__: Any) -> Any:
        raise StoreFullError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(DiskSwapCache, "save", full)
        warned = pytest.warns(UserWarning, match="was not kept.*no room")
        with offload(own, exact=True, library=tmp_path) as done, warned:
            assert torch.equal(generated(own, ids), expected)
            done.reuse.settle()
    assert done.requests == 1 and "no room" in done.reuse.trouble[0] and not ContextLibrary(tmp_path).entries()


@pytest.mark.parametrize("room", ["after contexts have left", "never", "never, and too little memory", "strict"])
def test_a_disk_that_is_full_while_a_request_runs(room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts make room. Without any, keys and values stay in memory if they may; a streamer gets each token once."""
    own, ids, heard = model(), prompt(model(), 1, 80), Heard()
    longer = torch.cat([ids, prompt(own, 1, 40, seed=5)], 1)
    expected, options = generated(own, longer), {"floor": "1KiB"} if "too little" in room else {}
    options |= {"strict": True} if room == "strict" else {}
    write, library = os.pwrite, ContextLibrary(tmp_path)

    def full(*given: Any) -> int:
        if room != "after contexts have left" or library.entries():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*given)

    with offload(own, exact=True, engine="direct", library=library, library_memory="1MiB", **options) as done:
        generated(own, ids)
        done.reuse.settle()
        assert library.entries() and done.reuse.memory_bytes
        monkeypatch.setattr(os, "pwrite", full)
        if "too little" in room or room == "strict":
            with pytest.raises(StoreFullError), pytest.warns(UserWarning, match="disk was full"):
                generated(own, longer)
        else:
            with pytest.warns(UserWarning, match="from the start, because its disk was full"):
                assert torch.equal(generated(own, longer, streamer=heard), expected)
            assert heard.tokens == [*expected[0].tolist(), -1]
        monkeypatch.undo()
        done.reuse.settle()
    assert done.requests_repeated == 1 and (done.requests, done.requests_left_plain) == {
        "after contexts have left": (2, 0), "never": (1, 1)
    }.get(room, (1, 0))  # fmt: skip
    assert [entry.manifest.tokens for entry in library.entries()] == ([119 + NEW] if room.startswith("after") else [])


def test_a_context_that_leaves_too_little_memory_costs_a_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ids = model(), prompt(model(), 1, 200)
    expected = generated(own, ids)

    def tight(*given: Any, **options: Any) -> Any:
        found = take(*given, **options)
        if found is not None:
            found[0].storage.account.limit = found[0].memory_bytes
        return found

    with offload(own, exact=True, library=tmp_path) as done:
        generated(own, ids[:, :60])
        take = done.reuse.take
        monkeypatch.setattr(done.reuse, "take", tight)
        with pytest.warns(UserWarning, match="from the start, because its context does not fit"):
            assert torch.equal(generated(own, ids), expected)
    assert (done.requests, done.requests_repeated, done.tokens_reused) == (2, 1, 0)


# ------------------------------------------------------------------------------------------------ who gets what


def test_what_may_not_be_shared(tmp_path: Path) -> None:
    """Private requests, embeddings, another adapter, and another key."""
    own, ids = model(), prompt(model(), 1, 80)
    with offload(own, exact=True, library=tmp_path) as done:
        with done.private():
            generated(own, ids)
        embedded = own.get_input_embeddings()(ids)
        own.generate(inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False)
        done.reuse.settle()
        assert not done.reuse.library.entries()
        generated(own, ids)
        with done.private(), counted(own) as computed:
            generated(own, ids)
        assert computed[0] == 80 and done.tokens_reused == 0
    adapted = peft.get_peft_model(copy.deepcopy(own), peft.LoraConfig(r=4, init_lora_weights=False))
    with offload(adapted, exact=True, library=tmp_path), counted(adapted) as computed:
        first = generated(adapted, ids)
        with adapted.disable_adapter():
            assert torch.equal(generated(adapted, ids), generated(own, ids))
        computed.clear()
        assert torch.equal(generated(adapted, ids), first) and computed[0] == 1
    locked = ContextLibrary(tmp_path, key=lambda: bytes(32))
    with offload(own, exact=True, library=locked), counted(own) as computed:
        generated(own, ids)
        generated(own, ids)
    assert (computed[0], computed[NEW]) == (80, 1) and sum(entry.encrypted for entry in locked.entries()) == 1


@pytest.mark.parametrize("changed", ["weights", "adapter"])
def test_a_context_is_of_the_model_that_computed_it(changed: str, tmp_path: Path) -> None:
    """Also if weights or adapters change before it is saved; alone, and as rows of a batch."""
    own, (ids, mask) = model(), together(*(prompt(model(), 1, length) for length in (120, 90)))
    if changed == "adapter":
        own = peft.get_peft_model(own, peft.LoraConfig(r=4, init_lora_weights=False), "first")
        own.add_adapter("second", peft.LoraConfig(r=4, init_lora_weights=False))

    def change(name: str) -> None:
        if changed == "adapter":
            own.set_adapter(name)
        else:
            weight = own.get_input_embeddings().weight.data
            weight.copy_(weight.roll(1 if name == "second" else -1, 0))

    with offload(own, exact=True, library=tmp_path) as done:
        for rows in (slice(1), slice(2)):
            given, waits = {"attention_mask": mask[rows]}, threading.Event()
            done.reuse._saver.submit(waits.wait)  # requests do not wait for this
            before = generated(own, ids[rows], **given)
            change("second")
            waits.set()
            after, tokens = generated(own, ids[rows], **given), done.tokens_reused
            change("first")
            assert before.equal(generated(own, ids[rows], **given)) and not before.equal(after)
            assert done.tokens_reused - tokens == int(mask[rows].sum()) - len(ids[rows])
    assert done.requests == 6
    change("second")
    assert after.equal(generated(own, ids, attention_mask=mask))


def test_what_sparse_steps_generated_is_not_exact(tmp_path: Path) -> None:
    own, ids = long_model(), prompt(long_model(), 1, 700)
    with offload(own, num_selected=40, library=tmp_path):
        sparse = generated(own, ids)
    longer = next_turn(own, sparse, torch.ones_like(ids), 0)[0]
    expected = generated(own, longer)
    with offload(own, exact=True, library=tmp_path) as done:
        assert torch.equal(generated(own, longer), expected) and done.tokens_reused == 0
    with offload(own, num_selected=40, library=tmp_path) as done:
        generated(own, longer)
        assert done.tokens_reused == 699 + NEW


def test_an_answer_that_is_interrupted_leaves_its_prompt(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 80)

    def fail(sequences: torch.Tensor, scores: torch.Tensor) -> bool:
        if sequences.shape[1] == 83:
            raise KeyError("gone")
        return False

    with offload(own, exact=True, library=tmp_path) as done, counted(own) as computed:
        with own.model.layers[1].mlp.register_forward_pre_hook(lambda *_: {}[0]), pytest.raises(KeyError):
            generated(own, ids)  # within its first forward: nothing is left, and nothing said
        with pytest.raises(KeyError, match="gone"):
            generated(own, ids, stopping_criteria=[fail])
        computed.clear()
        assert torch.equal(generated(own, ids), generated(model(), ids)) and computed[0] == 1
    assert done.reuse.trouble == []


def test_a_request_that_outlives_the_with_is_answered_and_leaves_its_text(tmp_path: Path) -> None:
    own, ids, begun, ended = model(), prompt(model(), 1, 80), threading.Event(), threading.Event()
    expected, answers = generated(own, ids), []

    def wait(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        ended.wait()
        return scores

    thread = threading.Thread(target=lambda: answers.append(generated(own, ids, logits_processor=[wait])))
    with offload(own, exact=True, library=tmp_path, library_memory="1MiB") as done:
        thread.start()
        begun.wait()
    ended.set()
    thread.join()
    assert equal(answers, [expected]) and len(answers) == done.requests == 1
    assert [entry.manifest.tokens for entry in ContextLibrary(tmp_path).entries()] == [79 + NEW]
    assert done.reuse.memory_bytes == 0, "nothing stays open"


def test_a_forked_process_has_a_thread_of_its_own(tmp_path: Path) -> None:
    """As a server's workers that begin after `offload`: what the first process has open is not theirs."""
    own, ids, threads = model(), prompt(model(), 1, 80), torch.get_num_threads()
    torch.set_num_threads(1)  # the others would be missing there
    expected = generated(own, ids)
    with offload(own, exact=True, library=tmp_path, library_memory="1MiB") as done:
        generated(own, ids[:, :40])
        done.reuse.settle()
        if not (child := os.fork()):
            signal.alarm(60)
            same = [torch.equal(generated(own, ids), expected) for _ in range(2)]
            os._exit(0 if all(same) and done.tokens_reused == 40 + 79 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(generated(own, ids), expected) and done.tokens_reused == 79
    torch.set_num_threads(threads)


def test_short_requests_and_every_model(tmp_path: Path) -> None:
    """Requests whose full KV is below the floor are stored, too."""
    own, ids = model(), prompt(model(), 1, 30)
    with offload_all(memory="1/13", exact=True, library=tmp_path) as done:
        _, tokens = talk(own, ids)
    assert tokens == [30, ADDED + 1, ADDED + 1] and (done.requests, done.requests_left_plain) == (3, 0)


def test_a_days_bytes_are_counted_and_limited(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 200)
    library = ContextLibrary(tmp_path, max_bytes_a_day="1GB")
    assert library.bytes_written_today() == 0
    with offload(own, exact=True, library=library) as done:
        generated(own, ids)
        done.reuse.settle()
        written = library.bytes_written_today()
        assert sum(entry.bytes for entry in library.entries()) * 0.8 < written < 10 * 2**20
        library.max_bytes_a_day = written + 1
        with pytest.warns(UserWarning, match="max_bytes_a_day is .* were written today"):
            generated(own, prompt(own, 1, 200, seed=9))
            done.reuse.settle()
        assert len(library.entries()) == 1 and ContextLibrary(tmp_path).bytes_written_today() == written
