"""Linear layers in float8: which they are, that layouts agree, and where float8 is refused. Emulated on the CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from isopref.build.hardware import check_hardware, use_float8
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import ConfigError
from isopref.models import float8
from isopref.models.float8 import check_device, compute_in_float8, float8_layers
from isopref.models.policy import Policy
from isopref.reference.key import identity
from isopref.testing import oracle
from isopref.testing.cells import KINDS, Cell
from isopref.testing.exactness import measure
from isopref.testing.expected import expected
from isopref.testing.models import tiny_model, with_adapter

FLOAT8 = Cell(architecture="llama", dtype="float32", float8=True)


def converted(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]


def test_head_and_embedding_stay_as_they_are() -> None:
    model = tiny_model("llama")
    count = compute_in_float8(model, emulate=True)
    names = converted(model)
    assert len(names) == 2 * 7  # q, k, v, o, gate, up and down of two layers
    assert all(name.startswith("model.layers.") for name in names)
    weights = dict(model.named_parameters())
    assert count == sum(weights[f"{name}.weight"].numel() for name in names)


def test_routers_and_experts_stay_as_they_are() -> None:
    model = tiny_model("qwen3_moe")
    compute_in_float8(model, emulate=True)
    assert all("self_attn" in name for name in converted(model))


@pytest.mark.parametrize("name", ["gate", "router", "router.layer"])
def test_a_router_made_of_a_linear_layer_is_left_out(name: str) -> None:
    model = tiny_model("llama")
    layer: nn.Module = nn.Linear(32, 16)
    if "." in name:
        layer = nn.Sequential()
        layer.add_module("layer", nn.Linear(32, 16))
    model.model.layers[0].mlp.add_module(name.split(".")[0], layer)
    assert not [
        one for one in float8_layers(model) if one.out_features == 16 and one.in_features == 32 and one.bias is not None
    ]


def test_widths_that_no_kernel_takes_are_left_out() -> None:
    model = tiny_model("llama", intermediate_size=40)
    compute_in_float8(model, emulate=True)
    assert len(converted(model)) == 2 * 4


def test_matrices_of_an_adapter_stay_as_they_are() -> None:
    model = with_adapter(tiny_model("llama"), "lora")
    compute_in_float8(model, emulate=True)
    names = converted(model)
    assert len(names) == 2 * 7
    assert all(name.endswith("base_layer") for name in names)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no linear layer whose widths are multiples of 16\. Use bfloat16"):
        compute_in_float8(tiny_model("gpt2"), emulate=True)


def test_weights_and_their_names_do_not_change() -> None:
    plain, model = tiny_model("llama"), tiny_model("llama")
    compute_in_float8(model, emulate=True)
    before, after = plain.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reference_in_float8_is_another() -> None:
    model = tiny_model("llama")
    assert identity(model, compute_dtype="float8") != identity(model, compute_dtype="bfloat16")


def test_every_layout_computes_the_same_loss() -> None:
    found = [measure(replace(FLOAT8, rows=rows, cut=cut)) for rows in KINDS for cut in ("pair", "whole")]
    assert max(one.loss_error for one in found) <= 1e-6
    assert max(one.metric_error for one in found) <= 1e-6


def test_float8_rounds() -> None:
    """What layouts agree on is far from the model in float32, so they agree on float8."""
    gradient, plain = expected(FLOAT8)[1], expected(replace(FLOAT8, float8=False))[1]
    assert oracle.relative_error(gradient, plain) > 3 * measure(FLOAT8).gradient_error


def test_one_scale_per_tensor_would_depend_on_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe that we do not use: what else is in the batch changes the loss."""
    monkeypatch.setattr(float8, "RECIPE", "tensorwise")
    found = [measure(replace(FLOAT8, rows="padded", cut=cut, objective="hinge")) for cut in ("pair", "whole")]
    assert max(one.metric_error for one in found) > 1e-4


def run_of(device: str, tmp_path: Path) -> Run:
    config = Config.model_validate({"model": {"path": "m", "compute_dtype": "float8"}, "data": {"train": "t"}})
    return Run(config, tmp_path, Environment(0, 1, torch.device(device)), Display(quiet=True))


def test_a_cpu_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU of the Hopper generation or newer.*on the cpu"):
        check_hardware(run_of("cpu", tmp_path))


def test_an_older_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"capability 9\.0\), and NVIDIA A100 has 8\.0"):
        check_device(torch.device("cuda", 0))


def test_a_run_says_what_is_in_float8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    run = replace(run_of("cpu", tmp_path), display=SimpleNamespace(say=said.append))  # type: ignore[arg-type]
    emulated = float8.compute_in_float8
    monkeypatch.setattr("isopref.build.hardware.compute_in_float8", lambda model: emulated(model, emulate=True))
    use_float8(run, Policy(tiny_model("llama")), compiled=False)
    assert "15,360 of 21,728 weights are in layers that multiply in float8 (71%)" in said[0]
    assert "without compiled layers, float8 is slower than bfloat16" in said[1]
