"""The balance of experts: by hand, against transformers, and as one number of a global batch."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from isopref.batch.packing import Budget, RowKind, plan_step
from isopref.batch.rows import build_microbatch
from isopref.batch.step import Step, build_step
from isopref.data.table import ExampleTable
from isopref.engine.first_pass import FirstPass, Gain, Score
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError, ModelError
from isopref.examples import PairTokens
from isopref.models.experts import check_routers, routing
from isopref.models.policy import Policy
from isopref.normalize import balance_coefficients
from isopref.objectives.loss import pair_loss
from isopref.testing import matrix
from isopref.testing.cells import KINDS, Cell, batch
from isopref.testing.exactness import StubTrainer, measure
from isopref.testing.models import ARCHITECTURES, examples, tiny_model


def test_routing_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.1, 0.3]]).double()
    tokens, probability = routing([p.log()], 2, torch.tensor([2, 1, 0]))  # a shared prompt, an answer, padding
    assert tokens.tolist() == [[2.0, 3.0, 1.0]]
    torch.testing.assert_close(probability, (2 * p[0] + p[1])[None])


def test_balance_by_hand() -> None:
    tokens = torch.tensor([[3.0, 1.0], [2.0, 2.0]])  # of four tokens, in two layers
    probability = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    found = (balance_coefficients(tokens, 4) * probability).sum()
    # E sum f P: 2 (3/4 * 3/4 + 1/4 * 1/4) and 2 (1/2 * 1/4 + 1/2 * 3/4)
    assert float(found) == pytest.approx((1.25 + 1.0) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_counts_in_each_sequence_and_padding_in_none(kind: RowKind) -> None:
    pairs = [
        PairTokens(*(np.array(part) for part in parts)) for parts in (([7, 8], [1, 2], [3]), ([9], [4], [5, 6, 6]))
    ]
    passes = build_microbatch(examples(pairs), kind).passes
    found: dict[int, int] = {}
    for one in passes:
        for token, times in zip(one.input_ids.ravel().tolist(), one.times.tolist(), strict=True):
            found[token] = found.get(token, 0) + times
    assert {token: times for token, times in found.items() if token} == {
        7: 2,
        8: 2,
        9: 2,
        **dict.fromkeys(range(1, 6), 1),
        6: 2,
    }
    assert found.get(0, 0) == 0
    assert not build_microbatch([], kind).passes[0].times.any()
    if kind in ("shared", "packed"):
        padded = build_microbatch(examples(pairs), kind, row_tokens=40).passes[0]
        assert int(padded.times.sum()) == int(passes[0].times.sum()) == 13


def test_one_layer_is_what_transformers_computes() -> None:
    """Where there are several layers, transformers throws them together; here each is balanced."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    pairs = batch(8)[0]
    with torch.no_grad():
        packed = build_microbatch(examples(pairs), "padded").passes[0]
        expected = model(
            input_ids=packed.input_ids,
            attention_mask=packed.times.view_as(packed.input_ids),
            output_router_logits=True,
        ).aux_loss
    module = DPOTrainModule(
        policy := Policy(model),
        torch.optim.SGD(policy.parameters()),
        objective=pair_loss("simpo", balance_weight=0.1),
        rank_microbatch_size=4096,
    )
    trainer = StubTrainer()
    module._attach_trainer(trainer)  # type: ignore[arg-type]
    table = ExampleTable.from_tokens(pairs)
    plan = plan_step(table.lengths, Budget("shared", 100), num_ranks=1)
    module.train_batch({"step": build_step(table, np.arange(8), plan, "shared", "token")})
    assert trainer.metrics["train/balance"] == pytest.approx(float(expected), rel=1e-5)


def test_the_balance_of_each_microbatch_would_show() -> None:
    """What others do: the share of an expert is that in a microbatch."""
    prepare = FirstPass.prepare

    def local(self: FirstPass, step: Step, score: Score, gain: Gain) -> Step:
        alone = [prepare(self, replace(step, work=(work,)), score, gain).work[0] for work in step.work]
        return replace(step, work=tuple(alone))

    cell = Cell(architecture="qwen3_moe", dtype="float32", balance_weight=20.0)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    with patch.object(FirstPass, "prepare", local):
        assert measure(cell).gradient_error > 1e-2


BIASED = {
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("architecture", BIASED)
def test_a_router_that_does_not_follow_its_logits_is_refused(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**ARCHITECTURES["llama"][1], **BIASED[architecture]}
    monkeypatch.setitem(ARCHITECTURES, architecture, (architecture, settings))
    model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(0)
    biases = [tensor for name, tensor in model.state_dict().items() if name.endswith("correction_bias")]
    for name, tensor in model.state_dict().items():
        if name.endswith("gate.weight"):  # Ernie's start at zero
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    check_routers(model)
    for bias in biases:
        bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    with pytest.raises(
        ModelError, match=r"objective\.balance_weight: .*experts other than the 2 with the highest router logits"
    ):
        check_routers(model)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma3"])
def test_a_model_without_experts_is_refused(architecture: str) -> None:
    check_routers(tiny_model("qwen3_moe"))
    model = tiny_model(architecture)
    with pytest.raises(ModelError, match=r"objective\.balance_weight: .* shows no router logits"):
        check_routers(model)
    policy = Policy(model)
    with pytest.raises(ConfigError, match="the model has no experts"):
        DPOTrainModule(
            policy,
            torch.optim.SGD(policy.parameters()),
            objective=pair_loss("simpo", balance_weight=0.1),
            rank_microbatch_size=4096,
        )
