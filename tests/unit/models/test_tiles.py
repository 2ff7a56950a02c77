"""MLPs in tiles: the same numbers with less in memory; what is no map of single tokens is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isopref.batch.rows import build_microbatch
from isopref.errors import ConfigError, ModelError
from isopref.models.conversion import from_hf
from isopref.models.parallel import checkpoint_layers, decoder_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_tiles
from isopref.models.tiles import TiledForward, can_tile, tile_mlps, tiles_of
from isopref.testing import oracle
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs, tiny_model, with_adapter

ROW = random_pairs(3, seed=1, longest=20)


def gradients(policy: Policy, kind: Any = "shared") -> dict[str, Tensor]:
    policy.zero_grad()
    policy(build_microbatch(examples(ROW), kind)).logp.sum().backward()
    return {name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None}


def mlp_calls(policy: Policy) -> list[int]:
    """The tokens of every call of the first layer's MLP, from now on."""
    calls: list[int] = []
    tiled = next(one.forward for one in decoder_layers(policy)[0].modules() if isinstance(one.forward, TiledForward))
    own = tiled.own

    def counted(x: Tensor) -> Any:
        calls.append(x[..., 0].numel())
        return own(x)

    tiled.own = counted
    return calls


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["shared", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "olmo2"])
def test_gradients_are_the_same(architecture: str, kind: str, recompute: bool) -> None:
    policy = Policy(tiny_model(architecture, dtype=torch.float64)).train()
    expected = gradients(policy, kind)
    names = [name for name, _ in policy.named_parameters()]
    tile_mlps(policy, 7)
    checkpoint_layers(policy, 2 * recompute)
    assert oracle.relative_error(gradients(policy, kind), expected) <= 1e-7  # norms compute in float32
    assert [name for name, _ in policy.named_parameters()] == names


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "native", "lora"])
def test_experts_native_models_and_adapters(model: str) -> None:
    made = tiny_model("llama" if model in ("native", "lora") else model, dtype=torch.float32)
    if model == "lora":
        made = with_adapter(made, "lora")
    policy = Policy(from_hf(made) if model == "native" else made).train()
    expected = gradients(policy)
    tile_mlps(policy, 7)
    assert oracle.relative_error(gradients(policy), expected) <= 1e-5


def test_a_layer_that_recomputes_computes_its_mlp_twice_and_not_three_times() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32)).train()
    tile_mlps(policy, 16)
    checkpoint_layers(policy, 2)
    calls = mlp_calls(policy)
    row = build_microbatch(examples(ROW), "shared")
    tokens = row.passes[0].input_ids.numel()
    loss = policy(row).logp.sum()
    assert sum(calls) == tokens
    assert max(calls) == 16
    loss.backward()
    assert sum(calls) == 2 * tokens


def test_only_the_input_is_kept() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32)).train()
    sizes: list[int] = []

    def noted(x: Tensor) -> Tensor:
        sizes.append(x.shape[-1] if x.ndim else 0)
        return x

    def kept() -> int:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda x: x):
            policy(build_microbatch(examples(ROW), "shared"))
        return sizes.count(policy.model.config.intermediate_size)

    before = kept()
    tile_mlps(policy, 7)
    assert kept() == 0 < before


def test_gradients_of_narrow_weights_add_up_in_float32() -> None:
    """Sums of bfloat16 numbers lose what is small beside the total: of 64 tiles, most of the later ones."""
    torch.manual_seed(0)
    policy = Policy(tiny_model("llama", dtype=torch.float32))
    mlp: Any = decoder_layers(policy)[0].mlp
    narrow = mlp.bfloat16()
    x = torch.rand(1, 256, policy.model.config.hidden_size).bfloat16()
    found = []
    for tokens in (None, 4):
        tile_mlps(policy, tokens)
        narrow.zero_grad()
        narrow(x.clone().requires_grad_()).sum().backward()
        found.append(narrow.down_proj.weight.grad.float())
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 4e-3


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.compile needs a full build of torch")
def test_in_compiled_layers() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32)).train()
    expected = gradients(policy, "padded")
    for layer in decoder_layers(policy):
        layer.compile(backend="aot_eager")
    gradients(policy, "padded")
    tile_mlps(policy, 7)
    for one in policy.modules():
        if isinstance(one.forward, TiledForward):
            one.forward.own = torch.compile(type(one).forward.__get__(one), backend="aot_eager")
    checkpoint_layers(policy, 2, offloaded=1)
    calls = mlp_calls(policy)
    assert oracle.relative_error(gradients(policy, "padded"), expected) <= 1e-5
    assert max(calls) == 7


def test_tiles_can_be_changed_for_a_while() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32)).eval()
    tile_mlps(policy, 7)
    calls = mlp_calls(policy)
    row = build_microbatch(examples(ROW), "shared")
    for tokens in (None, 3):
        with tiles_of(policy, tokens), torch.no_grad():
            policy(row)
    with torch.no_grad():
        policy(row)
    assert calls[0] == row.passes[0].input_ids.numel()
    assert calls[1] == 3
    assert calls[-1] in range(1, 8)
    assert max(calls[-3:]) == 7


def test_a_layer_without_an_mlp_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no module that is its MLP"):
        tile_mlps(Policy(tiny_family("opt")), 16)


def test_an_mlp_with_other_arguments_is_refused() -> None:
    policy = Policy(tiny_family("bloom"))
    tile_mlps(policy, 16)
    with pytest.raises(ModelError, match="takes more than hidden states"):
        check_tiles(policy, "padded")


@pytest.mark.parametrize(
    ("family", "tiles"), [("llama", True), ("llama4_text", True), ("zaya", False), ("rwkv", False), ("opt", False)]
)
def test_which_models_can_compute_in_tiles(family: str, tiles: bool) -> None:
    policy = Policy(tiny_family(family)).train()
    assert can_tile(policy) == tiles
    if tiles:
        expected = gradients(policy)
        tile_mlps(policy, 16)
        check_tiles(policy, "shared")
        assert oracle.relative_error(gradients(policy), expected) <= 1e-5


def test_an_mlp_that_sees_other_tokens_is_refused() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32))
    mlp: nn.Module = decoder_layers(policy)[0].mlp  # type: ignore[assignment]
    own = mlp.forward
    tile_mlps(policy, 16)
    check_tiles(policy, "shared")
    assert isinstance(mlp.forward, TiledForward)
    mlp.forward.own = lambda x: own(x + x.mean(dim=1, keepdim=True))
    with pytest.raises(ModelError, match="cannot compute its MLPs in tiles"):
        check_tiles(policy, "shared")
