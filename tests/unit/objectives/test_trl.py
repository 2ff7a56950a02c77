"""A second opinion: TRL's losses on the same log-probabilities, one pair at a time. Skips where TRL is not installed.

docs/objectives.md names where the two differ; what differs is not compared here, or is compared as it should be.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.engine.moving import MovingReference
from isopref.models.policy import Policy
from isopref.objectives.coupled import Whole
from isopref.objectives.loss import pair_loss
from isopref.testing.models import tiny_model
from isopref.types import Anchors, LabelLogps, PairLogps

pytest.importorskip("trl")

NUM_PAIRS = 6


def pairs() -> list[tuple[Tensor, Tensor]]:
    """The tokens' log-probabilities of chosen and rejected answers under the policy."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 9, (NUM_PAIRS, 2), generator=generator).tolist()
    return [(_tokens(chosen, generator), _tokens(rejected, generator)) for chosen, rejected in sizes]


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    return -2 * torch.rand(count, generator=generator, dtype=torch.float32)


def reference(pair: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
    return pair[0].sum() - 1.5 + 0.6 * number, pair[1].sum() + 1.0 - 0.5 * number


def same(value: Tensor) -> Tensor:
    return value


def counts(some: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.tensor([[len(one) for one in pair] for pair in some]).T


def by_trl(pair: tuple[Tensor, Tensor], ref: tuple[Tensor, Tensor], loss_type: str, **settings: Any) -> float:
    return by_trl_batch([pair], [ref], loss_type, **settings)


def by_trl_batch(
    some: list[tuple[Tensor, Tensor]],
    refs: list[tuple[Tensor, Tensor]],
    loss_type: str,
    collisions: list[Tensor] | None = None,
    **settings: Any,
) -> float:
    """What DPOTrainer computes for a batch, behind prompts of two tokens, with a model that is a table."""
    from trl import DPOTrainer

    answers = [pair[side] for side in (0, 1) for pair in some]
    longest = max(map(len, answers))
    mask = torch.tensor([[0, 0] + [1] * len(one) + [0] * (longest - len(one)) for one in answers])

    def padded(parts: list[Tensor]) -> Tensor:
        return torch.stack([torch.cat([torch.zeros(1), one, torch.zeros(longest - len(one))]) for one in parts])

    logps = padded(answers)
    nothing = torch.zeros_like(logps)
    outputs = SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    outputs.log_sum_sq_probs = padded(collisions or answers)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        args=SimpleNamespace(discopop_tau=0.05),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
        loss_types=[loss_type],
        loss_weights=[1.0],
        **{
            "f_divergence_type": "reverse_kl",
            "label_smoothing": 0.0,
            "f_alpha_divergence_coef": 0.5,
            "ld_alpha": None,
            "use_weighting": False,
            **settings,
        },
    )
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": torch.stack([chosen for chosen, _ in refs]),
        "ref_rejected_logps": torch.stack([rejected for _, rejected in refs]),
    }
    return float(DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False))


def ours(pair: tuple[Tensor, Tensor], ref: tuple[Tensor, Tensor], name: str, **params: Any) -> float:
    tokens = [torch.tensor([len(one)]) for one in pair]
    policy = PairLogps(pair[0].sum()[None], pair[1].sum()[None], *tokens)
    return float(pair_loss(name, **params)(policy, PairLogps(ref[0][None], ref[1][None], *tokens)))


@pytest.mark.parametrize(
    ("name", "loss_type", "params", "settings"),
    [
        ("sigmoid", "sigmoid", {"beta": 0.3}, {}),
        ("sigmoid", "sigmoid", {"beta": 0.3, "divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
        ("sigmoid", "sigmoid", {"beta": 0.3, "divergence": "jensen_shannon"}, {"f_divergence_type": "js_divergence"}),
        (  # TRL's coefficient is 1 - alpha
            *("sigmoid", "sigmoid", {"beta": 0.3, "divergence": 0.3}),
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
        ),
        ("dpo_norm", "sigmoid_norm", {"beta": 2.0}, {}),
        ("robust", "robust", {"beta": 0.3, "label_smoothing": 0.2}, {"label_smoothing": 0.2}),
        ("hinge", "hinge", {"beta": 0.3}, {}),
        ("ipo", "ipo", {"beta": 0.3}, {}),
        ("exo_pair", "exo_pair", {"beta": 0.3, "label_smoothing": 0.01}, {"label_smoothing": 0.01}),
        ("nca_pair", "nca_pair", {"beta": 0.3}, {}),
        ("sppo_hard", "sppo_hard", {"beta": 0.3}, {}),
        ("apo_zero", "apo_zero", {"beta": 0.3}, {}),
        ("apo_down", "apo_down", {"beta": 0.3}, {}),
        ("discopop", "discopop", {"beta": 0.3}, {}),
    ],
)
def test_with_a_reference(name: str, loss_type: str, params: dict[str, Any], settings: dict[str, Any]) -> None:
    for number, pair in enumerate(pairs()):
        ref = reference(pair, number)
        expected = by_trl(pair, ref, loss_type, beta=params["beta"], **settings)
        assert ours(pair, ref, name, **params) == pytest.approx(expected, rel=1e-5, abs=1e-6), number


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "bco_pair"])
def test_coupled_over_one_batch(name: str) -> None:
    """TRL in one microbatch. It leaves the shift out of bco_pair: here the past is such that the shift is zero."""
    every = pairs()
    refs = [reference(pair, number) for number, pair in enumerate(every)]
    policy, ref = (
        PairLogps(*torch.tensor([[float(one.sum()) for one in pair] for pair in some]).double().T, *counts(every))
        for some in (every, refs)
    )
    share = torch.full((len(every),), 1 / len(every), dtype=torch.float64)
    gains = policy.chosen - ref.chosen + policy.rejected - ref.rejected
    whole = Whole(share, torch.tensor([-float(gains.sum()) / 2, 1.0]).double())
    found = pair_loss(name, beta=0.3)(policy, ref, whole=whole)
    expected = by_trl_batch(every, refs, name, beta=0.3)
    assert float(found.mean()) == pytest.approx(expected, rel=1e-5)


def test_ld_alpha_and_wpo() -> None:
    """LD-DPO's sums and WPO's weights of the tokens, which isopref makes elsewhere, made here by hand."""
    for number, pair in enumerate(pairs()):
        ref, tokens, common = reference(pair, number), counts([pair]), min(map(len, pair))
        collisions = [0.3 * one - 0.2 for one in pair]
        logps = [(one[:common].sum() + 0.4 * one[common:].sum())[None] for one in pair]
        weight = torch.stack([(one - other).mean() for one, other in zip(pair, collisions, strict=True)]).sum().exp()
        policy = PairLogps(logps[0], logps[1], tokens[0], tokens[1], weight=weight[None])
        found = pair_loss("sigmoid", beta=0.3)(policy, PairLogps(ref[0][None], ref[1][None], tokens[0], tokens[1]))
        expected = by_trl_batch([pair], [ref], "sigmoid", collisions, beta=0.3, ld_alpha=0.4, use_weighting=True)
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_that_trl_leaves_out() -> None:
    pair = pairs()[0]
    ref = reference(pair, 0)
    plain, smoothed = (by_trl(pair, ref, "sigmoid", beta=0.3, label_smoothing=e) for e in (0.0, 0.2))
    assert plain == smoothed
    assert ours(pair, ref, "sigmoid", beta=0.3) == pytest.approx(plain, rel=1e-6)
    assert ours(pair, ref, "sigmoid", beta=0.3, label_smoothing=0.2) != pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("name", ["simpo", "cpo"])
def test_cpo_and_simpo(name: str) -> None:
    from trl.experimental.cpo import CPOTrainer

    for number, pair in enumerate(pairs()):
        if name == "simpo":
            settings: dict[str, Any] = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7}
            means = [one.mean() for one in pair]
            found = ours(pair, reference(pair, number), "simpo", beta=2.0, gamma=0.7)
        else:  # TRL adds the likelihood elsewhere, as a mean over tokens
            settings = {"loss_type": "sigmoid", "beta": 0.3}
            means = [one.sum() for one in pair]
            found = ours(pair, reference(pair, number), "cpo", beta=0.3) + float(pair[0].mean())
        trainer = SimpleNamespace(alpha=0.0, label_smoothing=0.0, accelerator=SimpleNamespace(device="cpu"), **settings)
        expected, *_ = CPOTrainer.cpo_loss(trainer, *means)
        assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def test_orpo() -> None:
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    for number, pair in enumerate(pairs()):
        ratio, *_ = ORPOTrainer.odds_ratio_loss(
            trainer, pair[0].mean(), pair[1].mean()
        )  # TRL subtracts it from the NLL
        expected = -float(pair[0].mean()) - float(ratio)
        assert ours(pair, reference(pair, number), "orpo", beta=0.4) == pytest.approx(expected, rel=1e-5)


def test_a_moving_reference() -> None:
    from trl.trainer.callbacks import SyncRefModelCallback

    model, theirs, own = (tiny_model("gpt2", seed=seed) for seed in (0, 1, 1))
    SyncRefModelCallback._sync_target_model(model, theirs, 0.6)
    MovingReference(policy := Policy(own), every=2, mix=0.6).follow(Policy(model), step=4)
    for one, other in zip(policy.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("labels", [[True, False, True, True, False], [True] * 5, [False] * 5])
@pytest.mark.parametrize("shift", [2.0, -3.0])  # with a KL term above zero, and with one that is cut off there
def test_kto(labels: list[bool], shift: float) -> None:
    """KTOTrainer on one batch, with the log-probabilities of matched and mismatched pairs that a model would give."""
    from trl import KTOTrainer

    answers = [pair[0] for pair in pairs()][: len(labels)]
    longest = max(map(len, answers))
    logps = torch.stack([torch.cat([torch.zeros(1), one, torch.zeros(longest - len(one))]) for one in answers])
    ref = logps.sum(dim=1) - torch.linspace(-2, 3, len(labels))
    mismatched = torch.linspace(-9, -5, len(labels))
    ref_mismatched = mismatched - shift
    nothing = torch.zeros_like(logps)
    outputs = SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=same),
        _compute_kl_logps=lambda *_: mismatched,
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.8,
        _total_train_tokens=0,
        _tp_size=1,
    )
    mask = torch.tensor([[0, 0] + [1] * len(one) + [0] * (longest - len(one)) for one in answers])
    batch = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.tensor(labels),
        "ref_logps": ref,
        "ref_KL_logps": ref_mismatched,
    }
    expected = KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, False)
    tokens, good = torch.tensor([len(one) for one in answers]), torch.tensor(labels)
    policy, reference_ = (LabelLogps(x.double(), tokens, good) for x in (logps.sum(dim=1), ref))
    kl = (mismatched - ref_mismatched).double().mean().clamp(min=0)
    loss = pair_loss("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.8)
    assert float(loss(policy, reference_, anchors=Anchors(kl=kl)).mean()) == pytest.approx(float(expected), rel=1e-5)
