"""Padded preference batches in the form OLMo-core scripts use: collated, cut into microbatches, turned into a Step.

A batch is a dict of `{chosen,rejected}_{input_ids,attention_mask,labels}` (P, T; right-padded; labels are IGNORE_INDEX
outside the completion, and at tokens inside that are context: tool results, later user turns), `index` (P),
`token_count` (P) and, if pairs have weights of their own, `weight` (P).
P: pairs, T: tokens.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from isopref.batch.packing import padded_tokens
from isopref.batch.rows import build_microbatch
from isopref.batch.step import Step, Work
from isopref.batch.terms import TERMS, Terms
from isopref.errors import ConfigError, DataError
from isopref.examples import PAIR, PAIR_SCORES, Example, Lengths
from isopref.normalize import Weighting, Weights, coefficients, token_coefficients, token_weight
from isopref.ranks import num_ranks
from isopref.types import FloatArray, IntArray, Kind

COLLATOR = "DataCollatorForSeq2SeqDPO"
IGNORE_INDEX = -100
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SIDES = ("chosen", "rejected")
KEYS = {
    *(f"{side}_{part}" for side in SIDES for part in ("input_ids", "attention_mask", "labels")),
    "index",
    "token_count",
}


@dataclass(frozen=True)
class DataCollatorForSeq2SeqDPO:
    """Pads both sides of all pairs to one length, on the right, and counts each pair's real tokens.

    An instance has `{chosen,rejected}_{input_ids,labels}` as sequences of integers, `index` (its row in the reference's
    table) and optionally a `weight`. An empty list gives an empty batch. Raises DataError for a malformed instance.

    The arguments are those of transformers' DataCollatorForSeq2Seq; a setting that would have no effect here raises
    ConfigError. The padding token does not matter, because padding is masked: it is `pad_token_id`, else the
    tokenizer's, else 0.
    """

    tokenizer: Any = field(default=None, repr=False)
    model: Any = field(default=None, repr=False)
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORE_INDEX
    return_tensors: str = "pt"
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokenizer, int):
            raise ConfigError(f"{COLLATOR}: tokenizer is {self.tokenizer}. Write pad_token_id={self.tokenizer}.")
        if self.tokenizer is not None and not hasattr(self.tokenizer, "pad_token_id"):
            raise ConfigError(
                f"{COLLATOR}: tokenizer is a {type(self.tokenizer).__name__}, not a tokenizer. Pass what "
                "AutoTokenizer.from_pretrained returns."
            )
        if hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            raise ConfigError(f"{COLLATOR}: model is an encoder-decoder, but isopref trains causal models. Pass None.")
        honoured: dict[str, tuple[Any, ...]] = {
            "padding": (True, "longest"),
            "max_length": (None,),
            "label_pad_token_id": (IGNORE_INDEX,),
            "return_tensors": ("pt",),
        }
        for name, values in honoured.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"{COLLATOR}: {name}={getattr(self, name)!r} is not supported. Use "
                    f"{' or '.join(map(repr, values))}, or leave it out."
                )
        for name, least in (("pad_to_multiple_of", 1), ("pad_token_id", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ConfigError(f"{COLLATOR}: {name} must be a whole number, at least {least}; found {value!r}.")

    def __call__(self, instances: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pairs = [_instance(one, f"{COLLATOR}: instance {n}") for n, one in enumerate(instances)]
        longest = max((len(one[f"{side}_input_ids"]) for one in pairs for side in SIDES), default=1)
        multiple = self.pad_to_multiple_of or 1
        width = -(-longest // multiple) * multiple
        batch: dict[str, Tensor] = {}
        for side in SIDES:
            ids = [one[f"{side}_input_ids"] for one in pairs]
            batch[f"{side}_input_ids"] = _pad(ids, width, self._padding_token())
            batch[f"{side}_attention_mask"] = _pad([torch.ones_like(x) for x in ids], width, 0)
            batch[f"{side}_labels"] = _pad([one[f"{side}_labels"] for one in pairs], width, IGNORE_INDEX)
        batch["token_count"] = sum((batch[f"{side}_attention_mask"].sum(dim=1) for side in SIDES), torch.tensor(0))
        batch["index"] = torch.tensor([one["index"] for one in pairs], dtype=torch.long)
        if any("weight" in one for one in instances):
            # In float64, as in a table.
            batch["weight"] = torch.tensor([one["weight"] for one in pairs], dtype=torch.float64)
        return batch

    def _padding_token(self) -> int:
        of_tokenizer = getattr(self.tokenizer, "pad_token_id", None)
        return next((token for token in (self.pad_token_id, of_tokenizer) if token is not None), 0)


def _instance(one: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the collator takes of an instance: tensors of tokens, index and weight. Raises DataError."""
    needed = [*(f"{side}_{part}" for side in SIDES for part in ("input_ids", "labels")), "index"]
    missing = [key for key in needed if key not in one]
    if missing:
        raise DataError(f"{where} has no {', '.join(missing)}. It has {', '.join(one)}.")
    found: dict[str, Any] = {}
    for side in SIDES:
        ids, labels = (_tokens(one, f"{side}_{part}", where) for part in ("input_ids", "labels"))
        if len(ids) != len(labels):
            raise DataError(f"{where}: {side}_input_ids has {len(ids)} tokens, {side}_labels {len(labels)}.")
        if int(ids.min()) < 0:
            raise DataError(f"{where}: {side}_input_ids has a token {int(ids.min())}; only labels may be negative.")
        found |= {f"{side}_input_ids": ids, f"{side}_labels": labels}
    try:
        found["index"], found["weight"] = operator.index(one["index"]), float(one.get("weight", 1.0))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: index must be a whole number and weight a number ({error}).") from error
    if found["index"] < 0:
        raise DataError(f"{where}: index is {found['index']}; it is the pair's row in the reference's table, from 0.")
    if not 0 < found["weight"] < math.inf:
        raise DataError(f"{where}: weight is {found['weight']}; it must be positive and finite.")
    return found


def _tokens(one: Mapping[str, Any], key: str, where: str) -> Tensor:
    try:
        tokens = torch.as_tensor(one[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: {key} is not a list of tokens ({error}).") from error
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype not in INTEGERS:
        raise DataError(
            f"{where}: {key} must be a non-empty list of whole numbers; found {tuple(tokens.shape)} of {tokens.dtype}."
        )
    return tokens.long()


def _pad(rows: Sequence[Tensor], width: int, value: int) -> Tensor:
    out = torch.full((len(rows), width), value)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
    return out


def split_batch_dpo(batch: Mapping[str, Any], num_microbatch_instances: int) -> list[dict[str, Tensor]]:
    """Cut a padded batch into microbatches of at most `num_microbatch_instances` pairs, in order."""
    if num_microbatch_instances < 1:
        raise ConfigError(
            f"split_batch_dpo: num_microbatch_instances is {num_microbatch_instances}; it must be at least 1 pair."
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            what = "a 0-dimensional tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}, not a tensor"
            raise DataError(
                f"split_batch_dpo: batch['{key}'] is {what}, so it cannot be cut. "
                "Remove it, or make it a tensor with one entry per pair."
            )
    sizes = {key: len(value) for key, value in batch.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"split_batch_dpo: the tensors differ in their number of pairs: {sizes}. Make them equal.")
    pieces = {key: value.split(num_microbatch_instances) for key, value in batch.items()}
    return [{key: value[n] for key, value in pieces.items()} for n in range(len(pieces["chosen_input_ids"]))]


def padded_to_step(
    batch: Mapping[str, Any],
    rank_microbatch_size: int,
    weighting: Weighting,
    *,
    device: torch.device,
    num_references: int | None = None,
    loss_kind: Kind = "pairs",
) -> Step:
    """Cut this rank's part of a global batch by `rank_microbatch_size` (tokens), with each pair's share of the whole.

    Ranks know only their own part here, so the denominators cost one small collective. Ranks with fewer microbatches
    than others get empty ones. `num_references`: pairs in the reference's table, into which `index` points.
    """
    _check(batch, num_references)
    terms = TERMS[loss_kind]
    width = max(batch[f"{side}_input_ids"].shape[1] for side in SIDES)
    cut = split_batch_dpo(batch, max(1, rank_microbatch_size // (2 * width)))
    pieces = [piece for piece in cut if len(piece["index"])]  # a rank may have no pairs
    pairs = [_pairs(piece) for piece in pieces]
    lengths = [Lengths.of(some) for some in pairs]
    owns = [_own(piece) for piece in pieces]
    weights = [terms.weights(one, weighting, own) for one, own in zip(lengths, owns, strict=True)]
    chosen = sum(token_weight(own, one.compared_tokens[0]) for one, own in zip(lengths, owns, strict=True))
    slots = sum(padded_tokens(one, range(len(one)), "padded") for one in lengths)
    weight = float(sum(one.total for one in weights))
    mine = [weight, chosen, sum(map(len, pairs)), int(batch["token_count"].sum()), slots]
    (total, total_chosen, num_pairs, num_tokens, num_slots), before, (num_microbatches, widest) = _over_ranks(
        mine, [len(pieces), width], device
    )
    if not num_pairs:
        raise DataError("the batch holds no pairs on any rank. Leave out empty batches.")
    if rank_microbatch_size < 2 * widest:  # after the exchange, so that all ranks stop alike
        raise ConfigError(
            f"rank_microbatch_size is {rank_microbatch_size} tokens, but one pair of this batch takes {2 * widest} "
            f"(two sequences padded to {widest}). Raise it to at least {2 * widest}, or shorten the pairs."
        )
    places = torch.arange(mine[2]).add(int(before[2])).split([len(some) for some in pairs])
    totals = _Totals(total, total_chosen, num_pairs)
    work = [
        _work(piece, some, place, own, terms, weight, totals)
        for piece, some, place, own, weight in zip(pieces, pairs, places, owns, weights, strict=True)
    ]
    work += [_filler()] * (num_microbatches - len(work))
    count = int(num_pairs)
    return Step(tuple(work), count, count, count, int(num_tokens), 1 - num_tokens / num_slots)


class _Totals(NamedTuple):
    """The denominators of a global batch."""

    loss: float
    chosen_tokens: float
    pairs: float


def _work(
    piece: Mapping[str, Tensor],
    pairs: Sequence[Example],
    place: Tensor,
    own: FloatArray,
    terms: Terms,
    weights: Weights,
    totals: _Totals,
) -> Work:
    """One microbatch of a padded batch. Its answers are the chosen ones of all pairs, then the rejected ones."""
    index, every = piece["index"], np.arange(len(pairs))
    lengths = Lengths.of(pairs)
    some = terms.of(lengths, every)
    chosen = token_coefficients(own, lengths.compared_tokens[0], total=totals.chosen_tokens)
    return Work(
        build_microbatch(pairs, "padded"),
        index=index,
        answers=torch.cat([2 * index, 2 * index + 1]),
        comparisons=index,
        place=place,
        example=index[torch.from_numpy(terms.example(lengths)[some])],
        loss_share=torch.from_numpy(coefficients(weights.of_term[some], total=totals.loss)),
        side_share=torch.from_numpy(coefficients(np.ones((3, len(pairs))), total=totals.pairs)),
        nll_share=torch.from_numpy(np.append(chosen, np.zeros(len(pairs)))),
    )


def _check(batch: Mapping[str, Any], num_references: int | None) -> None:
    """Raise DataError for a batch that does not have the form described in this module's docstring."""
    missing = sorted(KEYS - batch.keys())
    if missing:
        raise DataError(f"the batch has no {', '.join(missing)}. Build batches with {COLLATOR}.")
    for key in sorted(KEYS):
        value = batch[key]
        if not isinstance(value, Tensor) or value.dtype not in (*INTEGERS, torch.bool):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"batch['{key}'] must be a tensor of whole numbers; found {kind}.")
    for side in SIDES:
        shapes = {key: tuple(batch[key].shape) for key in sorted(KEYS) if key.startswith(side)}
        if len(set(shapes.values())) != 1 or batch[f"{side}_input_ids"].ndim != 2:
            raise DataError(f"the tensors of '{side}' must have one shape, pairs by tokens; found {shapes}.")
    _check_index(batch["index"], num_references)


def _check_index(index_P: Tensor, num_references: int | None) -> None:
    """Raise DataError for an index outside the reference's table: -1, for example, would silently read its last row."""
    if not len(index_P):
        return
    low, high = int(index_P.min()), int(index_P.max())
    if low < 0 or (num_references is not None and high >= num_references):
        rows = "from 0" if num_references is None else f"0 to {num_references - 1}"
        raise DataError(
            f"batch['index'] has {low if low < 0 else high}; it must be the pair's row in the table that `reference` "
            f"was scored for ({rows})."
        )


def _own(piece: Mapping[str, Tensor]) -> FloatArray:
    """The pairs' own weights, from the data."""
    own: FloatArray = piece["weight"].double().cpu().numpy() if "weight" in piece else np.ones(len(piece["index"]))
    bad = own[~((own > 0) & np.isfinite(own))]
    if len(bad):
        raise DataError(f"batch['weight'] must be positive and finite; found {bad[0]}.")
    return own


def _filler() -> Work:
    none, nothing = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)
    return Work(
        build_microbatch([], "padded"),
        index=none,
        answers=none,
        comparisons=none,
        place=none,
        example=none,
        loss_share=nothing,
        side_share=nothing.expand(3, 0),
        nll_share=nothing,
    )


def _pairs(piece: Mapping[str, Tensor]) -> list[Example]:
    sides = [_sequences(piece, side) for side in SIDES]
    out = []
    for index, (prompt, *chosen), (other, *rejected) in zip(piece["index"].tolist(), *sides, strict=True):
        if len(prompt) != len(other) or not np.array_equal(prompt, other):
            raise DataError(
                f"pair {index}: its two sides have different prompts ({len(prompt)} and {len(other)} tokens before "
                "their labels begin). Both must start with the same tokens."
            )
        answers, trained = zip(chosen, rejected, strict=True)
        weights = () if all(one.all() for one in trained) else tuple(one.astype(np.float64) for one in trained)
        out.append(Example(prompt, answers, PAIR, PAIR_SCORES, weights=weights))
    return out


def _sequences(piece: Mapping[str, Tensor], side: str) -> list[tuple[IntArray, IntArray, NDArray[np.bool_]]]:
    """Prompt, answer, and which tokens of the answer are trained: those with a label."""
    ids, mask, labels = (piece[f"{side}_{name}"].cpu().numpy() for name in ("input_ids", "attention_mask", "labels"))
    out = []
    for row_ids, row_mask, row_labels in zip(ids, mask, labels, strict=True):
        length = int(row_mask.sum())
        has_label = row_labels != IGNORE_INDEX
        start = int(has_label.argmax())
        trained = has_label[start:length]
        whole = row_mask[:length].all() and (row_labels == row_ids)[start:length][trained].all() and trained[-1:].any()
        if not whole or start == 0 or (row_labels[length:] != IGNORE_INDEX).any():
            raise DataError(
                f"'{side}' must be right-padded, with labels of {IGNORE_INDEX} up to the completion and equal to the "
                f"input ids from there to its last token, except at context in between, where they are {IGNORE_INDEX}; "
                f"a row has length {length} and labels from position {start}."
            )
        out.append((row_ids[:start], row_ids[start:length], trained))
    return out


def _over_ranks(
    sums: list[float], largest: list[int], device: torch.device
) -> tuple[list[float], list[float], list[int]]:
    """The totals of `sums` over all ranks, their totals over the ranks before this one, and the maxima of `largest`."""
    if num_ranks() == 1:
        return sums, [0.0] * len(sums), largest
    mine = torch.tensor([*sums, *largest], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    together = torch.stack(every).cpu()
    added = together[:, : len(sums)]
    before = added[: dist.get_rank()].sum(dim=0)
    return added.sum(dim=0).tolist(), before.tolist(), [int(x) for x in together[:, len(sums) :].amax(dim=0)]
