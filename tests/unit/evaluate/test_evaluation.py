"""Evaluation figures worked out by hand."""

import json
import math

import numpy as np
import pytest

from isopref.evaluate import Evaluation, evaluate, source_labels
from isopref.examples import Lengths
from isopref.normalize import Weighting
from isopref.objectives.loss import Loss, pair_loss
from isopref.score import TableLogps

# Four pairs. Margins are +2, -1, 0 and +3.
POLICY = TableLogps.of_pairs(np.array([-4.0, -6.0, -5.0, -1.0]), np.array([-6.0, -2.0, -9.0, -1.0]))
REF = TableLogps.of_pairs(np.array([-5.0, -6.0, -4.0, -3.0]), np.array([-5.0, -3.0, -8.0, 0.0]))
LENGTHS = Lengths.of_pairs(np.array([[3, 4, 4], [1, 3, 1], [10, 2, 6], [5, 2, 2]]))
BETA = 0.5


def nll(logit: float) -> float:
    return math.log1p(math.exp(-logit))


LOSSES = [nll(1.0), nll(-0.5), math.log(2), nll(1.5)]
WEIGHTS: dict[Weighting, list[float]] = {"token": [14, 6, 28, 14], "completion": [8, 4, 8, 4], "example": [1, 1, 1, 1]}


def figures(
    weighting: Weighting = "token",
    own: list[float] | None = None,
    *,
    policy: TableLogps = POLICY,
    sources: list[int] | None = None,
    subsets: tuple[str | None, ...] = (),
    loss: Loss | None = None,
) -> Evaluation:
    return evaluate(
        policy,
        REF,
        LENGTHS,
        np.ones(4) if own is None else np.array(own),
        loss=loss or pair_loss("sigmoid", beta=BETA),
        weighting=weighting,
        sources=None if sources is None else np.array(sources),
        source_names=("data/easy.jsonl", "data/hard.jsonl", "data/unused.jsonl"),
        subsets=subsets,
    )


@pytest.mark.parametrize("weighting", sorted(WEIGHTS))
@pytest.mark.parametrize("own", [[1.0, 1.0, 1.0, 1.0], [2.0, 0.5, 1.0, 0.0]])
def test_the_loss_has_the_objectives_weighting(weighting: Weighting, own: list[float]) -> None:
    weights = [w * o for w, o in zip(WEIGHTS[weighting], own, strict=True)]
    expected = sum(w * loss for w, loss in zip(weights, LOSSES, strict=True)) / sum(weights)
    assert figures(weighting, own).loss.value == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("own", "nll"), [([1.0, 1.0, 1.0, 1.0], (4 + 6 + 5 + 1) / 11), ([2.0, 0.5, 1.0, 0.0], (8 + 3 + 5) / 11.5)]
)
def test_the_likelihood_of_chosen_tokens_is_added(own: list[float], nll: float) -> None:
    added = figures("example", own, loss=pair_loss("sigmoid", beta=BETA, nll_weight=0.3)).loss
    plain = figures("example", own).loss
    assert added.value == pytest.approx(plain.value + 0.3 * nll, rel=1e-14)
    assert added.low < added.value < added.high


def test_rewards_of_a_loss_of_means() -> None:
    found = figures(loss=pair_loss("ipo", beta=BETA))
    # Chosen gains of 1, 0, -1, 2 over 4, 3, 2, 2 tokens; rejected -1, 1, -1, -1 over 4, 1, 6, 2.
    assert found.figures()["reward_margin"].value == pytest.approx(BETA * (0.5 - 1 - 1 / 3 + 1.5) / 4)
    assert found.figures()["accuracy"].value == (1 + 0 + 0 + 1) / 4


@pytest.mark.parametrize("weighting", sorted(WEIGHTS))
def test_all_other_figures_count_each_pair_once(weighting: Weighting) -> None:
    found = figures(weighting, [5.0, 1.0, 1.0, 1.0])
    assert found.pairs == 4
    assert found.figures()["accuracy"].value == (1 + 0 + 0.5 + 1) / 4
    assert found.figures()["reward_margin"].value == pytest.approx(BETA * (2 - 1 + 0 + 3) / 4)
    # Margins of rewards are 1, -0.5, 0, 1.5 around their mean 0.5: squares 0.25, 1, 0.25, 1.
    assert found.figures()["reward_margin_std"].value == pytest.approx(math.sqrt(2.5 / 4))
    # Per token: -1 > -1.5; -2 = -2; -2.5 < -1.5; -0.5 = -0.5.
    assert found.figures()["logp_accuracy"].value == (1 + 0.5 + 0 + 0.5) / 4


def test_a_log_probability_that_is_not_finite_makes_no_reward_model() -> None:
    policy = TableLogps.of_pairs(np.array([math.nan, *POLICY.chosen[1:]]), POLICY.rejected)
    found = figures(policy=policy, sources=[0, 0, 1, 1])
    for part in (found, *found.by_source.values()):
        assert part.calibration_error is None
        assert part.logp_accuracy is not None
    assert found.logp_accuracy is not None
    assert found.logp_accuracy.value == (0 + 0.5 + 0 + 0.5) / 4  # the first pair counts as lost


def test_correlation_of_reward_with_length() -> None:
    # Rewards over beta: chosen 1, 0, -1, 2; rejected -1, 1, -1, -1. Tokens: 4, 3, 2, 2; 4, 1, 6, 2.
    rewards, tokens = [1, 0, -1, 2, -1, 1, -1, -1], [4, 3, 2, 2, 4, 1, 6, 2]
    assert sum(rewards) == 0
    assert sum(tokens) == 24  # mean 3
    product = sum(r * (t - 3) for r, t in zip(rewards, tokens, strict=True))  # -7
    squares = sum(r * r for r in rewards), sum((t - 3) ** 2 for t in tokens)  # 10, 18
    found = figures().length_correlation
    assert found is not None
    assert found.value == pytest.approx(product / math.sqrt(squares[0] * squares[1]))
    assert -1 <= found.low <= found.value <= found.high <= 1


def test_win_rate_by_length() -> None:
    # Answers have 4, 2, 4, 2 tokens on average: the quarters 1 and 2 share the value 2, 3 and 4 the value 4.
    shorter, longer = figures().by_length
    assert (shorter.quarter, shorter.shortest, shorter.longest, shorter.pairs) == (1, 2.0, 2.0, 2)
    assert (longer.quarter, longer.shortest, longer.longest, longer.pairs) == (3, 4.0, 4.0, 2)
    assert shorter.accuracy.value == (0 + 1) / 2
    assert longer.accuracy.value == (1 + 0.5) / 2


def test_every_pair_is_in_one_quarter() -> None:
    rng = np.random.default_rng(3)
    tokens = np.stack([np.full(101, 5), *rng.integers(1, 300, (2, 101))], axis=1)
    lengths = Lengths.of_pairs(tokens)
    policy, ref = (TableLogps.of_pairs(*rng.normal(-50, 9, (2, 101))) for _ in range(2))
    found = evaluate(policy, ref, lengths, np.ones(101), loss=pair_loss("sigmoid", beta=BETA), weighting="example")
    assert [bucket.quarter for bucket in found.by_length] == [1, 2, 3, 4]
    assert [bucket.pairs for bucket in found.by_length] == [26, 25, 25, 25]
    assert all(a.longest <= b.shortest for a, b in zip(found.by_length, found.by_length[1:], strict=False))
    inside = sum(bucket.pairs * bucket.accuracy.value for bucket in found.by_length) / 101
    assert inside == pytest.approx(found.figures()["accuracy"].value)


def test_sources_are_evaluated_as_if_alone() -> None:
    found = figures(sources=[1, 0, 1, 0])
    assert list(found.by_source) == ["easy", "hard"]  # nothing of the third one is in the table
    assert found.by_source["easy"].figures()["accuracy"].value == (0 + 1) / 2
    assert found.by_source["hard"].figures()["accuracy"].value == (1 + 0.5) / 2
    assert found.by_source["hard"].figures()["reward_margin"].value == pytest.approx(BETA * (2 + 0) / 2)
    expected = (6 * LOSSES[1] + 14 * LOSSES[3]) / (6 + 14)
    assert found.by_source["easy"].loss.value == pytest.approx(expected)
    assert found.as_metrics()["eval/easy/loss"] == found.by_source["easy"].loss.value
    assert figures(sources=[1, 1, 1, 1]).by_source == {}


def test_subsets_are_evaluated_as_if_alone() -> None:
    """Named by the data, whatever the source. A pair without a name is in none of them."""
    found = figures(subsets=("math", None, "chat", "math"), sources=[1, 0, 1, 0])
    assert list(found.by_subset) == ["chat", "math"]
    assert list(found.by_source) == ["easy", "hard"]
    math_, chat = found.by_subset["math"], found.by_subset["chat"]
    assert (math_.pairs, chat.pairs) == (2, 1)
    assert math_.figures()["accuracy"].value == 1.0
    assert chat.figures()["accuracy"].value == 0.5  # a tie
    assert math_.figures()["reward_margin"].value == pytest.approx(BETA * (2 + 3) / 2)
    metrics = found.as_metrics()
    assert metrics["eval/subset/chat/accuracy"] == 0.5
    assert [name for name in metrics if "subset" in name] == ["eval/subset/chat/accuracy", "eval/subset/math/accuracy"]
    written = json.loads(json.dumps(found.as_json()))
    assert written["by_subset"]["math"]["accuracy"]["value"] == 1.0
    assert figures(subsets=("chat",) * 4).by_subset == {}  # what all have says nothing
    assert figures(subsets=(None,) * 4).by_subset == {}


def test_sources_of_one_file_name_keep_their_folders() -> None:
    assert source_labels(["a/train.jsonl.gz", "b/eval.jsonl"]) == ["train", "eval"]
    assert source_labels(["a/pairs.jsonl", "b/pairs.jsonl"]) == ["a/pairs.jsonl", "b/pairs.jsonl"]
    # One file with two sets of columns.
    assert source_labels(["a.jsonl", "a.jsonl", "b.csv"]) == ["a.jsonl (1)", "a.jsonl (2)", "b.csv"]


FIGURES = ("accuracy", "reward_margin", "reward_margin_std", "logp_accuracy", "loss", "length_correlation")


def test_metrics_have_one_prefix_and_no_count() -> None:
    names = {f"eval/{name}{part}" for name in FIGURES for part in ("", "_low", "_high")}
    assert set(figures("example").as_metrics()) == names | {"eval/accuracy_length_1", "eval/accuracy_length_3"}


def test_policy_and_reference_alike_are_a_tie_everywhere() -> None:
    found = figures(policy=REF)
    assert (
        found.figures()["accuracy"].value,
        found.figures()["reward_margin"].value,
        found.figures()["reward_margin_std"].value,
    ) == (0.5, 0.0, 0.0)
    assert found.length_correlation is None
    assert "eval/length_correlation" not in found.as_metrics()
    assert found.loss.value == pytest.approx(math.log(2))
    json.loads(json.dumps(found.as_json(), allow_nan=False))


# --- intervals -------------------------------------------------------------------------------------


def many(count: int, seed: int, share: float = 0.7) -> Evaluation:
    """Pairs that are won with some probability, with a loss that has weights."""
    rng = np.random.default_rng(seed)
    chosen = np.where(rng.random(count) < share, 1.0, -1.0) * rng.exponential(1.0, count)
    zero = np.zeros(count)
    lengths = Lengths.of_pairs(rng.integers(1, 50, (count, 3)))
    return evaluate(
        TableLogps.of_pairs(chosen, zero), TableLogps.of_pairs(zero, zero), lengths, np.ones(count),
        loss=pair_loss("sigmoid", beta=1.0), weighting="token",
    )  # fmt: skip


def test_intervals_are_those_of_the_normal_approximation() -> None:
    """With many pairs the bootstrap of a mean is normal: mean -+ 1.96 * deviation / sqrt(N)."""
    found = many(4000, seed=0)
    for figure, deviation in (
        (
            found.figures()["accuracy"],
            math.sqrt(found.figures()["accuracy"].value * (1 - found.figures()["accuracy"].value)),
        ),
        (found.figures()["reward_margin"], found.figures()["reward_margin_std"].value),
    ):
        half = 1.96 * deviation / math.sqrt(4000)
        assert figure.low == pytest.approx(figure.value - half, abs=0.15 * half)
        assert figure.high == pytest.approx(figure.value + half, abs=0.15 * half)


def test_intervals_hold_the_truth_about_95_times_in_100() -> None:
    inside = sum(
        found.figures()["accuracy"].low <= 0.7 <= found.figures()["accuracy"].high
        for found in (many(150, seed) for seed in range(200))
    )
    assert 180 <= inside <= 199  # 190 -+ 3 deviations of a binomial


def test_intervals_are_the_same_each_time_and_leave_random_state_alone() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert many(50, seed=1) == many(50, seed=1)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


# The square of 1.959964, the 97.5th percentile of a standard normal.
Z2 = 3.841459


def test_a_share_of_all_pairs_has_wilsons_interval() -> None:
    """Wilson's, from w of n: (w + z^2/2 -+ z sqrt(w (n - w) / n + z^2/4)) / (n + z^2)."""
    all_won = many(8, seed=0, share=1.0)
    for figure in (all_won.figures()["accuracy"], all_won.figures()["logp_accuracy"]):
        # w = n: z^2/2 +- z^2/2 is z^2 or nothing, so the ends are (n + z^2) / (n + z^2) and n / (n + z^2).
        assert figure is not None
        assert (figure.value, figure.high) == (1.0, 1.0)
        assert figure.low == pytest.approx(8 / (8 + Z2), abs=1e-6)  # 0.676
    all_lost = many(8, seed=0, share=0.0).figures()["accuracy"]
    assert (all_lost.value, all_lost.low) == (0.0, 0.0)
    assert all_lost.high == pytest.approx(Z2 / (8 + Z2), abs=1e-6)


def test_ties_are_half_won_and_have_an_interval() -> None:
    ties = figures(policy=REF).figures()["accuracy"]
    # w = n/2: z sqrt((n + z^2) / 4) / (n + z^2) to each side of a half.
    half = math.sqrt(Z2 / (4 + Z2)) / 2
    assert (ties.value, ties.low, ties.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-6)


def test_shares_by_length_and_source_have_intervals_of_their_own_pairs() -> None:
    shorter, longer = figures().by_length  # 1 of 2, and 1.5 of 2
    half = math.sqrt(Z2 / (2 + Z2)) / 2
    assert (shorter.accuracy.low, shorter.accuracy.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    middle, half = (1.5 + Z2 / 2) / (2 + Z2), math.sqrt(Z2 * (1.5 * 0.5 / 2 + Z2 / 4)) / (2 + Z2)
    three_quarters = pytest.approx((middle - half, middle + half), abs=1e-6)  # 0.198, 0.973
    assert (longer.accuracy.low, longer.accuracy.high) == three_quarters
    hard = figures(sources=[1, 0, 1, 0]).by_source["hard"].figures()["accuracy"]  # the same two pairs
    assert (hard.low, hard.high) == three_quarters


def test_one_pair_says_little_of_a_share_and_nothing_of_other_figures() -> None:
    found = many(1, seed=0)
    assert found.figures()["accuracy"].high - found.figures()["accuracy"].low == pytest.approx(Z2 / (1 + Z2), abs=1e-6)
    assert found.loss.low == found.loss.value == found.loss.high
    assert len(found.by_length) == 1


def test_drawing_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = many(60, seed=2)
    monkeypatch.setattr("isopref.evaluate.intervals.BLOCK", 60 * 7)
    assert many(60, seed=2) == whole
