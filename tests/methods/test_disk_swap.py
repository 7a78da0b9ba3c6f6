"""KVSwap on a tiny model with a long context: what is attended to, when, and what it costs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import selections
from harness import PAD, Decoded, assert_exact, compare, generate, prompt, unchanged
from long_llama import LONG, dynamic, feed, long_model, run, same, sparse

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import Step
from hf_offload_cache.errors import StoreError
from hf_offload_cache.methods.disk_swap import FittedKeys, compact_keys
from hf_offload_cache.model import AttentionCall
from hf_offload_cache.testing import open_descriptors


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Hooks, threads and descriptors are as before every test."""
    before = open_descriptors(), threading.active_count()
    with unchanged(long_model()):
        yield
    assert (open_descriptors(), threading.active_count()) == before


# ---------------------------------------------------------------------------------------------- what is selected


@pytest.mark.parametrize(("sinks", "reuse"), [(4, 60), (6, 0), (0, 12)])
def test_every_selection_is_well_formed(sinks: int, reuse: int) -> None:
    """Right size, ascending, distinct, with the sinks; every gather is bitwise right."""
    with sparse(num_sinks=sinks, reuse_capacity=reuse) as cache:
        with selections() as seen:
            run(cache, 2, max_new_tokens=6)
        assert len(seen) == 5 * 3
        sink_groups = -(-sinks // 4)
        for layer, groups in seen:
            assert groups.shape == (2, 10 + sink_groups)
            assert (np.diff(groups, axis=1) > 0).all()
            assert groups.min() >= 0
            assert groups.max() < layer.history.units
            assert (groups[:, :sink_groups] == np.arange(sink_groups)).all()
        assert len({groups.tobytes() for _, groups in seen}) > 3


def test_the_choice_is_the_dense_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[set[int]] = []
    layer_class = DiskSwapCache.layer_class
    decode = layer_class.decode

    def watched(layer: Any, call: AttentionCall, step: Step) -> Any:
        keys, units = layer.history.whole()[0].repeat_interleave(2, 1), layer.history.units
        scores = torch.einsum("bhd,bhtd->bht", call.query[:, :, 0], keys) * call.scaling
        best = scores[..., : units * 4].unflatten(2, (-1, 4)).amax(-1)
        best[..., 0] = -1e9  # the sinks, which share the softmax token by token, as the latest ones do
        both = torch.cat([best, scores[..., :4], scores[..., units * 4 :]], -1)
        importance = torch.softmax(both, -1)[0, :, :units].sum(0)
        importance[0] = float("inf")
        expected.append(set(importance.topk(11).indices.tolist()))
        return decode(layer, call, step)

    monkeypatch.setattr(layer_class, "decode", watched)
    with sparse(rank=32, summary_dtype="float32") as cache, selections() as seen:
        run(cache, max_new_tokens=5)
    assert len(seen) == len(expected) == 12
    agreement = [len(best & set(groups[0].tolist())) / 11 for best, (_, groups) in zip(expected, seen, strict=True)]
    assert min(agreement) >= 10 / 11  # one of two that are almost alike
    assert np.mean(agreement) > 0.95


# ---------------------------------------------------------------------------------------------- the adapter's life


def test_everything_is_attended_until_the_adapter_is_made() -> None:
    """Equal to `DynamicCache` below max(4 r, 512) sealed tokens, sparse from then on, with the same adapter."""
    ids = prompt(long_model(), 1, 560)
    with sparse() as cache, torch.no_grad():
        plain = dynamic()
        for held in (plain, cache):
            feed(held, ids[:, :510])
        first, differences = None, []
        for position in range(510, 560):
            token = ids[:, position : position + 1]
            one, other = (Decoded(token, long_model()(token, past_key_values=held).logits) for held in (plain, cache))
            layer = cache.offloaded[0]
            sealed = layer.history.units * 4
            if layer.predictor.fitted.keys is None:
                assert sealed < 512
                assert_exact(one, other)
                continue
            assert layer.predictor.fitted.keys.tokens == sealed >= 512
            first = layer.predictor.fitted.keys if first is None else first
            assert layer.predictor.fitted.keys is first
            differences.append(compare(one, other).deviation)
        assert len(differences) == 560 - 519
        assert np.median(differences) > 0.01


@pytest.mark.parametrize(("rank", "needed"), [(16, 512), (32, 512)])
def test_rank_and_type_of_what_is_kept(rank: int, needed: int) -> None:
    """r bytes a token with 8 bits; nothing below 512 sealed tokens."""
    with sparse(rank=rank) as cache:
        feed(cache, prompt(long_model(), 2, needed + 8 - 1))
        assert cache.offloaded[1].predictor.fitted.keys is None
        feed(cache, prompt(long_model(), 2, 1))
        assert cache.storage.account.by_owner["compact keys"] == 3 * 2 * needed * rank
        assert cache.storage.account.by_owner["adapters"] == 3 * 32 * rank * (2 + 2)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each fit of a layer."""
    found, fit = list[int](), FittedKeys.fit
    monkeypatch.setattr(FittedKeys, "fit", lambda self, keys, sealed, *more: (
        found.append(sealed.tokens), fit(self, keys, sealed, *more))[1])  # fmt: skip
    return found


@pytest.mark.parametrize("kind", ["coded", "int8"])
def test_a_prompt_in_pieces_is_fitted_once_at_its_end(kind: str, fits: list[int]) -> None:
    """The first piece at once, because its keys are in memory. The rest waits for the first step: then the fit is that
    of the prompt in one piece, and so is what it estimates."""
    ids, made = prompt(long_model(), 1, 3001), []
    for pieces in ([700, 700, 1000, 600], [3000]):
        fits.clear()
        with sparse(summary_dtype=kind, rank=None, remainder=True) as cache:
            for piece, held in zip(pieces, itertools.accumulate(pieces), strict=True):
                feed(cache, ids[:, held - piece : held], piece)
                layer = cache.offloaded[1]
                assert layer.predictor.ready(layer.history.units) is (held == pieces[0])
            first = pieces[0] // 4 * 4 - 8
            assert fits == [first] * 3
            feed(cache, ids[:, 3000:])
            assert fits == [first] * 3 + [2992] * (3 if len(pieces) > 1 else 0)
            assert layer.predictor.ready(layer.history.units)
            fitted = layer.predictor.fitted
            assert fitted.waiting is None and fitted.fitted_at == 2992
            made.append((fitted.keys.fitted_state(), fitted.maps.capture(), fitted.sinks.keys.clone()))
    (one, maps, sinks), (other, all_maps, all_sinks) = made
    if kind == "coded":
        torch.testing.assert_close(one["coding"]["mean"], other["coding"]["mean"], rtol=1e-4, atol=1e-5)
        assert torch.equal(one["coding"]["counts"], other["coding"]["counts"])
    else:
        torch.testing.assert_close(one["scale"], other["scale"], rtol=1e-3, atol=0)
    torch.testing.assert_close(maps["ratio"], all_maps["ratio"], rtol=0.1, atol=0)  # by other queries of the latest
    torch.testing.assert_close(sinks, all_sinks)


def test_a_later_turn_is_fitted_again_if_the_text_has_grown_by_a_quarter(fits: list[int]) -> None:
    """A smaller turn gets compact keys by the fit before it. Few tokens at a time are no prompt."""
    ids = prompt(long_model(), 1, 2000)
    with sparse(summary_dtype="int8") as cache:
        layer = cache.offloaded[1]
        feed(cache, ids[:, :1000], 1000)
        feed(cache, ids[:, 1000:1003], 1)
        feed(cache, ids[:, 1003:1200], 200)
        assert layer.predictor.ready(layer.history.units)
        feed(cache, ids[:, 1200:1201])
        assert fits == [992] * 3
        feed(cache, ids[:, 1201:1301], 100)
        assert not layer.predictor.ready(layer.history.units)
        feed(cache, ids[:, 1301:1302])
        assert fits == [992] * 3 + [1292] * 3
        feed(cache, ids[:, 1302:1800], 20)
        assert fits == [992] * 3 + [1292] * 3 and layer.predictor.ready(layer.history.units)


@pytest.mark.parametrize("pieces", [[600, 500], [600, 600, 130]])
def test_a_fork_ends_the_prompt_and_goes_on_as_its_original(pieces: list[int]) -> None:
    """Bitwise, whether another piece follows or a step."""
    ids = prompt(long_model(), 1, sum(pieces) + 20)
    with sparse(rank=None, summary_dtype="coded") as cache:
        for place, piece in enumerate(pieces):
            feed(cache, ids[:, sum(pieces[:place]) :][:, :piece], piece)
        assert cache.offloaded[1].predictor.fitted.waiting is not None
        with cache.fork() as fork:
            found = []
            for each in (cache, fork):
                assert each.offloaded[1].predictor.fitted.fitted_at == sum(pieces) // 4 * 4 - 8
                logits = [long_model()(ids[:, place : place + 1], past_key_values=each).logits
                          for place in range(sum(pieces), sum(pieces) + 20)]  # fmt: skip
                found.append(torch.cat(logits, 1))
    assert torch.equal(*found)


def test_a_saved_prompt_that_never_decoded_is_fitted(tmp_path: Path) -> None:
    """It continues bitwise as the cache itself, whose first step ends the prompt."""
    ids = prompt(long_model(), 1, 1400)
    with sparse(rank=None, summary_dtype="coded") as cache, sparse(rank=None, summary_dtype="coded") as other:
        for each in (cache, other):
            feed(each, ids[:, :1300], 650)
        other.save(tmp_path / "context")
        with DiskSwapCache.open(tmp_path / "context", long_model()) as opened:
            assert opened.offloaded[1].predictor.fitted.fitted_at == 1292
            assert torch.equal(*(feed(each, ids[:, 1300:1310], 1) for each in (cache, opened)))


def test_other_rows_and_fewer_tokens_after_a_prompt_in_pieces(fits: list[int]) -> None:
    """Rows change after the fit. A crop before it leaves less to fit, or too little."""
    ids = prompt(long_model(), 2, 1400)
    with sparse(summary_dtype="int8") as cache:
        feed(cache, ids[:, :1300], 650)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        fitted = cache.offloaded[0].predictor.fitted
        assert fits == [640] * 3 + [1292] * 3 and fitted.rows == 3 and fitted.waiting is None
        logits = feed(cache, ids[[1, 0, 1]][:, 1300:1310], 1)
        assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
        assert len(fits) == 6
    with sparse(summary_dtype="int8") as cache:
        feed(cache, ids[:1, :1300], 650)
        fits.clear()
        cache.crop(-500)
        feed(cache, ids[:1, 800:802], 1)
        assert fits == [792] * 3
    with sparse(summary_dtype="int8") as cache:
        feed(cache, ids[:1, :1300], 650)
        fits.clear()
        cache.crop(-1000)
        feed(cache, ids[:1, 300:302], 1)
        assert fits == [] and cache.offloaded[0].predictor.fitted.waiting is None


def test_the_fit_of_a_prompt_is_not_part_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its time nor what it waits for; and a read that fails then leaves a cache that goes on."""
    ids, ended = prompt(long_model(), 1, 1400), []
    with sparse(summary_dtype="int8") as cache:
        counters, end_prompt = cache.storage.counters, DiskSwapCache.layer_class.end_prompt

        def watched(layer: Any) -> None:
            if not ended:
                ended.append(0.0)
                raise StoreError(5, "no")
            end_prompt(layer)
            counters.stall_seconds += 1000
            ended.append(time.perf_counter())

        monkeypatch.setattr(DiskSwapCache.layer_class, "end_prompt", watched)
        feed(cache, ids[:, :1300], 650)
        with pytest.raises(StoreError):
            feed(cache, ids[:, 1300:1301])
        assert cache.get_seq_length() == 1300 and not cache.offloaded[0].predictor.ready(1292 // 4)
        started = []
        monkeypatch.setattr(cache, "before_selecting", lambda: started.append(cache.shared.step.started))
        feed(cache, ids[:, 1300:1302], 1)
        assert cache.offloaded[0].predictor.ready(1292 // 4)
        assert len(ended) == 4 and started[0] >= ended[-1] and counters.decode_stall_seconds < 1000


def test_the_adapter_is_remade_when_the_length_has_grown_eightfold() -> None:
    ids = prompt(long_model(), 1, 8 * 560 + 8)
    with sparse(summary_dtype="int8") as cache:
        layer = cache.offloaded[1]
        feed(cache, ids[:, :568], 568)
        first = layer.predictor.fitted.keys
        feed(cache, ids[:, 568:-4], 31)  # no pieces of a prompt: too few tokens at a time
        assert layer.predictor.fitted.keys is first
        assert first.tokens == 8 * 560 - 4
        feed(cache, ids[:, -4:], 1)
        assert layer.predictor.fitted.keys is not first
        assert layer.predictor.fitted.keys.tokens == 8 * 560
        remade = layer.predictor.fitted.keys.adapter.flatten(0, 1)
        keys = layer.history.whole()[0][:, :, : 8 * 560].transpose(1, 2).flatten(2)[0].double()
        true = torch.linalg.svd(keys, full_matrices=False)[2][:16].T
        energy = [(keys @ part.double()).square().sum() for part in (remade, true, first.adapter.flatten(0, 1))]
        assert energy[0] > 0.9999 * energy[1]
        assert energy[2] < energy[0]


# ---------------------------------------------------------------------------------------------- padding


def padded_prompt(pad_token: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows; the second has 101 padded positions."""
    mask = torch.ones(2, LONG, dtype=torch.long)
    mask[1, :101] = 0
    return prompt(long_model(), 2, LONG).masked_fill(mask == 0, pad_token), mask


def test_padding_has_no_influence() -> None:
    """Other tokens in padded places: the same logits, to the bit; and no group of padding alone is selected."""
    results = []
    for pad_token in (PAD, 77):
        ids, mask = padded_prompt(pad_token)
        with sparse() as cache, selections() as seen:
            results.append(generate(long_model(), cache, ids, attention_mask=mask, max_new_tokens=8))
            assert all(groups[1].min() == 101 // 4 for _, groups in seen)
            assert all(groups[0].min() == 0 for _, groups in seen)
            assert len(seen) == 7 * 3
    assert torch.equal(results[0].logits, results[1].logits)


@pytest.mark.parametrize("fields", [{}, {"summary_dtype": "int8"}])
def test_integers_and_float32_choose_alike(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    ids, mask = padded_prompt()
    results = []
    for fast in (True, False):
        monkeypatch.setattr(compact_keys, "multiplies_bytes", lambda fast=fast: fast)
        with sparse(**fields) as cache, selections() as seen:
            results.append(generate(long_model(), cache, ids, attention_mask=mask, max_new_tokens=8))
            assert len(seen) == 7 * 3
    assert torch.equal(results[0].logits, results[1].logits)


def test_a_padded_row_is_the_row_alone() -> None:
    ids, mask = padded_prompt()
    fields = {"num_selected": 1024, "summary_dtype": "float32", "rank": 32}
    with sparse(**fields) as cache:
        both = generate(long_model(), cache, ids, attention_mask=mask, max_new_tokens=6)
    with sparse(**fields) as cache:
        alone = generate(long_model(), cache, ids[1:, 101:], max_new_tokens=6)
    assert_exact(
        Decoded(alone.tokens[:, -6:], alone.logits), Decoded(both.tokens[1:, -6:], both.logits[:, 1:])
    )


def test_padded_then_reset_then_without() -> None:
    with sparse() as cache:
        ids, mask = padded_prompt()
        generate(long_model(), cache, ids, attention_mask=mask, max_new_tokens=3)
        cache.reset()
        length = 8 + 12 * 4  # twelve groups: a padded batch would select all of them
        assert_exact(run(dynamic(), 1, length, max_new_tokens=3), run(cache, 1, length, max_new_tokens=3))


# ---------------------------------------------------------------------------------------------- engines, reports


@pytest.mark.parametrize("rows", [1, 2])
def test_engines_agree(tmp_path: Path, rows: int) -> None:
    """Same tokens and logits, to the bit, whatever reads the records, and with no reuse buffer."""
    with sparse() as cache:
        expected = run(cache, rows)
    for fields in ({"engine": "auto"}, {"engine": "mapped"}, {"reuse_capacity": 0}, {"reuse_capacity": 1}):
        with sparse(path=tmp_path, **fields) as cache:
            assert same(expected, run(cache, rows)), fields
    assert compare(run(dynamic(), rows), expected).deviation > 0.01


@pytest.mark.parametrize("engine", ["memory", "auto", "mapped"])
def test_the_report_is_consistent(tmp_path: Path, engine: str) -> None:
    with sparse(engine=engine, path=tmp_path) as cache:
        result = run(cache, 2, max_new_tokens=12)
        cache.storage.prefetcher.flush()
        report = cache.report()
        stores = cache.storage.stores
        record = cache.offloaded[0].history.form.record_bytes
        steps, held = 11, LONG + 11
        assert result.tokens.shape == (2, held + 1)
        assert (report.tokens, report.decode_steps) == (held, steps)
        assert 0 < report.hit_rate < report.prefetch_hit_rate <= 1
        tails = [8 + (LONG + step - 8) % 4 for step in range(1, steps + 1)]
        visible = [LONG + step for step in range(1, steps + 1)]
        assert report.selected_fraction == pytest.approx(sum(44 + tail for tail in tails) / sum(visible))
        assert report.bytes_read == sum(store.bytes_read for store in stores)
        assert report.bytes_read % 4096 == 0
        assert report.bytes_read >= report.reads * min(record, 4096) > 0
        assert report.bytes_written == 3 * 2 * ((held - 8) // 4) * record
        assert report.full_kv_bytes == 3 * 2 * held * 2 * 2 * 16 * 4
        assert report.peak_memory_bytes >= report.memory_bytes == sum(report.memory_by_owner.values())
        assert report.disk_bytes == (0 if engine == "memory" else report.bytes_written)
        assert report.layers == {"unknown": 0, "tagged": 3, "full": 0, "kept": 0}
        selected = cache.storage.counters.units_selected
        assert selected == steps * 3 * 2 * 11
        shown = str(report)
        assert "711 tokens" in shown
        assert f"{report.hit_rate:.1%}" in shown


def test_reuse_saves_reads() -> None:
    """More slots, more groups resident, fewer bytes read; without slots nothing is."""
    rates, read = [], []
    for reuse in (0, 20, 400):
        with sparse(reuse_capacity=reuse) as cache:
            run(cache, max_new_tokens=16)
            rates.append(cache.report().hit_rate)
            read.append(cache.report().bytes_read)
    assert 0 == rates[0] < rates[1] < rates[2]
    assert read[0] > read[1] > read[2]


def test_the_memory_account() -> None:
    """The sum of its owners, of tensors that can be counted from outside; zero for each after close."""
    cache = sparse(engine="auto")
    account = cache.storage.account
    with cache:
        run(cache, 2)
        owners = dict(account.by_owner)
        assert cache.memory_bytes == account.current == sum(account.by_owner.values())
        tiers = [layer.fetcher.tiers[0] for layer in cache.selective]
        assert owners["reuse slots"] == sum(tier._data.nbytes for tier in tiers) > 0
        assert owners["reuse slots"] == 3 * 2 * (15 + 1) * 4 * 64 * 4
        areas = cache.selecting.areas
        assert owners["staging"] == sum(area.nbytes for area in areas._free) == 2 * 2 * 11 * 4096
        assert owners["selection"] == areas._view.nbytes
        assert owners["rolling tail"] == 3 * 2 * 12 * 64 * 4
        assert 2 * (LONG + 7) * 8 <= owners["token ids"] <= 2 * (LONG * 9 // 8 + 128) * 8  # room to grow
        assert owners.get("stream buffers", 0) == 0
        assert account.peak >= account.current
    assert cache.memory_bytes == 0
    assert {owner: held for owner, held in account.by_owner.items() if held} == {}
    assert cache.disk_bytes == 0


# ---------------------------------------------------------------------------------------------- lives of a cache


def test_reset_gives_a_fresh_cache() -> None:
    """Same results, same figures as the first time, nothing held in between."""
    with sparse(engine="auto") as cache:
        first, report = run(cache), cache.report()
        cache.reset()
        empty = cache.report()
        held = {owner for owner, nbytes in empty.memory_by_owner.items() if nbytes}
        assert held <= {"io ring"}  # which serves all stores
        assert (empty.tokens, empty.disk_bytes, empty.bytes_read) == (0, 0, 0)
        assert (empty.hit_rate, empty.selected_fraction, empty.decode_steps) == (None, None, 0)
        assert same(first, run(cache))
        again = cache.report()
        assert (again.hit_rate, again.decode_steps) == (report.hit_rate, report.decode_steps)
        assert again.selected_fraction == report.selected_fraction
        # a guess is rounded by where its tensors lie: one group in hundreds may change places with its equal
        assert again.prefetch_hit_rate == pytest.approx(report.prefetch_hit_rate, abs=0.02)
        aside = ("write queue", "tables")  # what is under way, and what record ids the second time got
        held = [{k: v for k, v in r.memory_by_owner.items() if k not in aside} for r in (report, again)]
        assert held[0] == held[1]


def test_prefill_in_inference_mode_then_generate() -> None:
    """Buffers made in one mode are written to in the other: those of coded keys, too."""
    ids = prompt(long_model(), 1, LONG)
    results = []
    for first, second in ((False, False), (True, False), (False, True), (True, True)):
        with sparse() as cache:
            with torch.no_grad(), torch.inference_mode(first):
                long_model()(ids[:, :-1], past_key_values=cache)
                assert cache.offloaded[0].predictor.fitted.keys is not None
            with torch.inference_mode(second):
                results.append(generate(long_model(), cache, ids, max_new_tokens=8))
                cache.batch_repeat_interleave(2)
            feed(cache, ids[:, :5].repeat(2, 1), 1)
            cache.crop(-40)
    assert all(same(results[0], result) for result in results[1:])


@pytest.mark.parametrize("fields", [{}, {"summary_dtype": "int8"}])
def test_a_guess_with_no_latest_tokens(fields: dict[str, Any]) -> None:
    """A crop takes the whole tail, and there are no sinks: nothing is compared exactly for the guess."""
    with sparse(num_sinks=0, **fields) as cache:
        feed(cache, prompt(long_model(), 1, LONG))
        feed(cache, prompt(long_model(), 1, 3, seed=9), 1)
        cache.crop(-cache.offloaded[0].history.recent.shape[1])
        before = cache.storage.counters.units_ready
        feed(cache, prompt(long_model(), 1, 1, seed=4))
        assert cache.storage.counters.units_ready > before


def test_another_prompt_after_a_crop_of_nearly_all() -> None:
    """Few tokens stay, none of them sealed: the next prompt is looked ahead for as the first was."""
    with sparse() as cache:
        feed(cache, prompt(long_model(), 1, LONG))
        feed(cache, prompt(long_model(), 1, 3, seed=9), 1)
        cache.crop(10 - LONG - 3)
        feed(cache, prompt(long_model(), 1, LONG, seed=3))
        feed(cache, prompt(long_model(), 1, 3, seed=4), 1)
        layer = cache.selective[-1]
        assert layer.predictor.ready(layer.history.units)
        assert cache.storage.counters.units_ready > 0


@pytest.mark.parametrize(("padding", "num_sinks"), [(601, 4), (0, 600), (37, 600)])
def test_sinks_that_come_later_are_the_rows_own(padding: int, num_sinks: int) -> None:
    model = long_model()
    ids = prompt(model, 2, 1120)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with sparse(num_sinks=num_sinks) as cache, torch.no_grad():
        model(ids[:, :560], attention_mask=mask[:, :560], past_key_values=cache)
        assert all(layer.predictor.fitted.sinks is None for layer in cache.selective)
        model(ids[:, 560:], attention_mask=mask, past_key_values=cache)
        cache.end_prompt()
        for layer in cache.selective:
            keys, sinks = layer.keys, layer.predictor.fitted.sinks.keys
            for row, first in enumerate((0, padding)):
                assert torch.equal(sinks[row], keys[row, :, first : first + num_sinks])


def test_crop_into_groups_and_go_on() -> None:
    """Most groups are selected and stay resident; after the crop their records are used again."""
    ids, other = prompt(long_model(), 1, LONG), prompt(long_model(), 1, 60, seed=9)
    with sparse(num_selected=600, reuse_capacity=720) as cache, selections() as seen:
        feed(cache, ids)
        feed(cache, ids[:, :5], 1)
        cache.crop(-65)
        layer = cache.offloaded[0]
        assert layer.predictor.fitted.keys.tokens == layer.history.units * 4 == 632
        feed(cache, other, 30)
        feed(cache, ids[:, -3:], 1)
        assert len(seen) == 8 * 3
        assert layer.predictor.fitted.keys.tokens == layer.history.units * 4 == 692
        late = [groups[groups >= 632 // 4].size for _, groups in seen[-9:]]
        assert min(late) > 3
        assert cache.report().hit_rate > 0.5
