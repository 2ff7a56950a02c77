"""Plans: counted by hand on tiny shapes, and held to what was measured on a GPU."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.packing import RowKind
from isopref.cards import CARDS
from isopref.examples import Lengths
from isopref.models import hf
from isopref.models.adapter import NewAdapter, add_adapter
from isopref.models.shape import ModelShape, shape_of
from isopref.ops.attention import Kernel
from isopref.plan.attention import is_measured
from isopref.plan.layout import ONE_GPU, Layout, Loads, loads_of, tile_scores
from isopref.plan.memory import Memory, kept_bytes, loading_memory, peak_memory
from isopref.plan.network import HOP_S, LINK_SHARE, NODE_HOP_S, Network, Traffic
from isopref.plan.speed import step_time
from isopref.testing.families import tiny_family
from isopref.testing.models import VOCABULARY, tiny_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
D, Q, KV, F, HEADS = 32, 32, 16, 48, 4  # of the tiny Llama: width, queries, keys, MLP, heads


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_of(tiny_model("llama"))


def load(tokens: float, keys: float, predicted: float, scores: float = 0.0, tile_rows: float = 0.0) -> Loads:
    return Loads(*(np.array([[value]]) for value in (tokens, keys, predicted, scores, tile_rows)))


def layout(**changes: Any) -> Layout:
    return replace(ONE_GPU, **changes)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_shape_of_a_tiny_llama(llama: ModelShape) -> None:
    layer = D * Q + 2 * D * KV + Q * D + 3 * D * F
    root = 2 * VOCABULARY * D + D  # embedding, head, last norm
    assert (llama.layers, llama.width, llama.heads, llama.key_width) == (2, D, HEADS, KV)
    assert llama.vocabulary == VOCABULARY
    assert llama.active_parameters == layer
    assert llama.root_parameters == root
    assert llama.parameters == root + 2 * (layer + 2 * D)  # and two norms a layer


def test_tied_weights_count_once_and_a_token_meets_some_experts(llama: ModelShape) -> None:
    assert shape_of(tiny_model("llama_tied")).parameters == llama.parameters - VOCABULARY * D
    experts = shape_of(tiny_model("qwen3_moe"))
    assert experts.layer_parameters - experts.active_parameters > 2 * 3 * D * 24  # two of four rest


@pytest.mark.parametrize("family", ["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"])
def test_layers_with_heads_of_two_widths(family: str) -> None:
    """The layers that attend to everything have the widest heads, and they decide how long a row can be."""
    shape = shape_of(tiny_family(family))
    assert (shape.heads, shape.head_width, shape.key_width) == (4, 512, 2 * 512)
    assert shape.flops.per_query_key == 4 * 512 * 4
    assert shape.flops.windows == {12: 8 / 512, None: 1}  # heads in windows are 8 wide
    assert shape.flops.attending == 2
    assert shape.row_parts == 4


def test_a_vision_tower_is_held_and_no_more() -> None:
    """Not trained, not gathered, not read: all but memory for its weights is what it is without."""
    text, both = (shape_of(tiny_model(name)) for name in ("gemma3", "gemma3_vision"))
    seen = sum(p.numel() for name, p in tiny_model("gemma3_vision").named_parameters() if "language_model" not in name)
    assert (both.parameters, both.unused_parameters) == (text.parameters + seen, seen)
    assert (both.trained_parameters, both.frozen_parameters) == (text.parameters, seen)
    for name in ("root_parameters", "layer_parameters", "share_in_matrices", "largest_matrix", "active_parameters"):
        assert getattr(both, name) == getattr(text, name), name
    for parallel in ({}, FSDP, {**FSDP, "grad_sync": "every"}):
        there = layout(**{**parallel, "frozen_bytes": 4})
        with_it, without = (peak_memory(shape, there, load(10.0, 10.0, 5.0), answers=0) for shape in (both, text))
        assert with_it == replace(without, weights=without.weights + 4 * seen / there.shard)
        network = Network(inside=100e9, between=10e9)
        assert Traffic.of(both, there, network) == Traffic.of(text, there, network)


def test_a_shape_needs_no_weights(tmp_path: Path, llama: ModelShape) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    empty = hf.load_empty(str(tmp_path))
    assert all(parameter.device == torch.device("meta") for parameter in empty.parameters())
    assert shape_of(empty).parameters == llama.parameters


# --- microbatches -----------------------------------------------------------------------------------------------------


def test_tiles_by_hand() -> None:
    """128 queries see 128 keys: one tile. 129: the second row of tiles has one query, and two tiles of keys."""
    queries, keys = np.array([0.0, 1, 128, 129, 10]), np.array([0.0, 1, 128, 129, 300])
    assert (tile_scores(queries, keys) / 128**2).tolist() == [0, 1, 1, 1 + 2, 3]


def test_tiles_of_a_window_by_hand() -> None:
    """With a window of 10, the last of 300 keys sees those from 290 on (counted from 0), all in its own tile of keys.

    With a window of 50, it sees those from 250 on, in two tiles. The first of the last 129 keys, which is key 171, sees
    those from 122 on, so its row of tiles needs all three.
    """
    queries, keys = np.array([1.0, 129, 128, 256]), np.array([300.0, 300, 128, 256])
    assert (tile_scores(queries, keys, 10) / 128**2).tolist() == [1, 2 + 1, 1, 1 + 2]
    assert (tile_scores(queries, keys, 50) / 128**2).tolist() == [2, 3 + 2, 1, 1 + 2]
    assert (tile_scores(queries, keys, 300) == tile_scores(queries, keys)).all()


def test_layers_with_windows_and_without_attention_do_less() -> None:
    """Olmo 3's layers have windows, most of LFM2's do not attend at all."""
    lengths = Lengths.of_pairs(np.array([[300, 500, 700]]))
    cut = [[[0]]]
    one, windowed, both = (
        loads_of(lengths, cut, "shared", Counter(windows)) for windows in ({None: 1}, {128: 1}, {None: 2, 128: 3})
    )
    assert both.scores == 2 * one.scores + 3 * windowed.scores
    assert both.tile_rows == 5 * one.tile_rows
    assert windowed.scores < one.scores
    for name, windows in (("olmo3", Counter({12: 2})), ("lfm2", Counter([None]))):
        assert shape_of(tiny_model(name)).flops.windows == windows


@pytest.mark.parametrize(
    ("kind", "tokens", "keys", "tiles"),
    [
        ("shared", 10 + 5 + 7 + 4 + 3 + 1, 2 * 10 + 5 + 7 + 2 * 4 + 3 + 1, 4),
        ("packed", 2 * 10 + 5 + 7 + 2 * 4 + 3 + 1, 2 * 10 + 5 + 7 + 2 * 4 + 3 + 1, 4),
        ("padded", 4 * 17, 4 * 17, 4),
        ("padded_separate", 2 * (15 + 17), 2 * (15 + 17), 4),
    ],
)
def test_loads_by_hand(kind: RowKind, tokens: int, keys: int, tiles: int) -> None:
    """Two pairs on the first of two ranks, and a rank without work."""
    found = loads_of(Lengths.of_pairs(np.array([[10, 5, 7], [4, 3, 1]])), [[[1, 0]], [[]]], kind, Counter([None]))
    assert found.tokens.tolist() == [[tokens], [0]]
    assert found.keys.tolist() == [[keys], [0]]
    assert found.predicted.tolist() == [[16], [0]]
    assert (found.scores / 128**2).tolist() == [[tiles], [0]]
    assert found.tile_rows.tolist() == [[4], [0]]
    assert found.largest.tokens.tolist() == [[tokens]]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_a_layer_keeps_by_hand(llama: ModelShape) -> None:
    """Two sums and their norms; queries, keys, values and attention's output; gate, up and their product."""
    numbers = 4 * D + (Q + 2 * KV + Q) + 3 * F
    assert kept_bytes(llama, ONE_GPU) == (2 * numbers + 4 * HEADS, 2 * 2 * KV)


HEAD = (
    6000 * VOCABULARY * 2 + 2 * 6000 * D * 2 + VOCABULARY * D * 2
)  # logits, hidden states twice, the weight's gradient
BACKWARD = 1000 * 2 * (2 * Q + 2 * KV + 3 * F + 2 * D)  # a gradient for each inner width, and for two sums


@pytest.mark.parametrize(("predicted", "on_top"), [(600.0, BACKWARD), (6000.0, HEAD)])
def test_peak_by_hand(llama: ModelShape, predicted: float, on_top: float) -> None:
    """It is where the head is done with its logits, or in the last layer's backward pass, whichever takes more."""
    kept = 1000 * (2 * (4 * D + 2 * Q + 2 * KV + 3 * F) + 4 * HEADS) + 300 * 4 * KV
    expected = Memory(
        weights=2.0 * llama.parameters,
        gathered=0.0,
        gradients=2.0 * llama.parameters,
        optimizer=4.0 * llama.parameters,
        activations=2 * kept + 2 * 1000 * D * 2,
        logits=on_top,
        cache=8.0 * 50,
    )
    found = peak_memory(llama, ONE_GPU, load(1000.0, 1300.0, predicted), answers=100)
    assert vars(found) == pytest.approx(vars(expected))
    assert found.total == pytest.approx(sum(vars(expected).values()))


def test_gradients_take_the_place_of_activations_in_a_step_of_one_microbatch(llama: ModelShape) -> None:
    """The head's are there from the start. At the end, all are, and the first layer may have recomputed."""
    head, kept = 2 * VOCABULARY * D, kept_bytes(llama, ONE_GPU)[0]
    for tokens, recompute, of_weights in (
        (1e6, 0, head),
        (0.0, 0, 2 * llama.parameters),
        (10.0, 1, 2 * llama.parameters + 10 * kept - (10 * kept + 10 * D * 2 + 2 * 10 * D * 2)),
    ):
        row, how = load(tokens, tokens, 0.0), layout(recompute=recompute)
        found, usual = (peak_memory(llama, how, row, answers=0, only_microbatch=only) for only in (True, False))
        assert usual.gradients == 2 * llama.parameters
        assert vars(found) == pytest.approx({**vars(usual), "gradients": of_weights})
    ddp = layout(parallel="ddp", ranks=8)
    assert peak_memory(llama, ddp, row, answers=0, only_microbatch=True) == peak_memory(llama, ddp, row, answers=0)


def test_recomputing_layers_keep_their_inputs(llama: ModelShape) -> None:
    row = load(1000.0, 1000.0, 600.0)
    plain, one, all_of_them = (peak_memory(llama, layout(recompute=count), row, answers=0) for count in (0, 1, 2))
    kept = 1000 * kept_bytes(llama, ONE_GPU)[0]
    inputs = 1000 * D * 2
    assert plain.activations - one.activations == one.activations - all_of_them.activations == kept - inputs
    # The other layer's activations are free again when the first recomputes its own.
    assert one.logits == plain.logits
    assert all_of_them.logits == pytest.approx(plain.logits + kept)


def test_sharding_divides_what_it_should(llama: ModelShape) -> None:
    row, whole = load(10.0, 10.0, 5.0), 4 * llama.parameters
    mixed = layout(parallel="fsdp", ranks=8, shard=8, weight_bytes=4, state_bytes=8)
    last, every = (
        peak_memory(llama, layout(**{**vars(mixed), "grad_sync": sync}), row, answers=0) for sync in ("last", "every")
    )
    assert last.weights == every.weights == whole / 8
    assert last.optimizer == every.optimizer == 2 * whole / 8
    assert (last.gradients, last.gathered) == (whole, 2 * llama.parameters)
    unit = max(llama.root_parameters, llama.layer_parameters)
    assert every.gradients == whole / 8 + 6 * unit
    assert peak_memory(llama, layout(parallel="ddp", ranks=8), row, answers=0).weights == 2 * llama.parameters


def test_an_adapter_has_gradients_and_state_of_its_own_only(llama: ModelShape) -> None:
    """Rank 4 on all seven matrices of both layers; the head is frozen, and has no gradient either."""
    model = tiny_model("llama")
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8), dtype=torch.float32, seed=0)
    adapted = shape_of(model)
    added = 2 * 4 * (2 * (D + Q) + 2 * (D + KV) + 3 * (D + F))
    assert (adapted.trained_parameters, adapted.frozen_parameters) == (added, llama.parameters)
    found = peak_memory(adapted, layout(weight_bytes=4, state_bytes=8), load(10.0, 10.0, 6000.0), answers=0)
    assert (found.weights, found.gradients, found.optimizer) == (4 * added + 2 * llama.parameters, 4 * added, 8 * added)
    assert found.logits == 6000 * VOCABULARY * 2 + 2 * 6000 * D * 2
    split = layout(parallel="fsdp", ranks=2, shard=2, weight_bytes=4)
    assert peak_memory(adapted, split, load(1.0, 1.0, 1.0), answers=0).weights == found.weights / 2
    in_four_bits = layout(**{**vars(split), "quantised": True, "frozen_bytes": 0.5})
    whole = peak_memory(adapted, in_four_bits, load(1.0, 1.0, 1.0), answers=0)
    assert whole.weights == 4 * added / 2 + llama.parameters / 2
    assert whole.gathered == 2 * added  # four bits are whole already


def test_offload_leaves_what_is_on_its_way(llama: ModelShape) -> None:
    away = layout(parallel="fsdp", grad_sync="every", weight_bytes=4, state_bytes=8, offload=True)
    found = peak_memory(llama, away, load(1.0, 1.0, 1.0), answers=0)
    assert (found.weights, found.optimizer) == (0, 0)
    assert found.gathered == 2 * min(llama.parameters, llama.root_parameters + 2 * llama.layer_parameters)
    assert found.gradients == 6 * max(llama.root_parameters, llama.layer_parameters)


FSDP: dict[str, Any] = {"parallel": "fsdp", "ranks": 8, "shard": 8, "weight_bytes": 4}


def test_a_model_is_loaded_whole(llama: ModelShape) -> None:
    """Sharded or offloaded only then; a reference that moves comes when the policy is sharded."""
    for away in (False, True):
        assert loading_memory(llama, layout(**FSDP, offload=away)) == 4 * llama.parameters
    assert loading_memory(llama, layout(**FSDP, references=1)) == 4 * llama.parameters * (1 + 1 / 8)
    model = tiny_model("llama")
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8), dtype=torch.float32, seed=0)
    adapted = shape_of(model)
    assert loading_memory(adapted, layout(**FSDP)) == 2 * llama.parameters + 4 * adapted.trained_parameters


def test_a_model_is_loaded_unit_by_unit(llama: ModelShape) -> None:
    """From the host's memory: its shards, if they are not to stay there, and one unit: a layer or the root."""
    shards, layer = 4 * llama.parameters / 8, 4 * (D * Q + 2 * D * KV + Q * D + 3 * D * F + 2 * D)
    found, away, moving = (
        loading_memory(llama, layout(**FSDP, from_host=True, **more))
        for more in ({}, {"offload": True}, {"references": 1})
    )
    assert (found, away, moving) == pytest.approx((shards + layer, layer, 2 * shards + layer))
    wide = replace(llama, root_parameters=llama.parameters // 2)
    assert loading_memory(wide, layout(**FSDP, from_host=True)) == pytest.approx(shards + 4 * llama.parameters / 2)


# --- time and network -------------------------------------------------------------------------------------------------


def test_ring_and_tree_by_hand() -> None:
    network = Network(inside=100e9, between=10e9)
    assert network.ring_s(1e9, 1, 5) == network.tree_s(1e9, 1, 5) == 0
    assert network.ring_s(8e9, 8, 3) == pytest.approx(7e9 / (LINK_SHARE * 100e9) + 3 * 7 * HOP_S)
    assert network.ring_s(16e9, 16, 1) == pytest.approx(15e9 / (LINK_SHARE * 80e9) + 14 * HOP_S + NODE_HOP_S)
    assert network.tree_s(4e9, 4, 1) == pytest.approx(2 * 3e9 / (LINK_SHARE * 10e9) + 2 * 2 * NODE_HOP_S)


def test_what_ranks_send(llama: ModelShape) -> None:
    network = Network.of(CARDS["H100"])
    whole = 2 * llama.parameters
    ddp = Traffic.of(llama, layout(parallel="ddp", ranks=4), network)
    assert ddp.bytes_per_step(5) == 2 * whole * 3 / 4
    fsdp = Traffic.of(llama, layout(parallel="fsdp", ranks=16, shard=16, grad_sync="every"), network)
    assert fsdp.bytes_per_step(5) == pytest.approx(5 * 3 * whole * 15 / 16)
    hsdp = Traffic.of(llama, layout(parallel="hsdp", ranks=16, shard=8), network)
    assert hsdp.bytes_per_step(5) == pytest.approx(2 * whole * 7 / 8 + 2 * whole / 8 / 2)
    both = Traffic.of(llama, layout(parallel="hsdp", ranks=16, shard=8, grad_sync="every"), network)
    assert both.bytes_per_step(5) == pytest.approx(5 * 3 * whole * 7 / 8 + 2 * whole / 8 / 2)


def test_only_what_computing_does_not_hide_is_waited_for() -> None:
    traffic = Traffic(0, 0, 0, gather_s=2.0, reduce_s=5.0, last_s=1.0, every=False)
    assert traffic.exposed_s(np.array([3.0, 3.0])) == (2 - 1) + (5 + 1 - 2)
    assert traffic.exposed_s(np.array([30.0, 30.0])) == 0
    every = Traffic(0, 0, 0, gather_s=2.0, reduce_s=5.0, last_s=1.0, every=True)
    assert every.exposed_s(np.array([3.0, 3.0])) == 2 * (2 - 1) + (7 - 2) + (8 - 2)


def test_the_slowest_rank_sets_the_pace(llama: ModelShape) -> None:
    """Two ranks, two microbatches, twice the work for one rank in each: that rank's own twice, or each in turn."""
    heavy, light = 20_000.0, 10_000.0
    card, network = CARDS["H200"], Network.of(CARDS["H200"])
    one_rank = Loads(*(np.array([[heavy, heavy], [light, light]]) for _ in range(5)))
    in_turn = Loads(*(np.array([[heavy, light], [light, heavy]]) for _ in range(5)))
    ddp, fsdp = layout(parallel="ddp", ranks=2), layout(parallel="fsdp", ranks=2, shard=2, grad_sync="every")
    assert step_time(llama, ddp, card, in_turn, network).imbalance == pytest.approx(0)
    assert step_time(llama, ddp, card, one_rank, network).imbalance > 0
    assert step_time(llama, fsdp, card, in_turn, network).imbalance == pytest.approx(
        step_time(llama, fsdp, card, one_rank, network).imbalance
    )


@pytest.mark.parametrize(
    ("kernel", "head_width", "share", "row_tiles"),
    [
        ("varlen_attn", 64, 0.165, 0),
        ("varlen_attn", 128, 0.20, 0),
        ("varlen_attn", 256, 0.20, 0),  # not measured: that of 128
        ("varlen_attn", 32, 0.165, 0),  # not measured: that of 64
        ("flash-attn-4", 64, 0.36, 1.6),
        ("flash-attn-4", 128, 0.61, 4.7),
    ],
)
def test_attention_takes_the_time_of_its_kernel(
    llama: ModelShape, kernel: Kernel, head_width: int, share: float, row_tiles: float
) -> None:
    """5 rows of tiles with 9 tiles in all: two products of 128 x 128 scores forward, five backward."""
    card, wide = CARDS["H200"], replace(llama, head_width=head_width)
    row = load(1000.0, 1000.0, 0.0, 9 * 128.0**2, 5.0)
    found = step_time(wide, layout(kernel=kernel), card, row, Network.of(card)).attention
    assert found == pytest.approx((2 + 5) * 2 * Q * (9 + row_tiles * 5) * 128**2 / (share * 989e12))
    assert is_measured(kernel, head_width) == (head_width in (64, 128))


def test_an_adapter_moves_both_sides_of_its_maps_four_times(llama: ModelShape) -> None:
    model, card = tiny_model("llama"), CARDS["H200"]
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8), dtype=torch.float32, seed=0)
    adapted = shape_of(model)
    assert (llama.adapter_sides, adapted.adapter_sides) == (0, 2 * (2 * (D + Q) + 2 * (D + KV) + 3 * (D + F)))
    row, network = load(1000.0, 1000.0, 0.0), Network.of(card)
    both = (step_time(one, ONE_GPU, card, row, network) for one in (adapted, replace(adapted, adapter_sides=0)))
    found, without = (one.elementwise for one in both)
    assert found - without == pytest.approx(4 * 2 * 1000 * adapted.adapter_sides / (0.85 * 4.8e12))


def test_recomputing_costs_one_more_forward_pass(llama: ModelShape) -> None:
    card, network, row = CARDS["H200"], Network.of(CARDS["H200"]), load(1000.0, 1000.0, 0.0, 128.0**2)
    plain, again = (step_time(llama, layout(recompute=count), card, row, network) for count in (0, 2))
    assert again.products == pytest.approx(4 / 3 * plain.products)
    assert plain.forward == pytest.approx((plain.products + plain.attention + plain.elementwise) / 3)
    assert again.attention == pytest.approx(4.5 / 3.5 * plain.attention)


def test_predictions_hold_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from plan_check import MEASURED, comparisons

    found = list(comparisons(*MEASURED))
    for one in found:
        assert abs(one.memory_error) < 0.03, one
        assert one.speed_error is None or abs(one.speed_error) < (0.10 if one.cell == "1b-kto" else 0.06), one
    speeds = [abs(one.speed_error) for one in found if one.speed_error is not None]
    assert len(speeds) >= 20
    assert sum(speeds) / len(speeds) < 0.03
    sys.modules.pop("plan_check", None)
