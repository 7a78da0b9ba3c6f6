"""`offload(library=...)` with pictures and sounds: requests begin with contexts only as far as they are equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pytest
import torch
import transformers
from vision_models import (
    END,
    PICTURE,
    START,
    VIDEO,
    WITH_A_PICTURE,
    Inputs,
    gemma3_vl,
    llava,
    qwen2_5_vl,
    smolvlm,
    text_config,
)

from hf_offload_cache import ContextLibrary, DiskSwapCache, offload
from hf_offload_cache.model import media_of

NEW, WORDS = 3, 24
"""Tokens of an answer, and words before and behind each picture."""


def qwen2_audio() -> Any:
    """A tiny Qwen2-Audio: sounds of 32 frames."""
    size = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    audio = {"model_type": "qwen2_audio_encoder", "max_source_positions": 16, "num_mel_bins": 16}
    config = transformers.Qwen2AudioConfig(
        audio_config={**size, **audio},
        text_config={"model_type": "qwen2", **text_config(num_hidden_layers=3)}, audio_token_index=PICTURE,
    )  # fmt: skip
    return harness.build(transformers.Qwen2AudioForConditionalGeneration, config)


class Kind(NamedTuple):
    """A model, and the inputs for pictures or sounds of given content."""

    build: Callable[[], Any]
    placeholders: int
    tower: Callable[[Any], torch.nn.Module]
    inputs: Callable[[torch.Tensor, torch.Tensor], Inputs]
    """From ids (B, T) and one content (C, H, W) for each run of placeholders, stacked."""
    shape: tuple[int, ...]
    crops: bool = True
    later: int = 1
    """Further prompts that `test_a_conversation_with_a_further_picture` tries: those of other kinds are alike."""


def _typed(ids: torch.Tensor, name: str, **inputs: torch.Tensor) -> Inputs:
    return {**inputs, name: (ids == PICTURE).int()}


def _grid(ids: torch.Tensor, contents: torch.Tensor) -> Inputs:
    grid = torch.tensor([[1, 4, 4]]).repeat(len(contents), 1)
    return _typed(ids, "mm_token_type_ids", pixel_values=contents.flatten(0, 1), image_grid_thw=grid)


def _frames(ids: torch.Tensor, contents: torch.Tensor) -> Inputs:
    """All of 20 frames, of which the encoder makes five tokens."""
    mask = (torch.arange(32) < 20).long().repeat(len(contents), 1)
    return {"input_features": contents, "feature_attention_mask": mask}


KINDS = {
    "llava": Kind(
        llava, 5, lambda own: own.model.vision_tower, lambda _, contents: {"pixel_values": contents}, (3, 28, 28)
    ),
    "qwen2_5_vl": Kind(qwen2_5_vl, 4, lambda own: own.model.visual, _grid, (16, 3 * 2 * 14 * 14), later=5),
    "gemma3": Kind(
        gemma3_vl, 4, lambda own: own.model.vision_tower,
        lambda ids, contents: _typed(ids, "token_type_ids", pixel_values=contents), (3, 28, 28), crops=False, later=3,
    ),
    "smolvlm": Kind(
        smolvlm, 4, lambda own: own.model.vision_model, lambda _, contents: {"pixel_values": contents[None]},
        (3, 56, 56),
    ),
    "qwen2_audio": Kind(qwen2_audio, 5, lambda own: own.model.audio_tower, _frames, (16, 32)),
}  # fmt: skip


def words(count: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 180, (1, count), generator=torch.Generator().manual_seed(seed))


def contents(kind: Kind, *seeds: int) -> torch.Tensor:
    return torch.stack([torch.randn(kind.shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def shown(kind: Kind, seed: int) -> torch.Tensor:
    """Words, the placeholders of a picture, words."""
    run = torch.tensor([[START, *[PICTURE] * kind.placeholders, END]])
    return torch.cat([words(WORDS, seed), run, words(WORDS, seed + 100)], 1)


def answer(own: Any, ids: torch.Tensor, inputs: Inputs, **options: Any) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(ids), **inputs, **options}
    with torch.no_grad():
        found: torch.Tensor = own.generate(
            input_ids=ids, max_new_tokens=NEW, do_sample=False, suppress_tokens=[PICTURE, VIDEO], **given
        )
    return found


@contextlib.contextmanager
def counted(own: Any, kind: Kind) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens of each forward, and the pictures of each one that the tower encodes."""
    computed, encoded = list[int](), list[int]()

    def encode(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        main = next(one for one in given if one.is_floating_point())
        encoded.append(main.numel() // torch.Size(kind.shape).numel())

    hooks = [
        own.get_input_embeddings().register_forward_hook(lambda _, given, __: computed.append(given[0].numel())),
        kind.tower(own).register_forward_pre_hook(encode, with_kwargs=True),
    ]
    yield computed, encoded
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_with_a_further_picture(name: str, tmp_path: Path) -> None:
    """Each turn computes its own tokens and encodes its own pictures; another picture ends what is common."""
    kind = KINDS[name]
    own, common = kind.build(), contents(kind, 1, 2)
    changed = [common.clone() for _ in range(2)]
    for number, one in enumerate(changed):
        one[number].view(-1)[0] += 1.0
    ids, turns = shown(kind, 1), list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
    for more, pictures in ((shown(kind, 2), 1), (words(WORDS, 3), 2), (words(0, 0), 2)):
        plain = answer(own, ids, kind.inputs(ids, common[:pictures]))
        turns.append((ids, common[:pictures], plain))
        ids = torch.cat([plain, more], 1)
    second = turns[1][0]
    first_stored, second_stored = (turn[2].shape[1] - 1 for turn in turns[:2])
    begins = [int((second == START).nonzero()[number, 1]) + 1 for number in range(2)]
    cut = torch.cat([second[:, : begins[1] - 1], words(WORDS, 4)], 1)
    total = turns[2][0].shape[1]
    later = [  # ids, contents, tokens that the first forward computes if the context can be cropped, and if not
        (turns[2][0], changed[1], total - begins[1], total - first_stored),
        (turns[2][0], changed[0], total - begins[0], total),
        (turns[2][0], common, 1, total - second_stored),
        (cut, common[:1], WORDS, cut.shape[1] - first_stored),
        (cut[:, : begins[0] - 1], common[:0], 1, begins[0] - 1),
    ][: kind.later]
    expected = [answer(own, ids, kind.inputs(ids, given) if len(given) else {}) for ids, given, *_ in later]

    open_contexts = "64MiB" if name in ("gemma3", "smolvlm") else 0
    with offload(own, exact=True, library=tmp_path, library_memory=open_contexts) as done:
        for turn, (ids, given, plain) in enumerate(turns):
            with counted(own, kind) as (computed, encoded):
                assert torch.equal(answer(own, ids, kind.inputs(ids, given)), plain)
            before = turns[turn - 1][2].shape[1] - 1 if turn else 0
            assert computed[0] == ids.shape[1] - before and encoded == [[1], [1], []][turn]
        assert done.reuse is not None and done.reuse.trouble == []
    with offload(own, exact=True, library=tmp_path) as done:  # as after a restart
        for (ids, given, *lengths), plain in zip(later, expected, strict=True):
            with counted(own, kind) as (computed, _):
                assert torch.equal(answer(own, ids, kind.inputs(ids, given) if len(given) else {}), plain)
            assert computed[0] == lengths[0 if kind.crops else 1]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_rows_with_pictures_of_their_own(name: str, tmp_path: Path) -> None:
    """Two sequences, one padded: each begins with its own context, or both with that of both."""
    kind = KINDS[name]
    own, pads, before = kind.build(), 7, 64
    rows = [torch.cat([words(60, 9), shown(kind, 1)], 1), torch.cat([words(before, 9), shown(kind, 2), words(3, 8)], 1)]
    ids = torch.cat([torch.nn.functional.pad(rows[0], (pads, 0), value=harness.PAD), rows[1]])
    mask = (ids != harness.PAD).long()

    def turn(ids: torch.Tensor, mask: torch.Tensor, *seeds: int) -> torch.Tensor:
        return answer(own, ids, {**kind.inputs(ids, contents(kind, *seeds)), "attention_mask": mask})

    first = turn(ids, mask, 1, 2)
    more = torch.cat([shown(kind, 3), shown(kind, 4)])
    longer = torch.cat([first, more], 1), torch.nn.functional.pad(mask, (0, NEW + more.shape[1]), value=1)
    second, other = turn(*longer, 1, 3, 2, 4), turn(*longer, 5, 3, 2, 4)
    with offload(own, exact=True, library=tmp_path) as done, counted(own, kind) as (computed, encoded):
        assert torch.equal(turn(ids, mask, 1, 2), first)
        start = len(computed)
        assert torch.equal(turn(*longer, 1, 3, 2, 4), second)
        assert computed[start] == 2 * (more.shape[1] + 1) and encoded == [2, 2]
        assert done.tokens_reused == int(longer[1].sum()) - computed[start]
        start = len(computed)
        assert torch.equal(turn(*longer, 5, 3, 2, 4), other)  # the first row ends within the other's first picture
        assert computed[start] == 2 * (longer[0].shape[1] - before - WORDS - 1) and encoded == [2, 2, 4]
    offsets = {"model.rope_deltas": [[-4]]} if name == "qwen2_5_vl" else {}  # two positions for four placeholders
    for entry in ContextLibrary(tmp_path).entries():
        with DiskSwapCache.open(entry.path, own) as cache:
            assert {key: value.tolist() for key, value in cache.capture()["model"].items()} == offsets


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_beams_about_a_picture(name: str, tmp_path: Path) -> None:
    """Each of two prompts, one about text, leaves its own tokens once; the next ones, with beams or without, begin
    with them, and encode the picture only if it is another."""
    kind = KINDS[name]
    own, about = kind.build(), torch.cat([words(70, 9), shown(kind, 1)], 1)
    ids = torch.cat([words(about.shape[1], 8), about])
    asked = [  # ids, the picture's seed, beams, tokens that the first forward computes, pictures that are encoded
        (ids, 1, 2, 2 * ids.numel(), 1), (ids, 1, 3, 6, 0), (about, 1, 1, 1, 0),
        (about, 2, 2, 2 * (about.shape[1] - 70 - WORDS - 1), 1),
    ]  # fmt: skip
    expected = [
        answer(own, given, kind.inputs(given, contents(kind, seed)), num_beams=beams)
        for given, seed, beams, *_ in asked
    ]
    with offload(own, exact=True, library=tmp_path) as done, counted(own, kind) as (computed, encoded):
        for (given, seed, beams, first, pictures), plain in zip(asked, expected, strict=True):
            computed.clear()
            encoded.clear()
            assert torch.equal(answer(own, given, kind.inputs(given, contents(kind, seed)), num_beams=beams), plain)
            assert (computed[0], len(encoded)) == (first, pictures)
        assert done.reuse is not None and done.reuse.trouble == []


def test_a_context_keeps_its_pictures(tmp_path: Path) -> None:
    """Saved, opened, forked, cropped, and with other sequences. A context of text is stored as in earlier versions."""
    kind = KINDS["llava"]
    own, ids, given = kind.build(), torch.cat([shown(kind, 1), shown(kind, 2)], 1), contents(kind, 1, 2)
    media = media_of(own, ids, kind.inputs(ids, given))
    assert not isinstance(media, str)
    starts = [int(column) + 1 for column in (ids == START)[0].nonzero()]
    assert [tuple(one[:3]) for one in media.marks] == [(0, start, start + kind.placeholders) for start in starts]
    with offload(own, exact=True, library=tmp_path):
        answer(own, ids, kind.inputs(ids, given))
        answer(own, words(WORDS, 5), {})
    library = ContextLibrary(tmp_path)
    opened = library.open(ids, own, media=media.marks, exact=True)
    assert opened is not None and opened[1] == ids.shape[1] - 1
    with opened[0] as cache:
        cache.save(tmp_path / "own")
    with DiskSwapCache.open(tmp_path / "own", own) as cache:
        assert cache.contents.tokens.media == media.marks
        with cache.fork() as twin:
            twin.batch_select_indices(torch.tensor([0, 0]))
            assert twin.contents.tokens.media == tuple(one._replace(row=row) for row in (0, 1) for one in media.marks)
            twin.crop(media.marks[1].stop - 1 - twin.tokens)
            assert twin.contents.tokens.media == tuple(media.marks[0]._replace(row=row) for row in (0, 1))
        assert "media" in cache.capture()
    unmarked = library.find(ids, own)
    assert unmarked is not None and unmarked.matched == starts[0], "ids alone identify no picture"
    text = library.open(words(WORDS, 5), own, exact=True)
    assert text is not None
    with text[0] as cache:
        assert "media" not in cache.capture()


def test_equal_ids_with_other_pictures_are_another_context(tmp_path: Path) -> None:
    """Both stay, and each is found by its own picture. Without a digest, none is accepted."""
    kind, library = KINDS["llava"], ContextLibrary(tmp_path)
    own, ids, paths = kind.build(), shown(kind, 1), list[Path]()
    for seed in (1, 2):
        inputs = kind.inputs(ids, contents(kind, seed))
        media = media_of(own, ids, inputs)
        assert not isinstance(media, str)
        with torch.no_grad(), DiskSwapCache(own, exact=True) as cache:
            own(input_ids=ids, **inputs, past_key_values=cache)
            with pytest.raises(ValueError, match="stand for images"):
                library.save(cache)
            cache.contents.tokens.media = media.marks
            paths.append(library.save(cache, instead=True))
        found = library.find(ids, own, media=media.marks)
        assert found is not None and (found.path, found.matched) == (paths[-1], ids.shape[1] - 1)
    assert {entry.path for entry in library.entries()} == {*paths} and len({*paths}) == 2


def test_a_model_that_may_not_continue_behind_a_picture(tmp_path: Path) -> None:
    """Its requests are computed, nothing is stored, and the record says why. Nor are beams about two pictures."""
    build, given = WITH_A_PICTURE["mllama"]
    own, inputs = build(), given()
    ids = inputs.pop("input_ids")
    expected = answer(own, ids, inputs)
    with offload(own, exact=True, library=tmp_path) as done, pytest.warns(UserWarning, match="neither used the"):
        assert torch.equal(answer(own, ids, inputs), expected)
    assert done.reuse is not None and done.requests == 1 and ContextLibrary(tmp_path).entries() == []
    assert "aspect_ratio_ids" in done.reuse.trouble[0] and "mllama" in done.reuse.trouble[0]
    typed = media_of(own, ids, {"token_type_ids": torch.zeros_like(ids)})
    assert isinstance(typed, str) and "token_type_ids" in typed, "some models attend in both directions where it is 0"
    kind = KINDS["llava"]
    own, ids = kind.build(), torch.cat([shown(kind, 1), shown(kind, 2)], 1)
    inputs = kind.inputs(ids, contents(kind, 1, 2))
    expected = answer(own, ids, inputs, num_beams=2)
    with offload(own, exact=True, library=tmp_path) as done, pytest.warns(UserWarning, match="several sequences to a"):
        assert torch.equal(answer(own, ids, inputs, num_beams=2), expected)
    assert ContextLibrary(tmp_path).entries() == []


def _without(inputs: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}


REFUSED: dict[str, tuple[str, Callable[[Inputs], Inputs], str]] = {
    "an option of the tower": ("llava", lambda given: {**given, "vision_feature_layer": -1}, "vision_feature_layer"),
    "an unknown tensor": ("llava", lambda given: {**given, "position_ids": torch.zeros(1, 4)}, "position_ids"),
    "no picture": ("llava", lambda given: {}, "no pixel_values"),
    "few placeholders": ("llava", lambda given: {"pixel_values": given["pixel_values"].repeat(9, 1, 1, 1)}, "or fewer"),
    "no grid": ("qwen2_5_vl", lambda given: _without(given, "image_grid_thw"), "image_grid_thw is missing"),
    "another grid": (
        "qwen2_5_vl", lambda given: {**given, "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}, "more, or fewer",
    ),
    "typed text": (
        "qwen2_5_vl", lambda given: {**given, "mm_token_type_ids": torch.ones_like(given["mm_token_type_ids"])},
        "not 0 at the tokens",
    ),
    "an empty picture": ("smolvlm", lambda given: {"pixel_values": 0 * given["pixel_values"]}, "stand for no tokens"),
    "no frames": ("qwen2_audio", lambda given: _without(given, "feature_attention_mask"), "how long each sound is"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_inputs_that_cannot_be_told_apart(what: str) -> None:
    name, change, said = REFUSED[what]
    kind = KINDS[name]
    own, ids = kind.build(), torch.cat([shown(kind, 1), shown(kind, 2)], 1)
    inputs = kind.inputs(ids, contents(kind, 1, 2))
    told = media_of(own, ids, {**inputs, "max_new_tokens": 4, "streamer": None})
    assert not isinstance(told, str) and len({one.digest for one in told.marks}) == 2
    reason = media_of(own, ids, change(inputs))
    assert isinstance(reason, str) and said in reason
