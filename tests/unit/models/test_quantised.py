"""Layers in four bits: which they are, and that compiled ones unpack again in the backward pass, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isopref.models.adapter import FourBitLinear, is_quantised, quantize_nf4
from isopref.testing.models import tiny_model, with_adapter
from isopref.testing.oracle import relative_error

CPU = torch.device("cpu")
PARTITION = "aot_eager_decomp_partition"  # forward and backward as for a GPU; only their code is not generated


class Layer:
    """A decoder layer with an adapter on its four bits, and what goes in and comes back."""

    def __init__(self, architecture: str, dtype: torch.dtype = torch.float32) -> None:
        model: Any = tiny_model(architecture, dtype=dtype)
        quantize_nf4(model, CPU, head=model.get_output_embeddings())
        self.model: Any = with_adapter(model, "lora").train()
        self.layer = self.model.model.layers[0]
        generator = torch.Generator().manual_seed(1)
        hidden, self.above = torch.randn(2, 1, 7, 32, generator=generator).to(dtype)
        self.hidden = hidden.requires_grad_()
        self.rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])

    def __call__(self) -> Tensor:
        found = self.layer(self.hidden, position_embeddings=self.rotary, attention_mask=None)
        assert isinstance(found, Tensor)
        return found

    def gradients(self) -> dict[str, Tensor]:
        trained = {name: weight for name, weight in self.layer.named_parameters() if weight.requires_grad}
        inputs = {"hidden": self.hidden, **trained}
        return dict(zip(inputs, torch.autograd.grad(self(), list(inputs.values()), self.above), strict=True))

    def saved(self) -> list[Tensor]:
        """What is kept between the two passes."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self()
        return found

    def backward_flops(self) -> int:
        result = self()
        with FlopCounterMode(display=False) as counter:
            result.backward(self.above)
        return int(counter.get_total_flops())


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


def test_the_layers_but_the_head_are_in_four_bits_under_their_names() -> None:
    model, whole = tiny_model("qwen2"), tiny_model("qwen2")
    head: Any = model.get_output_embeddings()
    quantize_nf4(model, CPU, head=head)
    linear = {name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)}
    assert {name for name, layer in model.named_modules() if isinstance(layer, FourBitLinear)} == linear - {"lm_head"}
    assert type(head) is nn.Linear
    assert type(head.weight) is nn.Parameter
    assert model.state_dict().keys() == whole.state_dict().keys()
    for name, layer in model.named_modules():
        if isinstance(layer, FourBitLinear):
            before: Any = whole.get_submodule(name)
            assert (layer.in_features, layer.out_features) == (before.in_features, before.out_features)
            assert (layer.bias is None) == (before.bias is None)
            assert layer.bias is None or torch.equal(layer.bias, before.bias)


def test_a_linear_layer_of_another_class_stays_one() -> None:
    """Falcon's computes in its own way."""
    model: Any = tiny_model("falcon")
    quantize_nf4(model, CPU, head=model.get_output_embeddings())
    layer = model.transformer.h[0].mlp.dense_h_to_4h
    assert type(layer).__name__ == "FalconLinear"
    assert is_quantised(layer.weight)


@pytest.mark.parametrize(
    ("architecture", "recompute"),
    [  # qwen2 has biases
        ("llama", False),
        ("qwen2", True),
        pytest.param("llama", True, marks=pytest.mark.soak),
        pytest.param("qwen2", False, marks=pytest.mark.soak),
    ],
)
def test_compiled_gradients_are_those_of_the_layer(architecture: str, recompute: bool) -> None:
    """Also where the layer as a whole is computed again in its backward pass."""
    layer = Layer(architecture)
    expected = layer.gradients()
    if recompute:
        layer.model.gradient_checkpointing_enable({"use_reentrant": False})
    layer.layer.compile(backend=PARTITION, fullgraph=True)
    assert relative_error(layer.gradients(), expected) < 1e-6


def test_generated_code_has_the_same_gradients() -> None:
    """Of one matrix and its adapter, as there is much code for a whole layer."""
    layer = Layer("llama")
    expected = layer.gradients()
    layer.layer.mlp.up_proj.compile(fullgraph=True)
    assert relative_error(layer.gradients(), expected) < 1e-6


def test_a_compiled_layer_keeps_no_matrix_that_it_unpacked() -> None:
    layer = Layer("llama", torch.bfloat16)
    matrices = {tuple(weight.shape) for weight in layer.layer.parameters() if is_quantised(weight)}
    assert matrices == {(32, 32), (16, 32), (48, 32), (32, 48)}
    layer.layer.compile(backend=PARTITION)
    saved = layer.saved()
    assert saved
    assert not [one for one in saved if {tuple(one.shape), tuple(one.shape)[::-1]} & matrices]


def test_a_compiled_layer_computes_no_product_again() -> None:
    """Only unpacking is done twice."""
    expected = Layer("llama").backward_flops()
    compiled = Layer("llama")
    compiled.layer.compile(backend=PARTITION)
    assert compiled.backward_flops() == expected > 0


def test_a_compiled_layer_scores_without_gradients() -> None:
    layer = Layer("llama")
    with torch.no_grad():
        expected = layer()
        layer.layer.compile(backend=PARTITION, fullgraph=True)
        torch.testing.assert_close(layer(), expected)
