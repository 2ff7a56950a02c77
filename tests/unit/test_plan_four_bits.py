"""What unpacking four bits takes: the plan beside torchao's own tensors, and beside what a compiled layer keeps."""

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isopref.models.adapter import NewAdapter, add_adapter, quantize_nf4
from isopref.models.shape import Shape, shape_of
from isopref.plan.layout import Layout, Loads
from isopref.plan.memory import NF4_BYTES, loading_memory, peak_memory, unpacked_bytes
from isopref.testing.models import tiny_model

D, Q, KV, F = 32, 32, 16, 48  # of the tiny Llama: width, queries, keys, MLP
LAYER = D * Q + 2 * D * KV + Q * D + 3 * D * F


def in_four_bits(*, compiled: bool, recompute: int = 0, compute_bytes: int = 2) -> Layout:
    return Layout(
        rows="shared",
        parallel="single",
        ranks=1,
        shard=1,
        grad_sync="last",
        compiled=compiled,
        recompute=recompute,
        weight_bytes=4,
        compute_bytes=compute_bytes,
        frozen_bytes=NF4_BYTES,
        quantised=True,
        state_bytes=8,
        offload=False,
    )


@pytest.fixture
def frozen() -> Shape:
    return shape_of(tiny_model("llama").requires_grad_(False))


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[weakref.ref[Any], int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if not isinstance(one, Tensor) or id(one.untyped_storage()) in before:
                continue
            storage = one.untyped_storage()
            made = weakref.ref(storage, self._free)
            if made not in self.sizes:
                self.sizes[made] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _free(self, gone: "weakref.ref[Any]") -> None:
        self.now -= self.sizes.pop(gone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacking_a_matrix_holds_what_the_plan_says(dtype: torch.dtype, frozen: Shape) -> None:
    """In bfloat16, 14 bytes of a number, and two of each block's."""
    layer = nn.Linear(256, 512, bias=False, dtype=dtype)
    quantize_nf4(layer, torch.device("cpu"))
    kept, at_once = unpacked_bytes(frozen, in_four_bits(compiled=False, compute_bytes=dtype.itemsize))
    with LiveBytes() as live:
        layer.weight.to(dtype)
    assert (kept, frozen.largest_matrix) == (0, D * F)
    assert live.peak / layer.weight.numel() == at_once / frozen.largest_matrix
    assert dtype != torch.bfloat16 or at_once == D * F * (14 + 2 / 64)


def test_a_compiled_layer_keeps_what_it_unpacked(frozen: Shape) -> None:
    """The layer is cut into forward and backward as for a GPU; only the code of the two is not generated here."""
    model: Any = tiny_model("llama").bfloat16()
    quantize_nf4(model.model.layers, torch.device("cpu"))
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8), dtype=torch.bfloat16, seed=0)
    layer, saved = model.model.layers[0], []
    layer.compile(backend="aot_eager_decomp_partition")
    hidden = torch.randn(1, 7, D, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=rotary, attention_mask=None)
    matrices = {(Q, D), (KV, D), (D, Q), (F, D), (D, F)}
    unpacked = sum(one.nbytes for one in saved if type(one) is Tensor and tuple(one.shape) in matrices)
    assert unpacked == 2 * LAYER
    kept, at_once = unpacked_bytes(frozen, in_four_bits(compiled=True))
    assert (kept, at_once) == (2 * (LAYER + 2 * D), 0)  # and two norms


def test_the_probe_unpacks_before_layers_are_compiled(frozen: Shape) -> None:
    found = [loading_memory(frozen, in_four_bits(compiled=compiled)) for compiled in (True, False)]
    assert found == [NF4_BYTES * frozen.parameters + D * F * (14 + 2 / 64)] * 2


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_the_peak_has_them_where_they_are(recompute: int, frozen: Shape) -> None:
    """Compiled: in every layer, or in the one that is computed again. Uncompiled: in one layer's backward pass."""
    load = Loads(*(np.array([[size]]) for size in (1000.0, 1000.0, 0.0, 0.0)))
    for compiled, of_layers, in_backward in (
        (True, (2 - recompute) * 2 * (LAYER + 2 * D), 2 * (LAYER + 2 * D) if recompute else 0),
        (False, 0, D * F * (14 + 2 / 64)),
    ):
        layout = in_four_bits(compiled=compiled, recompute=recompute)
        packed = peak_memory(frozen, layout, load, pairs=0)
        whole = peak_memory(frozen, replace(layout, quantised=False), load, pairs=0)
        assert packed.activations - whole.activations == pytest.approx(of_layers)
        assert packed.logits - whole.logits == pytest.approx(in_backward)
