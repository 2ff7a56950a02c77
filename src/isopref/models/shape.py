"""The size of a model, from its config alone: the basis for estimates of memory and time."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from isopref.models.adapter import has_wrapped_parameters, summed_parameters
from isopref.models.float8 import float8_layers
from isopref.models.flops import UsefulFlops
from isopref.models.follow import Exchanged, exchanged
from isopref.models.head import head_of
from isopref.models.parallel import can_offload, divisible_heads, has_layers, why_not_split
from isopref.models.parts import widest_attention
from isopref.models.policy import Policy
from isopref.models.tiles import can_tile
from isopref.models.unused import is_inside


class Float8Size(NamedTuple):
    """The layers that multiply in float8 if requested."""

    parameters: int
    trained: int
    sides: int  # sum of their inputs and outputs per token, in numbers


@dataclass(frozen=True)
class ModelShape:
    """Parameters and widths of a causal language model. Tied weights count once."""

    parameters: int
    unused_parameters: int  # of parts that text does not use: in memory, but never gathered or trained
    trained_parameters: int
    trained_in_matrices: int  # those in matrices of decoder layers, without fused experts
    root_parameters: int  # outside the decoder layers: embeddings, head, last norm
    largest_matrix: int  # numbers of the largest linear map in a decoder layer
    frozen_in_maps: int  # numbers of all frozen linear maps; fused experts do not count
    has_wrapped_parameters: bool  # whether an adapter is on weights that belong to no layer, so layers do not compile
    summed_parameters: int  # those kept a second time with an adapter's update added (adapter.summed_parameters)
    adapter_sides: int  # sum of the inputs and outputs of all linear maps with an adapter, per token, in numbers
    layers: int
    has_layers: bool  # whether the model declares which blocks are its layers, so that they can compile and recompute
    can_offload: bool  # whether recomputing layers can keep their inputs in host memory
    can_tile: bool  # whether MLPs can be computed in tiles, as far as the model's structure shows
    width: int
    heads: int
    head_width: int  # of queries and keys
    value_width: int  # of a head's values
    softcap: float | None  # of attention scores
    key_width: int  # of the keys of one token in one layer, over all key heads
    normed_width: int  # of queries and keys of one token in one layer, if they have norms; else 0
    exchanged: tuple[Exchanged, ...]  # by ranks that split a row, for each layer with a state
    row_parts: int  # largest number of ranks that can split a row; its divisors can, too
    why_not_split: str | None  # why no ranks can split a row
    vocabulary: int
    float8: Float8Size
    flops: UsefulFlops

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters

    @property
    def text_parameters(self) -> int:
        return self.parameters - self.unused_parameters

    @property
    def share_in_matrices(self) -> float:
        return self.trained_in_matrices / max(1, self.trained_parameters)

    @property
    def layer_parameters(self) -> float:
        """Parameters of one decoder layer, including all its experts."""
        return (self.text_parameters - self.root_parameters) / self.layers

    @property
    def active_parameters(self) -> float:
        """Matrix entries of one decoder layer that one token is multiplied by."""
        return self.flops.per_token / 2 / self.layers

    @property
    def inner_width(self) -> float:
        """Width of the MLP, assuming three matrices as in Llama; with experts, the sum over those one token uses."""
        return max(0.0, (self.active_parameters / self.width - 2 * self.width - 2 * self.key_width) / 3)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of a model, which may be on the meta device."""
    config = widest_attention(model.config.get_text_config())
    heads = getattr(config, "num_attention_heads", 0)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    query_width = getattr(config, "qk_head_dim", None) or head_width
    key_width = head_width * (getattr(config, "num_key_value_heads", None) or heads)
    policy = Policy(model)
    text = [(name, p) for name, p in model.named_parameters() if not is_inside(name, policy.unused)]
    in_layers = {id(p) for name, p in text if any(part.isdigit() for part in name.split("."))}
    parameters, in_text = (sum(p.numel() for p in some) for some in (model.parameters(), (p for _, p in text)))
    head = head_of(model)
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return ModelShape(
        parameters=parameters,
        unused_parameters=parameters - in_text,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        trained_in_matrices=sum(
            p.numel()
            for name, p in text
            if p.requires_grad and p.ndim == 2 and id(p) in in_layers and not name.endswith("bias")
        ),
        root_parameters=sum(p.numel() for _, p in text if id(p) not in in_layers),
        largest_matrix=max((p.numel() for p in linear if id(p) in in_layers), default=0),
        frozen_in_maps=sum(p.numel() for p in linear if not p.requires_grad),
        has_wrapped_parameters=has_wrapped_parameters(model),
        summed_parameters=summed_parameters(model),
        adapter_sides=sum(max(p.shape) for name, p in text if "lora_" in name and p.ndim == 2),
        layers=config.num_hidden_layers,
        has_layers=has_layers(policy),
        can_offload=can_offload(policy),
        can_tile=can_tile(policy),
        width=config.hidden_size,
        heads=heads,
        head_width=query_width,
        value_width=getattr(config, "v_head_dim", None) or query_width,
        softcap=getattr(config, "attn_logit_softcapping", None),
        key_width=key_width,
        normed_width=_normed_width(model, heads * query_width, key_width),
        exchanged=tuple(exchanged(model.get_submodule(name)) for name in policy.following),
        row_parts=1 if policy.unfolded else divisible_heads(policy),
        why_not_split=why_not_split(policy),
        vocabulary=0 if head is None else head.weight.shape[0],
        float8=_float8_size(model),
        flops=UsefulFlops(policy),
    )


def _normed_width(model: PreTrainedModel, query_width: int, key_width: int) -> int:
    """Width of queries and keys together if attention has norms for them, which affects tensor parallelism."""
    normed = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())
    return query_width + key_width if normed else 0


def _float8_size(model: PreTrainedModel) -> Float8Size:
    layers = list(float8_layers(model))
    return Float8Size(
        parameters=sum(layer.weight.numel() for layer in layers),
        trained=sum(layer.weight.numel() for layer in layers if layer.weight.requires_grad),
        sides=sum(layer.in_features + layer.out_features for layer in layers),
    )
