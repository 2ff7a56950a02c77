"""Padded preference batches in the form OLMo-core scripts use: collated, cut into microbatches, turned into a Step.

A batch is a dict of `{chosen,rejected}_{input_ids,attention_mask,labels}` (P, T; right-padded; labels are IGNORE_INDEX
outside the completion), `index` (P), `token_count` (P) and, if pairs have weights of their own, `weight` (P).
P: pairs, T: tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isopref.data.packing import padded_tokens
from isopref.data.rows import build_microbatch
from isopref.engine.step import Step, Work
from isopref.errors import ConfigError, DataError
from isopref.normalize import Weighting, coefficients, pair_weights, token_coefficients, token_weight
from isopref.ranks import num_ranks
from isopref.types import CHOSEN, FloatArray, IntArray, PairTokens

IGNORE_INDEX = -100
SIDES = ("chosen", "rejected")
KEYS = {
    *(f"{side}_{part}" for side in SIDES for part in ("input_ids", "attention_mask", "labels")),
    "index",
    "token_count",
}


@dataclass(frozen=True)
class DataCollatorForSeq2SeqDPO:
    """Pads both sides of all pairs to one length and counts each pair's real tokens. No pairs give an empty batch.

    An instance has `{chosen,rejected}_{input_ids,labels}` as sequences of integers, `index` (its row in the reference's
    table) and, where it has one, a `weight`.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 1

    def __call__(self, instances: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        longest = max((len(one[f"{side}_input_ids"]) for one in instances for side in SIDES), default=1)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch: dict[str, Tensor] = {}
        for side in SIDES:
            ids = [torch.as_tensor(one[f"{side}_input_ids"], dtype=torch.long) for one in instances]
            labels = [torch.as_tensor(one[f"{side}_labels"], dtype=torch.long) for one in instances]
            batch[f"{side}_input_ids"] = _pad(ids, width, self.pad_token_id)
            batch[f"{side}_attention_mask"] = _pad([torch.ones_like(x) for x in ids], width, 0)
            batch[f"{side}_labels"] = _pad(labels, width, IGNORE_INDEX)
        batch["token_count"] = sum((batch[f"{side}_attention_mask"].sum(dim=1) for side in SIDES), torch.tensor(0))
        batch["index"] = torch.tensor([int(one["index"]) for one in instances], dtype=torch.long)
        if any("weight" in one for one in instances):
            batch["weight"] = torch.tensor([float(one.get("weight", 1.0)) for one in instances])
        return batch


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
            what = (
                "a tensor of no dimensions" if isinstance(value, Tensor) else f"a {type(value).__name__}, not a tensor"
            )
            raise DataError(
                f"split_batch_dpo: batch['{key}'] is {what}, so it cannot be cut. "
                "Remove it, or make it a tensor with one entry per pair."
            )
    sizes = {key: len(value) for key, value in batch.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"split_batch_dpo: the batch's tensors differ in their number of pairs: {sizes}.")
    pieces = {key: value.split(num_microbatch_instances) for key, value in batch.items()}
    return [{key: value[n] for key, value in pieces.items()} for n in range(len(pieces["chosen_input_ids"]))]


def padded_to_step(
    batch: Mapping[str, Any],
    rank_microbatch_size: int,
    weighting: Weighting,
    *,
    device: torch.device,
) -> Step:
    """Cut this rank's part of a global batch by `rank_microbatch_size` (tokens) and weigh it against the whole.

    Ranks know only their own part here, so the denominators cost one small collective. Ranks with fewer microbatches
    than others get empty ones.
    """
    missing = sorted(KEYS - batch.keys())
    if missing:
        raise DataError(f"the batch has no {missing}. DataCollatorForSeq2SeqDPO makes batches that have all keys.")
    width = batch["chosen_input_ids"].shape[1]
    cut = split_batch_dpo(batch, max(1, rank_microbatch_size // (2 * width)))
    pieces = [piece for piece in cut if len(piece["index"])]  # a rank may have no pairs
    pairs = [_pairs(piece) for piece in pieces]
    lengths = [np.array([[len(part) for part in pair] for pair in some]) for some in pairs]
    owns = [_own(piece) for piece in pieces]
    weights = [pair_weights(one, weighting, own) for one, own in zip(lengths, owns, strict=True)]
    chosen = sum(token_weight(own, one[:, CHOSEN]) for one, own in zip(lengths, owns, strict=True))
    slots = sum(padded_tokens(one, "padded") for one in lengths)
    weight = float(sum(one.sum() for one in weights))
    mine = [weight, chosen, sum(map(len, pairs)), int(batch["token_count"].sum()), slots]
    (total, total_chosen, num_pairs, num_tokens, num_slots), before, (num_microbatches, widest) = _over_ranks(
        mine, [len(pieces), width], device
    )
    if not num_pairs:
        raise DataError("the batch holds no pairs on any rank.")
    if rank_microbatch_size < 2 * widest:  # after the exchange, so that all ranks stop alike
        raise ConfigError(
            f"rank_microbatch_size is {rank_microbatch_size} tokens, but one pair of this batch takes {2 * widest} "
            f"(two sequences padded to {widest}). Raise it to at least {2 * widest}, or shorten the pairs."
        )
    places = torch.arange(mine[2]).add(int(before[2])).split([len(some) for some in pairs])
    work = [
        Work(
            build_microbatch([pair.example for pair in some], "padded"),
            piece["index"],
            place,
            torch.from_numpy(coefficients(weight, total=total)),
            torch.from_numpy(coefficients(np.ones(len(some)), total=num_pairs)),
            torch.from_numpy(token_coefficients(own, one[:, CHOSEN], total=total_chosen)),
        )
        for some, piece, place, weight, own, one in zip(pairs, pieces, places, weights, owns, lengths, strict=True)
    ]
    work += [_filler()] * (num_microbatches - len(work))
    return Step(tuple(work), int(num_pairs), int(num_tokens), 1 - num_tokens / num_slots)


def _own(piece: Mapping[str, Tensor]) -> FloatArray:
    """The weights that the data gives its pairs."""
    own: FloatArray = piece["weight"].double().cpu().numpy() if "weight" in piece else np.ones(len(piece["index"]))
    if not (own > 0).all():
        raise DataError(f"batch['weight'] must be positive; the smallest is {own.min()}.")
    return own


def _filler() -> Work:
    nothing = torch.zeros(0, dtype=torch.float64)
    return Work(build_microbatch([], "padded"), nothing.long(), nothing.long(), nothing, nothing, nothing)


def _pairs(piece: Mapping[str, Tensor]) -> list[PairTokens]:
    sides = [_sequences(piece, side) for side in SIDES]
    out = []
    for index, (prompt, chosen), (other, rejected) in zip(piece["index"].tolist(), *sides, strict=True):
        if len(prompt) != len(other) or not np.array_equal(prompt, other):
            raise DataError(
                f"pair {index}: its two sides have different prompts ({len(prompt)} and {len(other)} tokens before "
                "their labels begin). Both must start with the same tokens."
            )
        out.append(PairTokens(prompt, chosen, rejected))
    return out


def _sequences(piece: Mapping[str, Tensor], side: str) -> list[tuple[IntArray, IntArray]]:
    ids, mask, labels = (piece[f"{side}_{name}"].cpu().numpy() for name in ("input_ids", "attention_mask", "labels"))
    out = []
    for row_ids, row_mask, row_labels in zip(ids, mask, labels, strict=True):
        length = int(row_mask.sum())
        start = int((row_labels != IGNORE_INDEX).argmax())
        whole = row_mask[:length].all() and (row_labels[start:length] == row_ids[start:length]).all()
        if not whole or start == 0 or (row_labels[length:] != IGNORE_INDEX).any():
            raise DataError(
                f"'{side}' must be right-padded, with labels of {IGNORE_INDEX} up to the completion and equal to the "
                f"input ids from there to the end; a row has length {length} and labels from position {start}."
            )
        out.append((row_ids[:start], row_ids[start:length]))
    return out


def _over_ranks(
    sums: list[float], largest: list[int], device: torch.device
) -> tuple[list[float], list[float], list[int]]:
    """Sums over all ranks of some figures, and over the ranks before this one; the largest over ranks of others."""
    if num_ranks() == 1:
        return sums, [0.0] * len(sums), largest
    mine = torch.tensor([*sums, *largest], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    together = torch.stack(every).cpu()
    added = together[:, : len(sums)]
    before = added[: dist.get_rank()].sum(dim=0)
    return added.sum(dim=0).tolist(), before.tolist(), [int(x) for x in together[:, len(sums) :].amax(dim=0)]
