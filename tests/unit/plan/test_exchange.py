"""What ranks that split rows send, take and keep, counted by hand on a tiny Llama."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isopref.cards import CARDS
from isopref.models.shape import ModelShape, shape_of
from isopref.plan.exchange import Exchange, key_repeats, layer_bytes
from isopref.plan.layout import ONE_GPU, Layout, Loads
from isopref.plan.memory import kept_bytes, peak_memory
from isopref.plan.network import HOP_S, LINK_SHARE, NODE_HOP_S, Network
from isopref.plan.speed import step_time
from isopref.testing.models import tiny_model

LAYERS, D, Q, KV, OUT = 2, 32, 32, 16, 32  # of the tiny Llama: layers, width, queries, keys (2 heads of 8), output
NETWORK = Network(inside=100e9, between=10e9, ranks_per_node=8)


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_of(tiny_model("llama"))


def split(size: int, **changes: Any) -> Layout:
    return replace(ONE_GPU, parallel="fsdp", ranks=size, shard=size, context=size, **changes)


def row(tokens: float) -> Loads:
    return Loads(*(np.array([[tokens * share]]) for share in (1.0, 1.5, 0.5, 40.0, 0.1)))


def test_a_token_takes_its_queries_keys_values_and_output_along(llama: ModelShape) -> None:
    assert layer_bytes(llama, split(2)) == 2 * (Q + 2 * KV + OUT)
    assert layer_bytes(llama, split(4)) == 2 * (Q + 2 * 2 * KV + OUT)  # two key heads for four ranks


@pytest.mark.parametrize(("size", "times"), [(1, 1), (2, 1), (4, 2), (6, 3), (8, 4)])
def test_key_heads_are_sent_as_often_as_ranks_need_them(llama: ModelShape, size: int, times: int) -> None:
    assert key_repeats(llama, size) == times


@pytest.mark.parametrize(
    ("recompute", "forwards", "passes"), [(0, 0.0, 2.0), (1, 0.0, 2.5), (2, 0.0, 3.0), (2, 1.0, 4.0)]
)
def test_what_a_rank_sends(llama: ModelShape, recompute: int, forwards: float, passes: float) -> None:
    """Of its quarter of 1,000 tokens it sends three quarters, in every layer and pass."""
    found = Exchange.of(llama, split(4, recompute=recompute, forwards=forwards))
    there = passes * LAYERS * 2 * (Q + 4 * KV + OUT)
    assert found.sent_bytes(row(1000.0)).item() == pytest.approx(there * 250 * 3 / 4)
    assert found.calls == passes * LAYERS * 2
    inside = there * 250 * 3 / 4 / (LINK_SHARE * 100e9) + found.calls * HOP_S
    assert found.seconds(row(1000.0), NETWORK).item() == pytest.approx(inside)


def test_a_group_over_machines_waits_for_their_links() -> None:
    assert NETWORK.all_to_all_s(8) == pytest.approx((7 / 8 / (LINK_SHARE * 100e9), HOP_S))
    assert NETWORK.all_to_all_s(16) == pytest.approx((8 / 16 / (LINK_SHARE * 10e9), NODE_HOP_S))


def test_ranks_share_what_a_row_takes(llama: ModelShape) -> None:
    """All but the exchange, and what it adds to memory: the output once more, and keys that are sent twice."""
    card = CARDS["H100"]
    alone = step_time(llama, split(1), card, row(1e6), NETWORK)
    together = step_time(llama, split(4), card, row(1e6), NETWORK)
    assert together.products == pytest.approx(alone.products / 4)
    assert together.attention == pytest.approx(alone.attention / 4)
    assert (alone.exchange, together.exchange > 0) == (0.0, True)
    more = kept_bytes(llama, split(4))[0] - kept_bytes(llama, split(1))[0]
    assert more == 2 * (OUT + 2 * KV)
    memory = [peak_memory(llama, split(size), row(1e6), answers=0).activations for size in (1, 2)]
    kept, copied = kept_bytes(llama, split(2))
    assert memory[1] == pytest.approx(LAYERS * (5e5 * kept + 2.5e5 * copied) + 2 * 5e5 * 2 * D)
    assert memory[0] / memory[1] == pytest.approx(2, rel=0.2)
