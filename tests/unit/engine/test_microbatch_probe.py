"""How large a microbatch may be, from measured lines; the measuring itself needs a GPU (tests/gpu)."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.engine import microbatch_probe
from isopref.engine.microbatch_probe import (
    LEAST_TOKENS,
    MOST_TOKENS,
    TILE_TOKENS,
    Fit,
    LongRows,
    StepMemory,
    choose,
    choose_for_long,
)
from isopref.errors import ConfigError
from isopref.examples import PAIR, PAIR_SCORES, Example, PairTokens
from isopref.models.adapter import quantize_nf4, stored_bytes
from isopref.models.offload import HostCheckpoints
from isopref.models.parallel import checkpoint_layers, decoder_layers, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.models.tiles import TiledForward
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs, tiny_model
from isopref.types import ContextGroup, Microbatch

PLAIN, FULL = StepMemory(fixed=1000.0, per_token=10.0), StepMemory(fixed=1000.0, per_token=2.0)


def test_the_line_goes_through_both_measurements() -> None:
    line = StepMemory.through((100, 2000.0), (300, 4000.0))
    assert (line.fixed, line.per_token) == (1000.0, 10.0)
    assert line.at(300) == 4000.0


def test_no_layer_recomputes_where_all_fits() -> None:
    found = choose((PLAIN, FULL), (0, 32), 1000.0 + 10 * 9000, longest=500)
    assert (found.tokens, found.layers) == (9000, 0)


def test_rows_grow_no_further_than_they_help() -> None:
    assert choose((PLAIN, FULL), (0, 32), 1e9, longest=500).tokens == MOST_TOKENS
    assert choose((PLAIN, FULL), (0, 32), 1e9, longest=MOST_TOKENS + 7).tokens == MOST_TOKENS + 7


def test_ranks_that_share_rows_take_rows_as_much_longer() -> None:
    """Sizes are of complete rows; what is too small or large enough for speed is that of each rank's part."""
    assert choose((PLAIN, FULL), (0, 32), 1e9, longest=500, sharing=4).tokens == 4 * MOST_TOKENS
    room = PLAIN.at(2 * LEAST_TOKENS)
    found = [choose((PLAIN, FULL), (0, 32), room, longest=500, sharing=size).layers for size in (2, 4)]
    assert found[0] == 0 < found[1]
    tiled = partial(choose_for_long, FULL, lambda: TILED, 11, 15_000.0, long_rows(offload=False))
    assert tiled(wanted=4 * TILE_TOKENS, sharing=2)[0] is None
    found_tile, _ = tiled(wanted=2 * TILE_TOKENS, sharing=1)
    assert found_tile is not None
    assert found_tile.tile == TILE_TOKENS


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_as_few_layers_recompute_as_will_do(share: float) -> None:
    """With so much of what recomputing every layer would save missing, that share of the layers does.

    One more recomputes and saves nothing: in the backward pass a layer holds what it did not keep.
    """
    missing = share * (PLAIN.at(LEAST_TOKENS) - FULL.at(LEAST_TOKENS))
    found = choose((PLAIN, FULL), (0, 32), PLAIN.at(LEAST_TOKENS) - missing, longest=500)
    assert found.tokens >= LEAST_TOKENS
    assert 1 + 31 * share <= found.layers < 2 + 31 * share


def test_a_long_pair_decides_what_is_enough() -> None:
    found = choose((PLAIN, FULL), (0, 32), PLAIN.at(LEAST_TOKENS), longest=2 * LEAST_TOKENS)
    assert found.tokens >= 2 * LEAST_TOKENS
    assert 0 < found.layers < 32


def test_what_was_asked_for_stays() -> None:
    assert choose((PLAIN, FULL), (0, 32), 1e9, longest=500, tokens=3000).tokens == 3000
    assert choose((FULL, FULL), (32, 32), 1e9, longest=500).layers == 32


@pytest.mark.parametrize("layers", [(0, 0), (0, 32)])
def test_nothing_fits(layers: tuple[int, int]) -> None:
    measured = (PLAIN, PLAIN) if layers == (0, 0) else (PLAIN, FULL)
    with pytest.raises(
        ConfigError, match=r"a microbatch of 5000 tokens does not fit .*shorten the pairs: data\.max_length drops"
    ):
        choose(measured, layers, 1000.0 + 2 * 4000, longest=5000)


def long_rows(**changes: Any) -> LongRows:
    return replace(LongRows(offload=True, tile=True, input_bytes=0.1, host_room=1e9), **changes)


TILED = StepMemory(fixed=5000.0, per_token=1.0)


def for_long(room: float, allowed: LongRows, *, wanted: int = 10_000) -> tuple[int, int | None] | None:
    found, _ = choose_for_long(FULL, lambda: TILED, 11, room, allowed, wanted=wanted)
    return None if found is None else (found.offloaded, found.tile)


def test_as_few_layers_offload_as_a_long_pair_needs() -> None:
    """A step of 10,000 tokens takes 21,000 bytes with all layers recomputing, and each of 9 layers can leave 1,000.

    Of 11 layers, one's input is in use and one's on its way.
    """
    assert for_long(21_000.0, long_rows()) == (0, None)
    assert for_long(20_999.0, long_rows()) == (1, None)
    assert for_long(17_500.0, long_rows()) == (4, None)
    assert for_long(12_000.0, long_rows()) == (9, None)


def test_tiles_come_where_offloading_is_not_enough() -> None:
    """In tiles a step takes 15,000 bytes."""
    assert for_long(11_999.0, long_rows()) == (4, TILE_TOKENS)
    assert for_long(6_000.0, long_rows()) == (9, TILE_TOKENS)
    assert for_long(5_999.0, long_rows()) is None
    assert for_long(15_000.0, long_rows(offload=False)) == (0, TILE_TOKENS)
    assert for_long(14_999.0, long_rows(offload=False)) is None
    assert for_long(10_999.0, long_rows(tile=False)) is None


def test_rows_of_less_than_two_tiles_are_not_computed_in_tiles() -> None:
    assert for_long(9_000.0, long_rows(offload=False), wanted=2 * TILE_TOKENS - 1) is None
    assert for_long(15_000.0, long_rows(offload=False), wanted=2 * TILE_TOKENS) == (0, TILE_TOKENS)


@pytest.mark.parametrize(("layers", "most"), [(0, 0), (1, 0), (2, 1), (3, 1), (8, 6)])
def test_tiles_are_accepted_with_any_number_of_recomputing_layers(layers: int, most: int) -> None:
    """With layout.checkpointing: none it is 0. Not all of the layers can offload."""
    assert long_rows().most_offloaded(layers) == most
    fit, tried = choose_for_long(FULL, lambda: TILED, layers, 15_000.0, long_rows(), wanted=10_000)
    assert fit is not None
    assert (fit.offloaded, fit.tile) == ((6, None) if most == 6 else (0, TILE_TOKENS))
    assert ("offloading layer inputs" in tried) == (most > 0)


def test_only_what_was_tried_counts_as_tried() -> None:
    tries = partial(choose_for_long, FULL, layers=11, room=5_999.0, wanted=10_000)
    both = ["offloading layer inputs", "computing MLPs in tiles"]
    assert tries(lambda: TILED, allowed=long_rows()) == (None, both)
    assert tries(lambda: None, allowed=long_rows()) == (None, both[:1])
    assert tries(lambda: TILED, allowed=long_rows(offload=False)) == (None, both[1:])
    assert tries(lambda: None, allowed=long_rows(offload=False)) == (None, [])


def test_a_model_of_one_layer_takes_what_was_measured_with_it_recomputing() -> None:
    found = choose((PLAIN, FULL), (0, 1), FULL.at(LEAST_TOKENS), longest=LEAST_TOKENS)
    assert (found.tokens, found.layers) == (LEAST_TOKENS, 1)


def test_host_memory_limits_what_is_offloaded() -> None:
    assert for_long(17_500.0, long_rows(host_room=4000.0)) == (4, None)
    assert for_long(17_500.0, long_rows(host_room=3999.0)) == (0, TILE_TOKENS)
    assert for_long(13_500.0, long_rows(host_room=1999.0)) is None
    assert for_long(13_500.0, long_rows(host_room=2000.0)) == (2, TILE_TOKENS)


def _note(calls: list[nn.Module], module: nn.Module, *_: object) -> None:
    calls.append(module)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_recomputing_layers_give_the_same_gradient(count: int) -> None:
    """Whichever layers recompute, and the ones that were asked to, do: their inputs are all that they keep."""
    microbatch = build_microbatch(examples(random_pairs(3, seed=0, longest=9)), "shared")
    gradients = []
    for recompute in (0, count):
        policy = Policy(tiny_model("llama", dtype=torch.float64)).train()
        checkpoint_layers(policy, recompute)
        calls: list[nn.Module] = []
        layers = decoder_layers(policy)
        for layer in layers:
            layer.get_submodule("self_attn").register_forward_hook(partial(_note, calls))
        policy(microbatch).logp.sum().backward()
        counts = [calls.count(layer.get_submodule("self_attn")) for layer in layers]
        assert counts == [2 if number < recompute else 1 for number in range(2)]
        gradients.append([p.grad for p in policy.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_recomputing_is_switched_off_again() -> None:
    policy = Policy(tiny_model("llama")).train()
    for count in (2, 0):
        checkpoint_layers(policy, count)
        assert sum(bool(layer.gradient_checkpointing) for layer in decoder_layers(policy)) == count


def test_layers_are_found_when_they_are_sharded() -> None:
    policy = Policy(tiny_model("llama"))
    before = decoder_layers(policy)
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        parallelize(policy, "fsdp", device=torch.device("cpu"))
        assert decoder_layers(policy) == before
        checkpoint_layers(policy, 2)
        assert all(layer.gradient_checkpointing for layer in before)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy on a stand-in for a GPU, where a step takes 1,000 bytes and 10,000 a token, and 60 MB are free."""
    monkeypatch.setattr(
        microbatch_probe, "_peak", lambda _model, row, _sync: 1e3 + 1e4 * row.passes[0].input_ids.numel()
    )
    monkeypatch.setattr(microbatch_probe, "_room", lambda *_: 6e7)
    return Policy(tiny_model("llama")).train()


def fitted(policy: Policy, table: ExampleTable) -> Fit:
    return microbatch_probe.fit_microbatch(policy, table, "shared", grad_sync="last", layers=(0, 0), tokens=None)


@pytest.mark.parametrize("longest", [9, 1500])
def test_long_pairs_are_measured_like_short_ones(device: Policy, longest: int) -> None:
    """Rows of one pair and of two, where one is longer than a row should be."""
    found = fitted(device, ExampleTable.from_tokens(random_pairs(5, seed=0, longest=longest)))
    assert found.tokens == pytest.approx(6000, rel=1e-3)


def test_ranks_that_share_rows_measure_as_much_longer_ones(device: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ExampleTable.from_tokens(random_pairs(5, seed=0, longest=9))
    seen: list[int] = []
    own = microbatch_probe._rows

    def rows(table: ExampleTable, kind: RowKind, tokens: int) -> list[tuple[int, Microbatch]]:
        seen.append(tokens)
        return own(table, kind, tokens)

    monkeypatch.setattr(microbatch_probe, "_rows", rows)
    for size in (1, 4):
        device.context = ContextGroup("of these ranks", 0, size)
        assert fitted(device, table).tokens == pytest.approx(6000, rel=1e-3)
    assert seen == [microbatch_probe.PROBE_TOKENS, 4 * microbatch_probe.PROBE_TOKENS]


@pytest.mark.parametrize(("room", "measured", "layers"), [(9e7, [0], 0), (7e7, [0, 2], 2), (4.2e7, [0, 2], 2)])
def test_recomputing_is_measured_only_where_it_may_be_needed(
    device: Policy, monkeypatch: pytest.MonkeyPatch, room: float, measured: list[int], layers: int
) -> None:
    """A token takes 10,000 bytes, and half of it where both layers recompute."""
    seen: list[int] = []

    def peak(model: nn.Module, row: Microbatch, _sync: str) -> float:
        recompute = sum(bool(layer.gradient_checkpointing) for layer in decoder_layers(unwrap(model)))
        seen.append(recompute)
        return 1e4 * row.passes[0].input_ids.numel() * (1 - recompute / 4)

    monkeypatch.setattr(microbatch_probe, "_peak", peak)
    monkeypatch.setattr(microbatch_probe, "_room", lambda *_: room)
    table = ExampleTable.from_tokens(random_pairs(5, seed=0, longest=9))
    found = microbatch_probe.fit_microbatch(device, table, "shared", grad_sync="last", layers=(0, 2), tokens=None)
    assert sorted(set(seen)) == measured
    assert found.layers == layers


@pytest.mark.parametrize(
    ("room", "offloaded", "tile"), [(9.0, 0, None), (7.9, 1, None), (6.5, 0, True), (4.9, 1, True)]
)
def test_what_a_long_pair_needs_is_set(
    device: Policy, monkeypatch: pytest.MonkeyPatch, room: float, offloaded: int, tile: bool | None
) -> None:
    """A token takes 8 bytes with both layers recomputing, 5.5 with MLPs in tiles; an input in host memory saves one."""
    seen: list[int] = []

    def tiled(model: nn.Module) -> list[int | None]:
        return [one.forward.tokens for one in model.modules() if isinstance(one.forward, TiledForward)]

    def peak(model: nn.Module, row: Microbatch, _sync: str) -> float:
        tokens = row.passes[0].input_ids.numel()
        seen.append(tokens)
        return (5.5 if any(tiled(model)) else 8.0) * tokens

    pairs = random_pairs(3, seed=0, longest=9)
    long = pairs[0]._replace(prompt=np.resize(pairs[0].prompt, 20_000))
    table = ExampleTable.from_tokens([*pairs, long])
    monkeypatch.setattr(microbatch_probe, "_peak", peak)
    monkeypatch.setattr(microbatch_probe, "_room", lambda *_: room * int(table.lengths.tree.max()))
    found = microbatch_probe.fit_microbatch(
        *(device, table, "shared"), grad_sync="last", layers=(2, 2), tokens=None, allowed=long_rows(input_bytes=1.0)
    )
    assert (found.offloaded, found.tile) == (offloaded, TILE_TOKENS if tile else None)
    assert found.tokens >= table.lengths.tree.max()
    assert any(tiled(device)) == bool(tile)
    ways: list[Any] = [layer._gradient_checkpointing_func for layer in decoder_layers(device)]
    offloads = [way.__func__ is HostCheckpoints.recompute for way in ways]
    assert offloads == [number < offloaded for number in range(2)]
    if tile:  # measured on rows of more than one tile
        assert max(seen) > 2 * TILE_TOKENS


def test_auto_does_without_tiles_where_a_model_cannot_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The routers of ZAYA's experts take what those of the layer before return."""
    policy = Policy(tiny_family("zaya")).train()
    pairs = random_pairs(3, seed=0, longest=9)
    table = ExampleTable.from_tokens([*pairs, pairs[0]._replace(prompt=np.resize(pairs[0].prompt, 20_000))])
    longest = int(table.lengths.tree.max())
    monkeypatch.setattr(microbatch_probe, "_peak", lambda _model, row, _sync: 8.0 * row.passes[0].input_ids.numel())
    monkeypatch.setattr(microbatch_probe, "_room", lambda *_: 7.5 * longest)
    fit = partial(
        microbatch_probe.fit_microbatch, policy, table, "shared", grad_sync="last", layers=(2, 2), tokens=None
    )
    assert fit(allowed=long_rows(input_bytes=1.0)) == Fit(longest, 2, ANY, offloaded=1)
    said: list[str] = []
    with pytest.raises(ConfigError, match="does not fit") as raised:
        fit(allowed=long_rows(offload=False), say=said.append)
    assert "in tiles does not free" not in str(raised.value)
    assert len(said) == 1
    assert said[0].startswith("layout.mlp_tile_tokens: auto is null: ")
    assert not any(isinstance(one.forward, TiledForward) and one.forward.tokens for one in policy.modules())


def test_rows_are_not_measured_on_pairs_that_are_long_themselves(device: Policy) -> None:
    pairs = [PairTokens(*(np.resize(part, 30_000) for part in pair)) for pair in random_pairs(3, seed=0, longest=9)]
    (few, _), (many, _) = microbatch_probe._rows(ExampleTable.from_tokens(pairs), "shared", 1024)
    assert few <= microbatch_probe.SHORTENED
    assert many == 2 * few


def test_shortened_examples_keep_their_trained_tokens_and_shared_beginnings() -> None:
    """Of answers that share nine tenths, and of which the last tenth is trained, a row has a quarter."""
    rng = np.random.default_rng(0)
    common, rest = rng.integers(1, 50, 6480), [rng.integers(1, 50, size) for size in (720, 640)]
    answers = tuple(np.concatenate([common, one]) for one in rest)
    weights = tuple(np.concatenate([np.zeros(6480), np.ones(len(one))]) for one in rest)
    size = 4 * microbatch_probe.SHORTENED - sum(map(len, answers))
    long = Example(rng.integers(1, 50, size), answers, PAIR, PAIR_SCORES, weights=weights)
    short = microbatch_probe._shortened(long)
    assert sum(map(len, short.parts)) == microbatch_probe.SHORTENED
    assert short.trained == (180, 160)
    assert np.array_equal(short.answers[0][:1620], short.answers[1][:1620])
    first = long._replace(prompt=np.resize(common, 90_000), answers=(common[:1], common), weights=())
    assert min(map(len, microbatch_probe._shortened(first).parts)) == 1


def test_no_row_is_measured_in_tiles_that_is_longer_than_the_one_that_must_fit(
    device: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run out of memory and end the run, where a row as long as the longest pair fits."""
    longest = 3 * TILE_TOKENS

    def peak(_model: nn.Module, row: Microbatch, _sync: str) -> float:
        tokens = row.passes[0].input_ids.numel()
        if tokens > longest:
            raise torch.OutOfMemoryError
        return tokens * (5.0 if any(isinstance(one.forward, TiledForward) for one in device.modules()) else 8.0)

    pairs = random_pairs(3, seed=0, longest=9)
    long = pairs[0]._replace(prompt=np.resize(pairs[0].prompt, longest - 30))
    monkeypatch.setattr(microbatch_probe, "_peak", peak)
    monkeypatch.setattr(microbatch_probe, "_room", lambda *_: 6.0 * longest)
    table, allowed = ExampleTable.from_tokens([*pairs, long]), long_rows(offload=False)
    found = microbatch_probe.fit_microbatch(
        *(device, table, "shared"), grad_sync="last", layers=(2, 2), tokens=None, allowed=allowed
    )
    assert found.tile == TILE_TOKENS


def test_a_row_that_does_not_fit_ends_the_run(device: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(microbatch_probe, "_peak", out_of_memory)
    with pytest.raises(ConfigError, match=r"not even a microbatch of .* fits .*layout\.checkpointing"):
        fitted(device, ExampleTable.from_tokens(random_pairs(5, seed=0, longest=9)))


def test_a_part_of_a_layer_is_no_layer() -> None:
    """Mamba names its blocks and the mixers inside them."""
    policy = Policy(tiny_model("mamba"))
    names = [type(layer).__name__ for layer in decoder_layers(policy)]
    assert names == ["MambaBlock"] * 2


def test_a_weight_in_four_bits_takes_its_own_bytes() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert stored_bytes(weight) == 2 * weight.numel()
    quantize_nf4(model, torch.device("cpu"), head=model.get_output_embeddings())
    weight = model.model.layers[0].mlp.up_proj.weight
    # Half a byte each, a byte for the scale of 64; tables of a fixed size on top.
    assert 0 < stored_bytes(weight) - weight.numel() * (1 / 2 + 1 / 64) < 64
