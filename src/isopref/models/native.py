"""OLMo-core's own Transformer as the model of a policy.

It implements the part of transformers' interface that isopref uses, so everything above a policy works with both.
conversion.py handles conversion and checkpoints.

Packed rows need two things from OLMo-core's attention: positions that restart inside a row, which its blocks accept as
tables of rotary angles, and the mask of a row's segments, for which `SegmentBackend` wraps OLMo-core's own backend.

Dimensions: B sequences, T tokens, D hidden width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from olmo_core.nn.attention import Attention
from olmo_core.nn.attention.backend import AttentionBackend
from olmo_core.nn.hf.convert import convert_state_to_hf
from olmo_core.nn.transformer import Transformer, TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.models.attention import record
from isopref.ops.attention import segment_attention
from isopref.types import Segments


class Hidden(NamedTuple):
    """The part of transformers' decoder output that is used."""

    last_hidden_state: Tensor  # B, T, D


class SegmentBackend(nn.Module):
    """An attention backend that follows a packed row's segments and delegates everything else to the original."""

    cp_enabled = False

    def __init__(self, own: AttentionBackend):
        super().__init__()
        self.own = own
        self.scale = own.scale if own.scale is not None else float(own.head_dim) ** -0.5
        self.window = None if own.window_size == (-1, -1) else own.window_size[0] + 1

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], *, local_k_slice: Segments | None = None, **options: Any
    ) -> Tensor:
        """Queries, keys and values in, attention out: 1, T, heads, width each. `local_k_slice` carries the segments."""
        if local_k_slice is None:
            out: Tensor = self.own(qkv, **options)
            return out
        record(self, self.window, None)
        query, key, value = (x[0].transpose(0, 1) for x in qkv)
        seen = segment_attention(query, key, value, local_k_slice, scale=self.scale, window=self.window)
        return seen[None].contiguous()


class NativeModel(nn.Module):
    """A Transformer that computes what the Hugging Face model `twin` computes with the same weights.

    The twin is used to verify the model, to generate answers and to export; at other times it has no weights.
    """

    supports_gradient_checkpointing = True

    def __init__(self, transformer: Transformer, config: TransformerConfig, twin: PreTrainedModel):
        super().__init__()
        self.transformer = transformer
        self.native_config = config
        self.config: Any = twin.config
        vars(self)["_twin"] = twin  # not as a submodule, which would register its weights twice
        self._no_split_modules = sorted({type(block).__name__ for block in transformer.blocks.values()})
        for attention in self._attentions():
            attention.backend = SegmentBackend(attention.backend)  # type: ignore[assignment]

    def _attentions(self) -> Iterator[Attention]:
        for block in self.transformer.blocks.values():
            assert isinstance(block.attention, Attention)
            yield block.attention

    @property
    def twin(self) -> PreTrainedModel:
        twin: PreTrainedModel = vars(self)["_twin"]
        return twin

    @property
    def windows(self) -> list[int | None]:
        """How many tokens each layer attends to, including the token itself; None: all before it."""
        return [attention.backend.window for attention in self._attentions()]  # type: ignore[misc]

    @property
    def base_model(self) -> "NativeModel":
        return self

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(getattr(block, "gradient_checkpointing", False) for block in self.transformer.blocks.values())

    def gradient_checkpointing_enable(self, _how: dict[str, Any]) -> None:
        """Nothing to do: `forward` reads the setting of each block."""

    def get_input_embeddings(self) -> nn.Embedding:
        assert self.transformer.embeddings is not None
        return self.transformer.embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.transformer.lm_head.w_out

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        segments: Segments | None = None,
        use_cache: bool = False,
    ) -> Hidden:
        """Hidden states after the last norm. Positions need segments."""
        assert not use_cache
        transformer = self.transformer
        hidden: Tensor = self.get_input_embeddings()(input_ids)
        if transformer.embed_scale is not None:
            hidden = hidden * transformer.embed_scale
        if transformer.embedding_norm is not None:
            hidden = transformer.embedding_norm(hidden)
        angles: dict[str, dict[str, Tensor]] = {}
        for block, attention in zip(transformer.blocks.values(), self._attentions(), strict=True):
            where: dict[str, Any] = {}
            if segments is not None and position_ids is not None:
                # Attention passes local_k_slice to its backend untouched, and the backend is SegmentBackend.
                where = {"local_k_slice": segments, **_angles(attention, position_ids[0], segments, angles)}
            recomputes = torch.is_grad_enabled() and getattr(block, "gradient_checkpointing", False)
            if recomputes:
                hidden = block._gradient_checkpointing_func(partial(block, **where), hidden)  # type: ignore[operator]
            else:
                hidden = block(hidden, **where)
        norm = transformer.lm_head.norm
        return Hidden(hidden if norm is None else norm(hidden))

    @contextmanager
    def as_hf(self, state: dict[str, Tensor] | None = None) -> Iterator[PreTrainedModel]:
        """The Hugging Face model with a copy of these weights, while the context is open.

        `state` holds them by this module's names if this rank has only shards.
        """
        named = self.state_dict() if state is None else state
        converted = convert_state_to_hf(
            self.config, {name.removeprefix("transformer."): tensor for name, tensor in named.items()}
        )
        twin = self.twin
        twin.load_state_dict(converted, assign=True)
        twin.tie_weights()
        twin.to(next(iter(converted.values())).device)  # its buffers
        try:
            yield twin
        finally:
            drop_weights(twin)


def drop_weights(model: PreTrainedModel) -> None:
    """Free the memory of a model's weights. Its buffers stay."""
    nothing = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    model.load_state_dict(nothing, assign=True)


def _angles(
    attention: Attention, position_T: Tensor, segments: Segments, known: dict[str, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The rotary angles of a row's positions, all smaller than the length of its longest segment."""
    rope = attention.rope
    if rope is None:
        return {}
    key = f"{rope.theta} {rope.scaling}"
    if key not in known:
        tables = vars(rope.get_buffers(segments.longest, position_T.device))
        known[key] = {name: table[position_T] for name, table in tables.items() if table is not None}
    return known[key]
