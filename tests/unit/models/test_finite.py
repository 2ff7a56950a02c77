"""Weights that contain NaN or Inf are found before anything is computed with them, and named."""

import pytest
import torch

from isopref.errors import ModelError
from isopref.models.adapter import quantize_nf4
from isopref.models.finite import check_finite
from isopref.testing.models import tiny_model

ONE = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_is_enough(bad: float, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    check_finite(model, "it")
    model.get_parameter(ONE).data[3, 5] = bad
    with pytest.raises(ModelError) as caught:
        check_finite(model, "it")
    assert str(caught.value) == (
        f"it: the weights contain NaN or Inf, in {ONE}. The files are damaged, or training had diverged before they "
        "were written. Download the model again, or use an earlier checkpoint."
    )


def test_several_are_counted() -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    count = len(list(model.parameters()))
    with pytest.raises(ModelError, match=rf"in model\.embed_tokens\.weight and {count - 1} more tensors\. The"):
        check_finite(model, "it")


def test_four_bits_have_scales() -> None:
    model = tiny_model("llama")
    layer = model.get_parameter(ONE)
    layer.data[3, 5] = float("nan")
    quantize_nf4(model, torch.device("cpu"), head=model.get_output_embeddings())
    with pytest.raises(ModelError, match=f"in {ONE}"):
        check_finite(model, "it")


def test_large_numbers_are_finite() -> None:
    model = tiny_model("llama", dtype=torch.float16)
    model.get_parameter(ONE).data.fill_(65504)  # the largest; a sum of them would not be finite
    check_finite(model, "it")
