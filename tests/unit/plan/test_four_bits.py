"""What unpacking four bits takes: the plan beside torchao's own tensors, and beside those of a compiled layer."""

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isopref.models.adapter import NewAdapter, add_adapter, is_quantised, quantize_nf4
from isopref.models.shape import ModelShape, shape_of
from isopref.plan.layout import ONE_GPU, Layout, Loads
from isopref.plan.memory import NF4_BYTES, loading_memory, peak_memory, unpacked_bytes
from isopref.testing.models import tiny_model

D, Q, KV, F = 32, 32, 16, 48  # of the tiny Llama: width, queries, keys, MLP


def in_four_bits(*, compiled: bool, recompute: int = 0, compute_bytes: int = 2) -> Layout:
    return replace(
        ONE_GPU,
        compiled=compiled,
        recompute=recompute,
        weight_bytes=4,
        compute_bytes=compute_bytes,
        frozen_bytes=NF4_BYTES,
        quantised=True,
        state_bytes=8,
    )


@pytest.fixture
def frozen() -> ModelShape:
    return shape_of(tiny_model("llama").requires_grad_(False))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3_moe"])  # the last one's experts are fused
def test_what_is_in_four_bits(architecture: str) -> None:
    model = tiny_model(architecture, intermediate_size=64)
    add_adapter(model, NewAdapter("lora", rank=2, alpha=4.0), dtype=torch.float32, seed=0)
    expected = shape_of(model).frozen_in_maps
    model = tiny_model(architecture, intermediate_size=64)
    quantize_nf4(model, torch.device("cpu"), head=model.get_output_embeddings())
    assert expected == sum(weight.numel() for weight in model.parameters() if is_quantised(weight)) > 0


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
def test_unpacking_a_matrix_holds_what_the_plan_says(dtype: torch.dtype, frozen: ModelShape) -> None:
    """In bfloat16, 14 bytes of a number, and two of each block's."""
    layers: Any = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=dtype))
    quantize_nf4(layers, torch.device("cpu"))
    weight = layers[0].weight
    at_once = unpacked_bytes(frozen, in_four_bits(compiled=False, compute_bytes=dtype.itemsize))
    with LiveBytes() as live:
        weight.to(dtype)
    assert frozen.largest_matrix == D * F
    assert live.peak / weight.numel() == at_once / frozen.largest_matrix
    assert dtype != torch.bfloat16 or at_once == D * F * (14 + 2 / 64)


def most_at_once(graph: GraphModule, shapes: set[tuple[int, int]]) -> int:
    """Bytes of matrices of such shapes, each from where it is computed to where it, or a view of it, is last used."""
    spans: dict[StorageWeakRef, list[int]] = {}
    place = {node: number for number, node in enumerate(graph.graph.nodes)}
    for node, first in place.items():
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and tuple(value.shape) in shapes:
            span = spans.setdefault(StorageWeakRef(value.untyped_storage()), [value.nbytes, first, first])
            span[2] = max(span[2], *(place[user] for user in node.users))
    return max(sum(size for size, first, last in spans.values() if first <= now <= last) for now in place.values())


def test_a_compiled_layer_holds_one_matrix_at_a_time(frozen: ModelShape) -> None:
    """In the graphs of both passes, in the order that they are run, as for a GPU."""
    model: Any = tiny_model("llama").bfloat16()
    quantize_nf4(model.model.layers, torch.device("cpu"))
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8), dtype=torch.bfloat16, seed=0)
    layer, graphs = model.model.layers[0], []

    def keep(graph: GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    layer.compile(
        backend=aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    )
    hidden = torch.randn(1, 7, D, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])
    layer(hidden, position_embeddings=rotary, attention_mask=None).sum().backward()
    matrices = {(Q, D), (KV, D), (D, KV), (F, D), (D, F)}
    at_once = [most_at_once(graph, matrices) for graph in graphs]
    assert at_once == [unpacked_bytes(frozen, in_four_bits(compiled=True))] * 2 == [2 * D * F] * 2


def test_the_probe_unpacks_before_layers_are_compiled(frozen: ModelShape) -> None:
    found = [loading_memory(frozen, in_four_bits(compiled=compiled)) for compiled in (True, False)]
    assert found == [NF4_BYTES * frozen.parameters + D * F * (14 + 2 / 64)] * 2


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_the_peak_has_them_where_they_are(recompute: int, frozen: ModelShape) -> None:
    """In one layer's backward pass, recomputed or not."""
    load = Loads(*(np.array([[size]]) for size in (1000.0, 1000.0, 0.0, 0.0, 0.0)))
    for compiled, unpacked in ((True, 2 * D * F), (False, D * F * (14 + 2 / 64))):
        layout = in_four_bits(compiled=compiled, recompute=recompute)
        packed = peak_memory(frozen, layout, load, answers=0)
        whole = peak_memory(frozen, replace(layout, quantised=False), load, answers=0)
        assert packed.activations == whole.activations
        assert packed.logits - whole.logits == pytest.approx(unpacked)
