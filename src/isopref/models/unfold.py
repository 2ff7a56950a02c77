"""Layers with a state in packed rows: state-space layers, linear attention, short convolutions.

Such a layer reads its input from left to right and knows nothing of segments, so in a row one answer would start from
the state in which another one left it. Hooks around the layer unfold the row into its sequences: every segment with all
that comes before it, from the root of its tree on, as padded batches of similar lengths. What the segments' own tokens
get is put back into the row. The layer computes a shared prompt once for every answer; all other layers, once.
Nothing is assumed about what the layer does, except that it is causal. The probe (probe.py) holds the result against
the model itself.

(Starting answers from their prompt's final state would save that part too, but needs code of its own for every kind of
layer, and kernels that take a gradient through an initial state.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.models.row import Bucket, Row, current_row, enter_row

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import

# Layers without a convolution that have a state all the same.
NAMES = ("LightningAttention",)
MASKS = ("attention_mask",)  # of a row; the batches are padded on the right, which a causal layer never sees
ROW_ONLY = ("segments",)


def unfold_states(model: PreTrainedModel | NativeModel) -> tuple[str, ...]:
    """Put hooks around the layers of a model that have a state. Returns their names."""
    if not isinstance(model, PreTrainedModel):
        return ()
    found = tuple(_stateful(model.get_decoder() or model, ""))
    for _, module in found:
        if not any(isinstance(hook, _Unfolding) for hook in module._forward_pre_hooks.values()):  # of another policy
            _Unfolding().around(module)
    return tuple(name for name, _ in found)


def _stateful(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with a state, and their names."""
    for name, child in module.named_children():
        convolves = any(isinstance(part, nn.Conv1d) for part in child.children())
        if convolves or type(child).__name__.endswith(NAMES):
            yield prefix + name, child
        else:
            yield from _stateful(child, f"{prefix}{name}.")


class _Unfolding:
    """The hooks around one layer: before it, the first batch takes the row's place; after it, the others follow."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def around(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)
        module.register_forward_hook(self.after)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.row = current_row()
        if self.row is None:
            return None
        row = self.row
        num_tokens = row.segments.query_bounds[-1]
        kept = {name: None if name in MASKS else one for name, one in kwargs.items() if name not in ROW_ONLY}
        enter_row(None)  # until `after`; what is inside the layer has a padded batch
        self.given = _each((args, kept), lambda x: _Keys(row.keys(x)) if x.shape[:2] == (1, num_tokens) else x)
        return self._batch(row, row.buckets[0])

    def _batch(self, row: Row, bucket: Bucket) -> Any:
        return _each(self.given, lambda x: row.unfold(x.tensor, bucket) if isinstance(x, _Keys) else x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        row, self.row = self.row, None
        if row is None:
            return None
        outputs = [output]
        for bucket in row.buckets[1:]:
            args, kwargs = self._batch(row, bucket)
            outputs.append(module.forward(*args, **kwargs))
        self.given = (), {}
        enter_row(row)
        return _folded(row, outputs)


class _Keys:
    """What a row has for each of its keys, in the place of a tensor with something for each of its tokens."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments with every tensor in them changed."""
    if isinstance(value, tuple | list):
        return type(value)(_each(one, change) for one in value)
    if isinstance(value, dict):
        return {name: _each(one, change) for name, one in value.items()}
    return change(value) if isinstance(value, Tensor | _Keys) else value


def _folded(row: Row, outputs: list[Any]) -> Any:
    """The outputs of a layer for all buckets as its output for the row; None where that has nothing for each token."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_folded(row, list(parts)) for parts in zip(*outputs, strict=True))
    if isinstance(first, Tensor) and first.shape[:2] == row.buckets[0].shape:
        return row.fold(outputs)
    return None
