"""Verifies numerically, on a tiny input, that a layout gives the same scores as the model's own forward pass.

A model may ignore our attention (its rejected answers would then see the chosen ones), number its positions
differently, or change its logits after the head. No list of model names can cover that, so two small pairs are scored
in both ways.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.errors import ModelError
from isopref.examples import PairTokens
from isopref.models.adapter import has_adapter, plain_targets, without_adapter
from isopref.models.attention import NAME, RECORDED, Asked, PackedRowsError, recorded
from isopref.models.diagnosis import why_not_its_own
from isopref.models.parallel import device_of, reshard, unwrap
from isopref.models.policy import Policy
from isopref.models.refusals import Refusals
from isopref.models.reward import RewardModel
from isopref.models.tiles import tiles_of
from isopref.models.unfold import unknown_layers
from isopref.ops.memory import ran_out
from isopref.types import Readout

PACKED = ("shared", "packed")
# How much two correct computations may differ: nats per completion token, plus a share of the log-probability; for
# rewards, which have no scale, a share of the largest. In half precision this is too wide to reveal a small leak, but a
# rejected answer whose score moves when only the chosen one changes does.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
RELATIVE = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 0.03, torch.float16: 0.01}
# With float8 products; the model's own forward pass has none.
TOLERANCE[torch.float8_e4m3fn], RELATIVE[torch.float8_e4m3fn] = 0.5, 0.1

# Code that may count a row's tokens: masks, which transformers splits where positions restart; tokens sorted by expert;
# and isopref's own tables.
HARMLESS_COUNTS = ("transformers.masking_utils", "transformers.integrations.", "isopref.models.tree")
OTHERS = "Train a model of another architecture: docs/models.md lists those that work."
ALONE = "Other ranks did not refuse it: compare the devices, drivers and library versions of the ranks."
PROBED_TILE = 3  # tokens: several tiles in a row of the probe, the last one smaller
LONGEST_WINDOW = 64  # sliding windows up to this size are probed with sequences longer than the window


class _RefusalError(Exception):
    """Why a model cannot be trained in rows of some kind, without the way out."""


@torch.no_grad()
def own_logps(policy: Policy) -> Tensor:
    """Scores of the probe's pairs by the model itself in eval mode, one sequence at a time: 2, P. Raises ModelError."""
    try:
        return _own_logps(policy)
    except _RefusalError as refusal:
        raise ModelError(f"{refusal} {_other_model(policy, lambda: _own_logps(policy))}") from refusal


def _own_logps(policy: Policy) -> Tensor:
    pairs = _pairs(policy, seed=1)
    was_training = policy.training
    policy.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = torch.stack([torch.stack([_own_score(policy, p.prompt, side) for side in p[1:]]) for p in pairs]).T
    except Exception as error:  # a model is third-party code and may raise anything
        if ran_out(error):
            raise
        raise _RefusalError(
            f"{policy.name} cannot be trained here: its own forward pass fails on a sequence of tokens "
            f"({type(error).__name__}: {error})."
        ) from error
    finally:
        policy.train(was_training)
    if not found.isfinite().all():
        raise ModelError(
            f"{policy.name}: its {policy.scores} are not finite ({found.flatten().tolist()}), although its weights "
            "are: the computation overflows. Try a wider model.dtype or model.compute_dtype."
        )
    return found


@torch.no_grad()
def check_layout(
    model: nn.Module, kind: RowKind, *, own: Tensor | None = None, compute_dtype: torch.dtype | None = None
) -> None:
    """Raise ModelError if `kind` rows, in training mode, do not give the model's own scores.

    All ranks call this together. `own` was computed before the model was distributed; without it, damage done to the
    weights by distributing them goes unnoticed. Layers that follow a row's tree and fail are unfolded and then listed
    in `policy.unfolded`. An out-of-memory error is passed on as it is.
    """
    policy, refusals = unwrap(model), Refusals(model)
    try:
        _check_or_unfold(model, kind, own, compute_dtype, refusals)
    except _RefusalError as refusal:
        if not refusals.on_all_ranks():
            raise ModelError(f"{refusal} {ALONE}") from refusal
        in_padded = _refusal_of_padded(model, own, compute_dtype) if kind in PACKED else refusal
        if in_padded is None:
            context = " and layout.context_parallel: 1." if policy.context is not None else "."
            raise ModelError(f"{refusal} Set layout.rows: padded{context}") from refusal
        way_out = OTHERS
        if refusals.on_all_ranks():
            way_out = _other_model(policy, lambda: _check(model, kind, None, compute_dtype))
        raise ModelError(f"{in_padded} {way_out}") from refusal


def _refusal_of_padded(model: nn.Module, own: Tensor | None, compute_dtype: torch.dtype | None) -> _RefusalError | None:
    """Why padded rows do not work either; None if they do."""
    policy = unwrap(model)
    context, policy.context = policy.context, None  # ranks do not split padded rows
    try:
        _check(model, "padded", own, compute_dtype)
    except _RefusalError as refusal:
        return refusal
    finally:
        policy.context = context
    return None


def _other_model(policy: Policy, check: Callable[[], object]) -> str:
    """The way out for a model that fails in all rows: another adapter if `check` passes without this one."""
    if has_adapter(policy.model):
        with suppress(_RefusalError, ModelError), without_adapter(policy.model):
            check()
            return (
                "Without its adapter it works. Set model.adapter.targets to fewer layers, such as "
                f"[{', '.join(plain_targets(policy.model))}], or train all weights (remove model.adapter)."
            )
    return OTHERS


def _check_or_unfold(
    model: nn.Module, kind: RowKind, own: Tensor | None, compute_dtype: torch.dtype | None, refusals: Refusals
) -> None:
    policy = unwrap(model)
    try:
        _check(model, kind, own, compute_dtype)
    except _RefusalError:
        if kind not in PACKED or not policy.following or policy.context is not None:
            raise
        if not refusals.on_all_ranks():
            raise
        policy.unfold_all()
        _check(model, kind, own, compute_dtype)


def _check(model: nn.Module, kind: RowKind, own: Tensor | None, compute_dtype: torch.dtype | None) -> None:
    policy = unwrap(model)
    device, dtype = device_of(model), compute_dtype or next(policy.parameters()).dtype
    own = _own_logps(policy) if own is None else own.to(device)
    pairs = _pairs(policy, seed=1)
    other = _pairs(policy, seed=2)
    # Different chosen answers of the same lengths: same kernels, so the same rounding.
    changed = [a._replace(chosen=b.chosen) for a, b in zip(pairs, other, strict=True)]
    if kind in PACKED and (unknown := unknown_layers(policy.model)):
        raise _refusal(policy, kind, f"layers of type {min(unknown)} do not support segments")
    was_training = model.training
    model.train()
    try:
        found = _logps(model, pairs, kind, device)
        again = float((_logps(model, pairs, kind, device) - found).abs().max())
        # Scores of rejected answers must not move when the chosen ones change.
        moved = float((_logps(model, changed, kind, device) - found)[1].abs().max())
        # Longer answers and one more pair: a compiled layer learns which sizes vary between rows.
        _logps(model, [*_pairs(policy, seed=3, more=1), *other[:1]], kind, device)
        seen = _look(model, pairs, kind) if kind in PACKED else None
    except PackedRowsError as error:
        raise _RefusalError(
            f"{policy.name} cannot be trained with layout.rows: {kind}, because {error.reason}."
        ) from error
    except ModelError as error:
        raise ModelError(f"{policy.name} cannot be trained with layout.rows: {kind}. {error}") from error
    except Exception as error:  # a model is third-party code and may raise anything
        if ran_out(error):
            raise
        where = f"with layout.rows: {kind}, because" if kind in PACKED else "here:"
        what = f"its forward pass fails on {kind} rows in training mode"
        raise _RefusalError(
            f"{policy.name} cannot be trained {where} {what} ({type(error).__name__}: {error})."
        ) from error
    finally:
        model.train(was_training)
        reshard(model)
    size = float(own.abs().max())
    longest = max(len(side) for p in pairs for side in p[1:])
    tolerance = TOLERANCE[dtype] * (size if isinstance(policy, RewardModel) else longest)
    off = float((found - own).abs().max())
    slack = RELATIVE[dtype] * size
    if again > tolerance / 100:
        raise _RefusalError(
            f"{policy.name} cannot be trained here: the same row scored twice differs by {again:.2g}, so its forward "
            "pass in training is random, and the result would depend on the layout."
        )
    if seen is not None and (strange := _strange(policy, seen)) is not None:
        raise _refusal(policy, kind, strange)
    if not (off <= tolerance + slack and moved <= tolerance / 100):
        reason = f"{policy.scores} are off by {off:.2g}; that of a rejected answer moves by {moved:.2g} when only the "
        raise _refusal(policy, kind, reason + "chosen one changes" + _cause(policy, seen, device))


@torch.no_grad()
def check_tiles(model: nn.Module, kind: RowKind, *, compute_dtype: torch.dtype | None = None) -> None:
    """Raise ModelError if MLPs give different scores in tiles than for all tokens at once.

    All ranks call this together.
    """
    policy = unwrap(model)
    device, dtype = device_of(model), compute_dtype or next(policy.parameters()).dtype
    pairs = _pairs(policy, seed=1)
    was_training = model.training
    model.train()
    try:
        with tiles_of(policy, None):
            whole = _logps(model, pairs, kind, device)
        with tiles_of(policy, PROBED_TILE):
            tiled = _logps(model, pairs, kind, device)
    finally:
        model.train(was_training)
        reshard(model)
    size = float(whole.abs().max())
    off = float((tiled - whole).abs().max())
    if not off <= TOLERANCE[dtype] + RELATIVE[dtype] * size:
        raise ModelError(
            f"{policy.name} cannot compute its MLPs in tiles: its {policy.scores} are off by {off:.2g}, so an MLP "
            "mixes tokens. Set layout.mlp_tile_tokens: null."
        )


def _cause(policy: Policy, seen: "_Seen | None", device: torch.device) -> str:
    """The most likely cause of a wrong score, as the end of a sentence."""
    ids = torch.as_tensor(_pairs(policy, seed=1)[0].prompt, device=device)[None]
    cause = None if isinstance(policy, FSDPModule) or policy.native is not None else why_not_its_own(policy, ids)
    if cause is None and seen is not None and not seen.asked:
        cause = "no layer uses transformers' AttentionInterface"
    return "" if cause is None else f"; {cause}"


class _Seen(NamedTuple):
    """What the layers of a model did while computing a row."""

    asked: list[Asked]
    counted: set[str]  # modules whose code counted the tokens of the row


def _look(model: nn.Module, pairs: Sequence[PairTokens], kind: RowKind) -> _Seen:
    policy = unwrap(model)
    num_tokens = build_microbatch([pair.example for pair in pairs], kind).passes[0].input_ids.shape[1]
    if policy.context is not None:
        num_tokens = -(-num_tokens // policy.context.size)
    policy.packed_attention = RECORDED
    try:
        with recorded() as asked, _Counting(num_tokens) as counting, torch.compiler.set_stance("force_eager"):
            _logps(model, pairs, kind, device_of(model))
    finally:
        policy.packed_attention = NAME
    return _Seen(asked, counting.modules)


def _strange(policy: Policy, seen: _Seen) -> str | None:
    """What a model does that packed rows do not support, even if only rows longer than the probe's would show it."""
    for one in seen.asked:
        if one.mask is not None and one.mask.window != one.window:
            return f"{one.layer} masks keys by a window or chunks of {one.mask.window}, but does not tell its attention"
    window = _window(policy)
    makes_own_masks = any(one.mask is None for one in seen.asked)
    if makes_own_masks and window is not None and window not in [one.window for one in seen.asked]:
        return f"its layers do not pass on their sliding window of {window}"
    if seen.counted:
        return f"{' and '.join(sorted(seen.counted))} counts tokens along the row, across its sequences"
    return None


class _Counting(TorchFunctionMode):
    """Detects code that counts the tokens of a row instead of using the positions it is given.

    Llama 4 does so to scale queries from position 8,192 on, and a row that long is too long for a probe.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.modules: set[str] = set()  # Python modules

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.arange and len(result) == self.num_tokens:
            module = str(sys._getframe(1).f_globals["__name__"])
            if not module.startswith(HARMLESS_COUNTS):
                self.modules.add(module)
        return result


def _logps(model: nn.Module, pairs: Sequence[PairTokens], kind: RowKind, device: torch.device) -> Tensor:
    """Log-probabilities of chosen and rejected: 2, P."""
    readout: Readout = model(build_microbatch([pair.example for pair in pairs], kind).to(device))
    return readout.logp.view(2, -1)


def _window(policy: Policy) -> int | None:
    """The sliding window in the model's config, if any layer uses it."""
    config = policy.model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None


def _refusal(policy: Policy, kind: RowKind, reason: str) -> _RefusalError:
    if kind in PACKED:
        what = f"with layout.rows: {kind}, because its scores would differ from those of its own forward pass"
    else:
        what = f"here: its decoder and head do not give its own {policy.scores}"
    return _RefusalError(f"{policy.name} cannot be trained {what} ({reason}).")


def _pairs(policy: Policy, *, seed: int, more: int = 0) -> list[PairTokens]:
    """Two pairs of random tokens, longer than a short sliding window; with `more` tokens in each chosen answer."""
    vocabulary = policy.logits.vocabulary or int(policy.model.config.get_text_config().vocab_size)
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
