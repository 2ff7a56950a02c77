"""The KV cache of sequences that a model is generating, one slot per sequence, and the attention that reads it.

A prompt is computed once, in a packed row with others, and its keys and values are copied to the slots of all its
answers. After that, each pass has one token per slot. Slots are independent: one can be reassigned to another answer at
any time, and nothing is padded to the longest prompt of a batch. The attention is registered with transformers, like
that of packed rows (attention.py); `check_slots` verifies that a model generates in slots what it would alone.

Dimensions: R slots, G key heads, Q queries per key head, L tokens that a slot has room for, E width of a head, T tokens
of a packed row, P prompts, N tokens to copy.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from isopref.errors import ModelError
from isopref.models.graphs import Graphs
from isopref.models.policy import Policy
from isopref.models.probe import TOLERANCE, check_layout
from isopref.ops.attention import segment_attention
from isopref.types import IntArray, Segments

log = logging.getLogger(__name__)

NAME = "isopref_slots"
ROUND = 128  # capacity grows in steps of this many tokens, so that kernels and graphs see few different lengths


@dataclass(frozen=True)
class _Prompts:
    """A pass over prompts: where to copy each token of the packed row."""

    segments: Segments
    source: Tensor  # N: its place in the row
    slot: Tensor  # N
    place: Tensor  # N: its place in the slot


@dataclass(frozen=True)
class _Tokens:
    """A pass over one token per slot: the position of each token, and how many places of each slot are read."""

    position: Tensor  # R
    length: int

    @cached_property
    def masks(self) -> dict[int | None, Tensor]:
        """Masks (R, 1, 1, L) that have been made so far, keyed by a layer's window."""
        return {}

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            place = torch.arange(self.length, device=self.position.device)
            found = place <= self.position[:, None]
            if window is not None:
                found &= place > self.position[:, None] - window
            self.masks[window] = found[:, None, None]
        return self.masks[window]


class Slots:
    """Keys and values of `num_slots` sequences in all layers of a policy. Memory grows with the longest of them."""

    def __init__(self, policy: Policy, num_slots: int, *, graphs: bool = True):
        AttentionInterface.register(NAME, _attention)
        self.policy, self.num_slots, self.room = policy, num_slots, 0
        self.device = next(policy.parameters()).device
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of each layer: R, G, L, E
        self._every = torch.arange(num_slots, device=self.device)
        self._graphs: Graphs | None = Graphs() if graphs and self.device.type == "cuda" else None

    def reserve(self, num_tokens: int) -> None:
        """Make room for this many tokens in every slot."""
        if num_tokens > self.room:
            self.room = -(-num_tokens // ROUND) * ROUND
            self.kept = {layer: (self._grown(k), self._grown(v)) for layer, (k, v) in self.kept.items()}
            self._forget_graphs()

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(*old.shape[:2], self.room, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def keep_only(self, slots: Sequence[int]) -> None:
        """Drop all other slots and renumber these in the given order."""
        index = torch.tensor(slots, device=self.device)
        self.kept = {layer: (k[index], v[index]) for layer, (k, v) in self.kept.items()}
        self.num_slots = len(slots)
        self._every = self._every[: len(slots)]
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Discard recorded passes: they read and write the tensors that existed when they were recorded."""
        if self._graphs is not None:
            self._graphs = Graphs()

    @torch.no_grad()
    def add_prompts(self, prompts: Sequence[IntArray], slots: Sequence[Sequence[int]]) -> None:
        """Compute prompts once each and put their keys and values into the slots of their answers."""
        lengths = [len(prompt) for prompt in prompts]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64))
        place = np.concatenate([np.arange(length) for length in lengths])
        source = [bounds[n] + np.arange(lengths[n]) for n, mine in enumerate(slots) for _ in mine]
        target = [np.full(lengths[n], slot) for n, mine in enumerate(slots) for slot in mine]
        offsets = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        both = tuple(int(bound) for bound in bounds)
        follows = (-1,) * len(lengths)
        segments = Segments(offsets, offsets, None, None, both, both, follows, longest=max(lengths))
        source_N = self._tensor(source)
        place_T = torch.from_numpy(place).to(self.device)
        work = _Prompts(segments, source_N, self._tensor(target), place_T[source_N])
        with self._using(work):
            self.policy.decoder(input_ids=ids[None].to(self.device), position_ids=place_T[None], use_cache=False)

    def _tensor(self, parts: Sequence[IntArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    @torch.no_grad()
    def next_logits(self, token_R: Tensor, position_R: Tensor, length: int) -> Tensor:
        """Write one token into each slot and return the logits of the one after it: R, V.

        `length`: the maximum number of tokens in any slot, including this one.
        """
        length = min(self.room, -(-length // ROUND) * ROUND)

        def compute(token_R: Tensor, position_R: Tensor) -> Tensor:
            with self._using(_Tokens(position_R, length)):
                output: Any = self.policy.model(
                    input_ids=token_R[:, None], position_ids=position_R[:, None], use_cache=False
                )
            logits: Tensor = output.logits[:, -1]
            return logits

        if self._graphs is None:
            return compute(token_R, position_R)
        try:
            return self._graphs.run(length, compute, token_R, position_R)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning("%s cannot be recorded as a CUDA graph (%s): sampling is slower", self.policy.name, error)
            self._graphs = None
            return compute(token_R, position_R)

    @contextmanager
    def _using(self, work: _Prompts | _Tokens) -> Iterator[None]:
        token = _current.set((self, work))
        before = self.policy.model.config._attn_implementation
        if before != NAME:
            self.policy.model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            _current.reset(token)
            if before != NAME:
                self.policy.model.set_attn_implementation(before)

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer: R, G, L, E."""
        if number not in self.kept:
            empty = (x.new_zeros(self.num_slots, x.shape[1], self.room, x.shape[3]) for x in (key, value))
            self.kept[number] = (next(empty), next(empty))
        return self.kept[number]

    def write(self, kept: Tensor, new_NGE: Tensor, slot_N: Tensor, place_N: Tensor) -> None:
        head_G = torch.arange(kept.shape[1], device=kept.device)
        kept[slot_N[:, None], head_G, place_N[:, None]] = new_NGE

    def put(self, work: _Prompts, kept: Tensor, new: Tensor) -> None:
        self.write(kept, new[0].transpose(0, 1)[work.source], work.slot, work.place)

    def append(self, work: _Tokens, kept: Tensor, new: Tensor) -> Tensor:
        self.write(kept, new[:, :, 0], self._every, work.position)
        return kept[:, :, : work.length]


_current: ContextVar[tuple[Slots, _Prompts | _Tokens] | None] = ContextVar("slots", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Has the signature that transformers calls; B, heads, T, width in and B, T, heads, width out."""
    names = [name for name, one in unknown.items() if isinstance(one, Tensor)]
    current = _current.get()
    number = getattr(module, "layer_idx", None)
    if attention_mask is not None or names or number is None or current is None:
        raise ModelError(f"{type(module).__name__} needs something from its attention that slots do not support")
    slots, work = current
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    keys, values = slots.layer(number, key, value)
    if isinstance(work, _Prompts):
        slots.put(work, keys, key)
        slots.put(work, values, value)
        options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
        return segment_attention(query[0], key[0], value[0], work.segments, **options)[None], None
    keys, values = slots.append(work, keys, key), slots.append(work, values, value)
    out = _attend(query, keys, values, work.mask(sliding_window), scale, softcap, s_aux)
    return out, None


def _attend(
    query: Tensor,
    key_RGLE: Tensor,
    value_RGLE: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one query per slot and head. The heads of a group are the queries of its key head: R, 1, H, E."""
    query_RGQE = query[:, :, 0].unflatten(1, (key_RGLE.shape[1], -1))
    if softcap is None and sinks is None:
        grouped = mask.expand(-1, -1, query_RGQE.shape[2], -1)
        out = scaled_dot_product_attention(query_RGQE, key_RGLE, value_RGLE, attn_mask=grouped, scale=scale)
        return out.flatten(1, 2)[:, None]
    scores = (query_RGQE @ key_RGLE.transpose(2, 3)) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(wide).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        shares = scores.softmax(dim=-1)
    return (shares.to(value_RGLE.dtype) @ value_RGLE).flatten(1, 2)[:, None]


@torch.no_grad()
def check_slots(policy: Policy) -> None:
    """Raise ModelError if the model's logits in slots differ from its own forward pass."""
    if policy.native is not None or policy.following or policy.unfolded:
        raise ModelError(f"{policy.name} has layers that keep a state of their own")
    check_layout(policy, "packed")  # prompts are computed in packed rows
    own_dtype = next(policy.parameters()).dtype
    device = next(policy.parameters()).device
    vocabulary = policy.logits.vocabulary or int(policy.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(4)
    # Texts of different lengths, one of them in two slots, and long enough for a short sliding window.
    texts = [torch.randint(vocabulary, (length,), generator=generator).numpy() for length in (21, 8)]
    prompts, rest = [text[:-4] for text in texts], [text[-4:] for text in texts]
    slots = Slots(policy, 3)
    slots.reserve(max(map(len, texts)))
    slot_of, owner = [[0, 2], [1]], [0, 1, 0]
    try:
        slots.add_prompts(prompts, slot_of)
        start = torch.tensor([len(prompts[one]) for one in owner], device=device)
        for step in range(4):
            token = torch.tensor([int(rest[one][step]) for one in owner], device=device)
            logits = slots.next_logits(token, start + step, int(start.max()) + step + 1)
            for slot, one in enumerate(owner):
                ids = torch.from_numpy(texts[one][: len(prompts[one]) + step + 1]).to(device)
                own = policy.own_logits(ids[None])[0, -1]
                off = float((logits[slot].float().log_softmax(-1) - own.float().log_softmax(-1)).abs().max())
                if not off <= TOLERANCE[own_dtype] * 10:
                    raise ModelError(f"its logits in slots are off by {off:.2g}")
    except ModelError as error:
        raise ModelError(f"{policy.name}: {error}") from error
    except Exception as error:  # a model is third-party code and may raise anything
        raise ModelError(f"{policy.name}: {type(error).__name__}: {error}") from error
