"""A numerical proof, on a tiny input, that a layout scores a model the way the model itself does.

A model may ignore our attention (its rejected answers would then see the chosen ones), place its positions by other
rules, or change its logits after the head. No list of names can know; so two small pairs are scored both ways.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.errors import ModelError
from isopref.examples import PairTokens
from isopref.models.attention import recorded_windows
from isopref.models.parallel import device_of, reshard, unwrap
from isopref.models.policy import Policy
from isopref.models.reward import RewardModel
from isopref.types import Readout

PACKED = ("shared", "packed")
# What two right computations may differ by: nats per completion token, and a share of the log-probability; of rewards,
# which have no scale, that much of the largest. In half precision that is too wide to see a small leak; what a rejected
# answer does when only the chosen one changes shows it.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
RELATIVE = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 0.03, torch.float16: 0.01}

LONGEST_WINDOW = 64  # windows up to here are probed by sequences longer than they are


@torch.no_grad()
def own_logps(policy: Policy) -> Tensor:
    """What the model itself gives the probe's pairs in eval mode, one sequence at a time: 2, P. Raises ModelError."""
    pairs = _pairs(policy, seed=1)
    was_training = policy.training
    policy.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = torch.stack([torch.stack([_own_score(policy, p.prompt, side) for side in p[1:]]) for p in pairs]).T
    finally:
        policy.train(was_training)
    if not found.isfinite().all():
        raise ModelError(
            f"{policy.name}: its {policy.scores} are not finite ({found.flatten().tolist()}), though its weights "
            "are: they are too large to compute with in their number type (model.dtype, model.compute_dtype)."
        )
    return found


@torch.no_grad()
def check_layout(
    model: nn.Module, kind: RowKind, *, own: Tensor | None = None, compute_dtype: torch.dtype | None = None
) -> None:
    """Raise ModelError if `kind` rows do not give the model's own scores, as it trains.

    All ranks call this together. `own` is from before the model was spread over them; without it, what spreading did to
    the weights is not seen.
    """
    policy = unwrap(model)
    device, dtype = device_of(model), compute_dtype or next(policy.parameters()).dtype
    own = own_logps(policy) if own is None else own.to(device)
    pairs = _pairs(policy, seed=1)
    other = _pairs(policy, seed=2)
    # Other chosen answers of the same lengths: the kernels are the same, so that rounding is too.
    changed = [a._replace(chosen=b.chosen) for a, b in zip(pairs, other, strict=True)]
    was_training = model.training
    model.train()
    try:
        with recorded_windows() as windows, torch.compiler.set_stance("force_eager"):
            _logps(model, pairs, kind, device)
        found = _logps(model, pairs, kind, device)
        again = float((_logps(model, pairs, kind, device) - found).abs().max())
        # What the rejected answers get may not move when the chosen ones change.
        moved = float((_logps(model, changed, kind, device) - found)[1].abs().max())
        # Longer answers, and one pair more: a compiled layer learns what may change from row to row.
        _logps(model, [*_pairs(policy, seed=3, more=1), *other[:1]], kind, device)
    except Exception as error:  # a model is foreign code: it fails as it likes on what it does not expect
        raise ModelError(_refusal(policy, kind, f"{type(error).__name__}: {error}")) from error
    finally:
        model.train(was_training)
        reshard(model)
    size = float(own.abs().max())
    longest = max(len(side) for p in pairs for side in p[1:])
    tolerance = TOLERANCE[dtype] * (size if isinstance(policy, RewardModel) else longest)
    off = float((found - own).abs().max())
    slack = RELATIVE[dtype] * size
    if again > tolerance / 100:
        raise ModelError(
            f"{policy.name} cannot be trained here: the same row scored twice differs by {again:.2g}, so its forward "
            "pass in training is random, and the result would depend on the layout."
        )
    if not (off <= tolerance + slack and moved <= tolerance / 100):
        reason = f"{policy.scores} are off by {off:.2g}; that of a rejected answer moves by {moved:.2g} when only the "
        raise ModelError(_refusal(policy, kind, reason + "chosen one changes"))
    window = _window(policy)
    if kind in PACKED and window is not None and window not in windows:
        raise ModelError(_refusal(policy, kind, f"its layers do not pass on their sliding window of {window}"))


def _logps(model: nn.Module, pairs: Sequence[PairTokens], kind: RowKind, device: torch.device) -> Tensor:
    """Log-probabilities of chosen and rejected: 2, P."""
    readout: Readout = model(build_microbatch([pair.example for pair in pairs], kind).to(device))
    return readout.logp.view(2, -1)


def _window(policy: Policy) -> int | None:
    """The sliding window of the model's config, if some layer has it."""
    config = policy.model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None


def _refusal(policy: Policy, kind: RowKind, reason: str) -> str:
    name = policy.name
    if kind in PACKED:
        return (
            f"{name} cannot be trained with layout.rows: {kind}, because it would not be scored as it scores itself "
            f"({reason}). Set layout.rows: padded."
        )
    return f"{name} cannot be trained here: its decoder and head do not give its own {policy.scores} ({reason})."


def _pairs(policy: Policy, *, seed: int, more: int = 0) -> list[PairTokens]:
    """Two pairs of random tokens, longer than a short sliding window; with `more` tokens in each chosen answer."""
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    window = _window(policy)
    prompt = window if window is not None and window <= LONGEST_WINDOW else 5
    generator = torch.Generator().manual_seed(seed)
    return [
        PairTokens(*(torch.randint(vocabulary, (n,), generator=generator).numpy() for n in lengths))
        for lengths in ((prompt, 4 + more, 3), (2, 3 + more, 6))
    ]


def _own_score(policy: Policy, prompt: object, answer: object) -> Tensor:
    device = device_of(policy)
    return policy.own_score(torch.as_tensor(prompt, device=device), torch.as_tensor(answer, device=device))
