"""Plans for ranks that compute each layer or each row together, counted by hand on a tiny Llama."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isopref.cards import CARDS
from isopref.errors import ConfigError
from isopref.models.shape import ModelShape, shape_of
from isopref.plan.layout import ONE_GPU, Layout, Loads
from isopref.plan.memory import Memory, kept_bytes, peak_memory
from isopref.plan.network import HOP_S, LINK_SHARE, NODE_HOP_S, Network, Traffic
from isopref.plan.speed import step_time
from isopref.plan.together import Exchange, check_context, check_tensor, contexts, head_bytes, key_repeats, state_bytes
from isopref.testing.families import tiny_family
from isopref.testing.models import VOCABULARY, tiny_model

D, Q, KV, F, HEADS, LAYERS = 32, 32, 16, 48, 4, 2  # of the tiny Llama: width, queries, keys, MLP, heads, layers
HEAD = VOCABULARY * D
T = 1000.0


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_of(tiny_model("llama"))


def load(tokens: float, keys: float, predicted: float, scores: float = 0.0) -> Loads:
    return Loads(*(np.array([[value]]) for value in (tokens, keys, predicted, scores, 0.0)))


def two_by_two(**changes: Any) -> Layout:
    """Four ranks in bfloat16: two compute a layer together, and two such groups share the weights."""
    return replace(ONE_GPU, **{"parallel": "fsdp", "ranks": 4, "shard": 2, "tensor": 2, **changes})


INSIDE = 2 * Q + 2 * KV + 3 * F  # queries, keys, values and attention's output; gate, up and their product


def test_what_a_layer_keeps_by_hand(llama: ModelShape) -> None:
    """The inputs of attention and MLP for all tokens; half of what is inside, half of the two sums; in half the heads.

    Uncompiled, half of two norms' six numbers, and of the activation of the gate.
    """
    numbers = INSIDE / 2 + 2 * D / 2 + 2 * D
    assert kept_bytes(llama, two_by_two()) == (2 * numbers + 4 * HEADS / 2, 2 * 2 * KV / 2)
    more = (6 * D + F) / 2
    assert kept_bytes(llama, two_by_two(compiled=False))[0] == 2 * (numbers + more) + 4 * HEADS / 2


OF_HEAD = 6000 * VOCABULARY * 2 + 2 * 6000 * D * 2 + HEAD * 2 + 1000 * D * 2  # in full, and the gathered hidden states
OF_BACKWARD = 1000 * 2 * (INSIDE / 2 + 2 * D)  # half of the inner gradients, and two of all tokens


@pytest.mark.parametrize(("predicted", "on_top"), [(600.0, OF_BACKWARD), (6000.0, OF_HEAD)])
def test_peak_by_hand(llama: ModelShape, predicted: float, on_top: float) -> None:
    """A quarter of weights and optimizer; half of the gradients, and of what is gathered, besides the head."""
    kept = 1000 * (2 * (INSIDE / 2 + 2 * D / 2 + 2 * D) + 4 * HEADS / 2) + 300 * 4 * KV / 2
    expected = Memory(
        weights=2.0 * llama.parameters / 4,
        gathered=2.0 * llama.parameters / 2 + 2 * HEAD,
        gradients=2.0 * llama.parameters / 2,
        optimizer=4.0 * llama.parameters / 4,
        activations=2 * kept + 2 * 1000 * D * 2 / 2,
        logits=on_top,
        cache=8.0 * 50,
    )
    found = peak_memory(llama, two_by_two(), load(1000.0, 1300.0, predicted), answers=100)
    assert vars(found) == pytest.approx(vars(expected))


def test_reducing_every_time_and_one_group_alone(llama: ModelShape) -> None:
    """Its own quarter and half of the largest unit; with one group nothing is gathered but the head."""
    unit = max(llama.root_parameters, llama.layer_parameters)
    every = peak_memory(llama, two_by_two(grad_sync="every"), load(T, T, T), answers=0)
    assert every.gradients == pytest.approx(2 * llama.parameters / 4 + unit / 2 * 4)
    at_once = llama.root_parameters + 2 * llama.layer_parameters
    assert every.gathered == pytest.approx(min(at_once, llama.parameters) + 2 * HEAD)
    alone = peak_memory(llama, two_by_two(ranks=2, shard=1), load(T, T, T), answers=0)
    assert alone.gathered == 2 * HEAD


def test_recomputing_layers_keep_their_share_of_the_tokens(llama: ModelShape) -> None:
    plain, again = (
        peak_memory(llama, two_by_two(recompute=count), load(T, T, T), answers=0).activations for count in (0, 1)
    )
    assert plain - again == pytest.approx(T * kept_bytes(llama, two_by_two())[0] - T * D * 2 / 2)


@pytest.mark.parametrize(
    ("changes", "rows", "heads"),
    [
        ({}, 4 * LAYERS * 2 + 2 + 1, 1),
        ({"recompute": 2}, 4 * LAYERS * 2 + 4 * 2 + 2 + 1, 1),
        ({"references": 1, "forwards": 1}, 4 * LAYERS * 3 + 2 * 2 + 1, 2),
    ],
)
def test_what_ranks_exchange_by_hand(llama: ModelShape, changes: dict[str, Any], rows: int, heads: int) -> None:
    """Rows: four in each pass of a layer, two forward and one backward at the ends. The head, in each pass forward.

    Of two microbatches on each of two groups, by one rank of two: half of it sent, one hop per call.
    """
    tokens = np.array([[1000.0, 600.0], [800.0, 0.0]])
    network = Network(inside=100e9, between=10e9)
    together = two_by_two(**changes)
    gathered = 2 * (rows * D * tokens + heads * HEAD)
    np.testing.assert_allclose(Exchange.of(llama, together, network).sent_bytes(tokens), gathered / 2)
    seconds = gathered / 2 / (LINK_SHARE * 100e9) + (rows + heads) * HOP_S
    np.testing.assert_allclose(Exchange.of(llama, together, network).seconds(tokens), seconds)
    alone = Exchange.of(llama, two_by_two(tensor=1), network)
    assert not alone.seconds(tokens).any()
    assert not alone.sent_bytes(tokens).any()


def test_norms_of_queries_and_keys_are_exchanged_for(llama: ModelShape) -> None:
    """Twice in each of four passes through a layer, a rank sends half of its half of the queries and keys."""
    assert llama.normed_width == 0
    for architecture in ("qwen3", "olmo2", "olmo3", "gemma3"):
        assert shape_of(tiny_model(architecture)).normed_width == Q + KV
    tokens, network = np.array([[1000.0]]), Network(inside=100e9, between=10e9)
    normed = replace(llama, normed_width=Q + KV)
    plain, more = (Exchange.of(shape, two_by_two(), network) for shape in (llama, normed))
    sent = 2 * 2 * LAYERS * 1000 * 2 * (Q + KV) / 2 / 2
    np.testing.assert_allclose(more.sent_bytes(tokens) - plain.sent_bytes(tokens), sent)
    waits = more.seconds(tokens) - plain.seconds(tokens)
    np.testing.assert_allclose(waits, sent / (LINK_SHARE * 100e9) + 4 * 2 * LAYERS * HOP_S)


def test_groups_gather_over_other_machines(llama: ModelShape) -> None:
    """Sixteen ranks in two machines, eight to a layer: each rank shares its eighth with one of the other machine."""
    network = Network(inside=100e9, between=10e9)
    found = Traffic.of(llama, two_by_two(ranks=16, shard=2, tensor=8), network)
    whole = 2 * llama.parameters / 8
    assert found.gather_bytes == found.reduce_bytes == pytest.approx(whole / 2)
    seconds = whole / 2 / (LINK_SHARE * 10e9) + (LAYERS + 1) * NODE_HOP_S
    assert found.gather_s == found.reduce_s == pytest.approx(seconds)
    assert found.last_s == 0
    replicas = Traffic.of(llama, two_by_two(parallel="hsdp", ranks=16, shard=2, tensor=4), network)
    assert replicas.last_bytes == pytest.approx(2 * 2 * llama.parameters / 4 / 2 / 2)
    assert replicas.gather_s == pytest.approx(llama.parameters / 4 / (LINK_SHARE * 100e9) + (LAYERS + 1) * HOP_S)


def test_a_step_by_hand(llama: ModelShape) -> None:
    """Half of the layers' work, all of the head's, and all that is exchanged on top."""
    card, network = CARDS["H200"], Network.of(CARDS["H200"])
    row = load(1000.0, 1000.0, 100.0, 128.0**2)
    alone, together = (
        step_time(llama, replace(two_by_two(), ranks=ranks, shard=1, tensor=ranks), card, row, network)
        for ranks in (1, 2)
    )
    rate = 0.72 * 989e12
    of_layers, of_head = 3 * 1000 * 2 * LAYERS * llama.active_parameters, 3 * 100 * 2 * HEAD
    assert alone.products == pytest.approx((of_layers + of_head) / rate)
    assert together.products == pytest.approx((of_layers / 2 + of_head) / rate)
    assert together.attention == pytest.approx(alone.attention / 2)
    assert together.optimizer == pytest.approx(alone.optimizer / 2)
    exchanged = Exchange.of(llama, two_by_two(ranks=2, shard=1), network).seconds(row.tokens)
    assert together.exchange == pytest.approx(float(exchanged[0, 0]))
    assert alone.exchange == alone.network == together.network == 0


def test_weights_are_divided_and_the_head_is_not(llama: ModelShape) -> None:
    """Read twice and accumulated four times for each microbatch, of 85% of the bandwidth."""
    card, network, nothing = CARDS["H200"], Network.of(CARDS["H200"]), load(0.0, 0.0, 0.0)
    alone, together = (
        step_time(llama, two_by_two(ranks=ranks, shard=1, tensor=ranks), card, nothing, network).elementwise
        for ranks in (1, 2)
    )
    times = 2 * 6 / (0.85 * 4.8e12)
    assert alone == pytest.approx(llama.parameters * times)
    assert together == pytest.approx((llama.parameters / 2 + HEAD / 2) * times)


@pytest.mark.parametrize(
    ("degree", "ranks", "fitting"),
    [(3, 6, "1, 2"), (4, 8, "1, 2"), (16, 16, "1, 2"), (2, 3, "1")],
)
def test_degrees_that_do_not_fit(llama: ModelShape, degree: int, ranks: int, fitting: str) -> None:
    """Four heads and two key heads."""
    network = Network(inside=100e9, between=10e9)
    with pytest.raises(ConfigError) as refusal:
        check_tensor(llama, degree, network, ranks)
    assert str(refusal.value) == (
        f"layout.tensor_parallel: {degree} does not fit {ranks} GPUs and this model. It must divide the number of "
        "GPUs, divide the model's heads and key heads (their greatest common divisor is 2), and stay within one "
        f"machine (8 GPUs). Use one of {fitting}."
    )
    check_tensor(llama, 2, network, 6)


def test_a_group_stays_within_a_machine(llama: ModelShape) -> None:
    wide = replace(llama, heads=32, key_width=32 * llama.head_width)
    for degree in (1, 2, 4, 8):
        check_tensor(wide, degree, Network(inside=100e9, between=10e9), 64)
    with pytest.raises(ConfigError, match=r"tensor_parallel: 16 .* Use one of 1, 2, 4, 8\."):
        check_tensor(wide, 16, Network(inside=100e9, between=10e9), 64)


def split(size: int, **changes: Any) -> Layout:
    """Ranks that split rows, and shard the weights over all of them."""
    return replace(ONE_GPU, **{"parallel": "fsdp", "ranks": size, "shard": size, "context": size, **changes})


def row(tokens: float) -> Loads:
    return Loads(*(np.array([[tokens * share]]) for share in (1.0, 1.5, 0.5, 40.0, 0.1)))


def test_a_token_takes_its_queries_keys_values_and_output_along(llama: ModelShape) -> None:
    assert head_bytes(llama, split(2)) == 2 * (Q + 2 * KV + Q)
    assert head_bytes(llama, split(4)) == 2 * (Q + 2 * 2 * KV + Q)  # two key heads for four ranks


@pytest.mark.parametrize(("size", "times"), [(1, 1), (2, 1), (4, 2), (6, 3), (8, 4)])
def test_key_heads_are_sent_as_often_as_ranks_need_them(llama: ModelShape, size: int, times: int) -> None:
    assert key_repeats(llama, size) == times


@pytest.mark.parametrize(
    ("recompute", "forwards", "passes"), [(0, 0.0, 2.0), (1, 0.0, 2.5), (2, 0.0, 3.0), (2, 1.0, 4.0)]
)
def test_tokens_for_heads_by_hand(llama: ModelShape, recompute: int, forwards: float, passes: float) -> None:
    """Of its quarter of 1,000 tokens a rank sends three quarters, in every layer and pass, in two calls."""
    found = Exchange.of(llama, split(4, recompute=recompute, forwards=forwards), Network(inside=100e9, between=10e9))
    sent = passes * LAYERS * 2 * (Q + 4 * KV + Q) * 250 * 3 / 4
    tokens = np.array([[1000.0]])
    assert found.sent_bytes(tokens).item() == pytest.approx(sent)
    seconds = sent / (LINK_SHARE * 100e9) + passes * LAYERS * 2 * HOP_S
    assert found.seconds(tokens).item() == pytest.approx(seconds)


def test_layers_with_a_state_exchange_what_theirs_take(llama: ModelShape) -> None:
    """Mamba2's x, B, C and two rates for each head, and the output; attention only where there is some."""
    mamba, hybrid = shape_of(tiny_family("mamba2")), shape_of(tiny_model("bamba"))
    network = Network(inside=100e9, between=10e9)
    width, state, heads = 2 * D, 8, 4  # of x, of B and C, of the rates
    of_layer = 2 * (2 * width + 2 * 2 * state) + 4 * 2 * heads
    assert [state_bytes(one, split(2)) for one in mamba.exchanged] == [of_layer] * LAYERS
    assert [state_bytes(one, split(4)) for one in hybrid.exchanged] == [of_layer + 2 * 2 * 2 * state]  # B and C twice
    assert Exchange.of(mamba, split(2), network).of_token == 2 * LAYERS * of_layer / 2
    attention = head_bytes(hybrid, split(2))
    assert Exchange.of(hybrid, split(2), network).of_token == 2 * (of_layer + attention) / 2


def test_an_exchange_over_machines_waits_for_their_links() -> None:
    network = Network(inside=100e9, between=10e9, ranks_per_node=8)
    assert network.all_to_all_s(8) == pytest.approx((7 / 8 / (LINK_SHARE * 100e9), HOP_S))
    assert network.all_to_all_s(16) == pytest.approx((8 / 16 / (LINK_SHARE * 10e9), NODE_HOP_S))


def test_ranks_share_what_a_row_takes(llama: ModelShape) -> None:
    """All but the exchange, and what it adds to memory: the output once more, and keys that are sent twice."""
    card, network = CARDS["H100"], Network(inside=100e9, between=10e9)
    alone, together = (step_time(llama, split(size), card, row(1e6), network) for size in (1, 4))
    assert together.products == pytest.approx(alone.products / 4)
    assert together.attention == pytest.approx(alone.attention / 4)
    assert (alone.exchange, together.exchange > 0) == (0.0, True)
    more = kept_bytes(llama, split(4))[0] - kept_bytes(llama, split(1))[0]
    assert more == 2 * (Q + 2 * KV)
    memory = [peak_memory(llama, split(size), row(1e6), answers=0).activations for size in (1, 2)]
    kept, copied = kept_bytes(llama, split(2))
    assert memory[1] == pytest.approx(LAYERS * (5e5 * kept + 2.5e5 * copied) + 2 * 5e5 * 2 * D)
    assert memory[0] / memory[1] == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize(("parallel", "shard"), [("ddp", 1), ("fsdp", 8), ("hsdp", 2)])
def test_ranks_that_split_rows_reduce_and_shard_like_others(llama: ModelShape, parallel: str, shard: int) -> None:
    """Groups of the same pairs: two of four ranks, whose gradients are averaged over all eight."""
    layout = split(4, parallel=parallel, ranks=8, shard=shard)
    assert (layout.groups, layout.together, layout.averaging) == (2, 4, 8)
    network = Network(inside=100e9, between=10e9)
    assert Traffic.of(llama, layout, network) == Traffic.of(llama, replace(layout, context=1), network)


def test_ranks_that_cannot_split_a_row(llama: ModelShape) -> None:
    check_context(llama, 4, 8)
    with pytest.raises(ConfigError) as refusal:
        check_context(llama, 3, 6)
    assert str(refusal.value) == (
        "layout.context_parallel: 3 does not divide 4, the number of parts into which ranks can divide the model's "
        "heads. Use one of 1, 2, 4."
    )


@pytest.mark.parametrize(
    ("changes", "sizes"), [({}, [2, 4]), ({"context": 2}, [4]), ({"tensor": 2}, []), ({"rows": "padded"}, [])]
)
def test_ranks_that_could_split_a_row(llama: ModelShape, changes: dict[str, Any], sizes: list[int]) -> None:
    """Of eight, by four heads; not together with tensor parallelism."""
    assert contexts(llama, split(1, ranks=8, **changes)) == sizes
