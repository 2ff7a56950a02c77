"""Compiled layers: which are, and one compilation for all layers and rows.

Traced on the CPU with a stand-in for the CUDA kernel.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isopref.batch.rows import build_microbatch
from isopref.build.model import _compiles
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import ConfigError
from isopref.models.adapter import quantize_nf4
from isopref.models.conversion import from_hf
from isopref.models.parallel import checkpoint_layers, compile_layers, decoder_layers, parallelize, split_rows
from isopref.models.policy import Policy
from isopref.models.probe import check_layout, own_logps
from isopref.ops import attention
from isopref.testing import oracle
from isopref.testing.models import examples, random_pairs, tiny_model, tree_examples, with_adapter
from isopref.types import Segments

# Layers that are compiled in parts, and how many graphs that gives at most: StableLM's stop for their attention, which
# asks for its segments, and others for the tables of their convolution and for their state.
IN_PARTS = {"stablelm": 12, "lfm2": 20, "bamba": 24}


def opaque(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *_: object) -> Tensor:
    """Any function of what the kernel takes whose graph does not depend on how many segments there are."""
    seen = k.mean() + v.mean() + segments.query_offsets.sum() + segments.key_offsets.sum() + segments.longest
    return q.transpose(0, 1) * torch.tanh(seen * 1e-3)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("mode", "splits"), [("single", False), ("fsdp", False), ("fsdp", True)])
@pytest.mark.parametrize(
    ("architecture", "quantised"),
    [("llama", False), ("llama", True), *((name, False) for name in ("gemma3", "gpt2", "stablelm", "lfm2", "bamba"))],
)
def test_after_the_probe_and_a_row_nothing_compiles(
    architecture: str, quantised: bool, mode: Any, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `splits`, rows are exchanged as by ranks that split them, in a group of this rank alone."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    made = tiny_model(architecture)
    if quantised:
        quantize_nf4(made, torch.device("cpu"), head=made.get_output_embeddings())
        with_adapter(made, "lora")
    policy = Policy(made)
    own = own_logps(policy)
    for layer in decoder_layers(policy):
        layer.compile(backend=backend, fullgraph=mode == "single" and architecture not in IN_PARTS)
    model: nn.Module = parallelize(policy, mode, device=torch.device("cpu"))
    if splits:
        split_rows(policy, 1, torch.device("cpu"))
    monkeypatch.setattr(attention, "_portable", opaque)
    monkeypatch.setattr("isopref.models.probe.TOLERANCE", {torch.float32: 1e9})  # the stand-in does not attend
    check_layout(model, "shared", own=own)
    for seed, pairs in enumerate((3, 5, 4, 7, 2, 6)):
        model(build_microbatch(examples(random_pairs(pairs, seed=seed, longest=20)), "shared")).logp.sum().backward()
        if seed == 0:
            so_far = len(graphs)
    assert len(graphs) == so_far <= IN_PARTS.get(architecture, 6)
    widths = [node for node in graphs[-1].graph.nodes if node.op == "placeholder" and "head_dim" in node.name]
    assert not widths


@pytest.fixture
def strict() -> Iterator[None]:
    """torch's default limit, and an error where it is reached."""
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.usefixtures("strict")
def test_torch_does_not_give_up_on_layers_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bamba's layers with attention and with a state share their code; each mode needs versions of both."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_portable", opaque)
    policy = Policy(tiny_model("bamba"))
    compile_layers(policy)
    for layer in decoder_layers(policy):
        layer.compile(backend="eager")
    batches = [examples(random_pairs(pairs, seed=pairs, longest=20)) for pairs in (3, 4)]
    batches += [tree_examples(seed=seed) for seed in (0, 1)]
    for recomputing in (0, 1):
        checkpoint_layers(policy, recomputing)
        for training in (True, False):
            policy.train(training)
            for batch in batches:
                policy(build_microbatch(batch, "shared")).logp.sum().backward()
                with torch.no_grad():
                    policy(build_microbatch(batch, "shared"))


@pytest.mark.parametrize(
    ("native", "together", "asked", "device", "dtype", "expected"),
    [
        (False, {}, None, "cuda", "bfloat16", True),
        (False, {}, None, "cpu", "bfloat16", False),
        (False, {}, None, "cuda", "float32", False),
        (False, {}, False, "cuda", "bfloat16", False),
        (True, {}, None, "cuda", "bfloat16", True),
        (True, {}, False, "cuda", "bfloat16", False),
        (True, {"tensor_parallel": 2}, None, "cuda", "bfloat16", False),
        (True, {"tensor_parallel": 2}, True, "cuda", "bfloat16", True),
        (False, {"context_parallel": 2}, None, "cuda", "bfloat16", False),
        (False, {"context_parallel": 2}, True, "cuda", "bfloat16", True),
    ],
)
def test_what_null_chooses(
    native: bool, together: dict[str, int], asked: bool | None, device: str, dtype: str, expected: bool
) -> None:
    layout: dict[str, Any] = {"compile": asked, **together}
    if together:
        layout["parallel"] = "fsdp"
    config = Config.model_validate(
        {"model": {"path": "m", "dtype": dtype, "native": native}, "data": {"train": "d"}, "layout": layout}
    )
    run = Run(config, Path("run"), Environment(0, 1, torch.device(device)), Display(quiet=True))
    model = tiny_model("llama")
    assert _compiles(run, Policy(from_hf(model) if native else model)) is expected


def test_experts_under_an_adapter_are_not_compiled() -> None:
    """peft puts them into a class of their own for every pass, which is compiled each time."""
    model = {"path": "m", "dtype": "bfloat16", "adapter": {}}
    policies = [
        Policy(with_adapter(tiny_model("qwen3_moe"), "lora", targets=targets))
        for targets in (None, ["q_proj", "v_proj"])
    ]
    for asked in (None, True):
        config = Config.model_validate({"model": model, "data": {"train": "d"}, "layout": {"compile": asked}})
        run = Run(config, Path("run"), Environment(0, 1, torch.device("cuda")), Display(quiet=True))
        assert _compiles(run, policies[1]) is True
        if asked is None:
            assert _compiles(run, policies[0]) is False
        else:
            with pytest.raises(ConfigError, match=r"layout\.compile: true with an adapter of fused experts"):
                _compiles(run, policies[0])


@pytest.mark.parametrize("architecture", [pytest.param("olmo_hybrid", marks=pytest.mark.soak), "lfm2", "bamba"])
def test_following_layers_compile(architecture: str) -> None:
    """Scores and gradients of compiled layers over rows of other trees, also where they are computed again."""
    config = Config.model_validate({"model": {"path": "m", "dtype": "bfloat16"}, "data": {"train": "d"}})
    run = Run(config, Path("run"), Environment(0, 1, torch.device("cuda")), Display(quiet=True))
    expected, policy = (Policy(tiny_model(architecture)).train() for _ in range(2))
    assert _compiles(run, policy)
    for layer in decoder_layers(policy):
        layer.compile(backend="aot_eager")
    for count in (0, 2):
        checkpoint_layers(policy, count)
        for seed in (0, 1):
            logps = []
            for one in (expected, policy):
                one.zero_grad()
                logps.append(one(build_microbatch(tree_examples(seed=seed), "shared")).logp)
                logps[-1].sum().backward()
            torch.testing.assert_close(*logps)
            found, wanted = (
                {name: p.grad for name, p in one.named_parameters() if p.grad is not None} for one in (policy, expected)
            )
            assert oracle.relative_error(found, wanted) <= 1e-6


def test_unfolded_layers_are_not_compiled() -> None:
    """They take rows apart into sequences, as many and as long as each row has."""
    policy = Policy(tiny_model("mamba"))
    model = {"path": "m", "dtype": "bfloat16"}
    for asked in (None, True):
        config = Config.model_validate({"model": model, "data": {"train": "d"}, "layout": {"compile": asked}})
        run = Run(config, Path("run"), Environment(0, 1, torch.device("cuda")), Display(quiet=True))
        if asked is None:
            assert _compiles(run, policy) is False
        else:
            with pytest.raises(ConfigError, match=r"layout\.compile: true .*layers\.0\.mixer"):
                _compiles(run, policy)
