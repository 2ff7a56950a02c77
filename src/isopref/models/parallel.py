"""A policy over many ranks: DDP, FSDP2 or HSDP, with tensor or context parallelism; when gradients are reduced.

All of them average gradients over the ranks that share the weights; normalize.py undoes that for ranks with different
pairs, and ops/exchange.py for ranks that split rows. Ranks of one tensor-parallel or context-parallel group work on the
same pairs, so sums over pairs are sums over the ranks of `data_group`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from isopref.errors import ConfigError
from isopref.models.adapter import is_quantised
from isopref.models.follow import heads_of
from isopref.models.offload import HostCheckpoints
from isopref.models.parts import layer_configs
from isopref.models.policy import Policy
from isopref.models.row import contexts
from isopref.ranks import num_ranks
from isopref.types import ContextGroup

# Layers share their code, which torch compiles for each kind of layer (with attention or a state), with and without
# gradients, for training and evaluation, for one size and for all. By default it stops after 8 versions.
COMPILED_VERSIONS = 64

Parallel = Literal["single", "ddp", "fsdp", "hsdp"]
GradSync = Literal["last", "every"]


def parallelize(
    policy: Policy,
    mode: Parallel,
    *,
    device: torch.device,
    world_size: int = 1,
    compute_dtype: torch.dtype | None = None,
    hsdp_shard: int | None = None,
    offload: bool = False,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> nn.Module:
    """Spread a policy over the ranks of the default process group. Returns the module to call and to optimise.

    FSDP shards the weights layer by layer from where they are: from host memory, no GPU ever holds the full model.
    Narrow weights become float32 once their shards are in place.
    If `compute_dtype` differs from the weights' dtype, these are master weights, and gradients are reduced in their
    dtype.
    `offload` keeps shards, gradients and optimizer state in host memory.
    `tensor_parallel` neighbouring ranks compute every layer together: OLMo-core's models only, under FSDP or HSDP.
    `context_parallel` neighbouring ranks split the tokens of every row: packed rows only. They share in the sharding of
    weights like all ranks.
    """
    if context_parallel > 1:
        if tensor_parallel > 1:
            raise ConfigError(
                "layout.context_parallel cannot be combined with layout.tensor_parallel. Set one of them to 1."
            )
        split_rows(policy, context_parallel, device)
    if mode in ("single", "ddp") or tensor_parallel > 1:
        policy.move_to(device)
    if tensor_parallel > 1:
        check_tensor(policy, mode, tensor_parallel, world_size)
    if mode == "single":
        if world_size > 1:
            raise ConfigError(f'parallelize: "single" on {world_size} ranks would never reduce gradients. Use "ddp".')
        return policy
    if mode == "ddp":
        return DistributedDataParallel(
            policy,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            # Broadcasting a 4-bit weight would quantise it a second time, to different values.
            init_sync=not any(is_quantised(parameter) for parameter in policy.parameters()),
        )
    data_size = world_size // tensor_parallel
    shard = data_size if mode == "fsdp" else check_shard(hsdp_shard, data_size, tensor_parallel=tensor_parallel)
    data = (("shard", shard),) if mode == "fsdp" else (("replicate", data_size // shard), ("shard", shard))
    mesh = _mesh(device.type, data if tensor_parallel == 1 else (*data, ("tensor", tensor_parallel)), dist.group.WORLD)
    if tensor_parallel > 1 and policy.native is not None:
        mesh._flatten()  # so that a norm is one sum over all ranks, bitwise the same on each
        policy.native.transformer.apply_tp(mesh["tensor"])
        policy.together = mesh["tensor"]
        mesh = mesh[tuple(name for name, _ in data)]
    _shard(policy, mesh, device, world_size, compute_dtype, offload)
    return policy


def _shard(
    policy: Policy,
    mesh: DeviceMesh,
    device: torch.device,
    world_size: int,
    compute_dtype: torch.dtype | None,
    offload: bool,
) -> None:
    """Shard each decoder layer, then the rest. FSDP moves sharded weights to the device, but not ignored ones."""
    trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
    whole = {p for p in policy.parameters() if _stays_whole(p, world_size, offload)}
    for parameter in whole:
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32 if policy.narrow else trained.dtype
        ),
        "ignored_params": whole,
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # With a reduce dtype, FSDP would look for gradients of gathered weights, which unused parts do not have.
    unused = [(part, {**options, "mp_policy": MixedPrecisionPolicy()}) for part in _unused_modules(policy)]
    for module, settings in (*unused, *((module, options) for module in (*decoder_layers(policy), policy))):
        if offload and policy.narrow:  # before pinning, or it would be pinned twice
            module.float()
        fully_shard(module, **settings)
    policy.widen()
    register_fsdp_forward_method(policy, "own_logits")


def _unused_modules(policy: Policy) -> list[nn.Module]:
    parts = [attrgetter(name)(policy.model) for name in policy.unused]
    return [part for part in parts if isinstance(part, nn.Module)]


def _stays_whole(parameter: nn.Parameter, world_size: int, offload: bool) -> bool:
    """Whether FSDP leaves frozen weights unsharded: 4-bit weights are small, and one rank has nothing to shard with."""
    return not parameter.requires_grad and (is_quantised(parameter) or (world_size == 1 and not offload))


@cache
def _mesh(device_type: str, named: tuple[tuple[str, int], ...], _world: dist.ProcessGroup | None) -> DeviceMesh:
    """One mesh per shape and default group, because each mesh creates process groups, whose threads never end."""
    names, sizes = zip(*named, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def check_tensor(policy: Policy, mode: Parallel, tensor_parallel: int, world_size: int) -> None:
    """Raise ConfigError if this many ranks cannot compute a layer together."""
    what = f"layout.tensor_parallel: {tensor_parallel}"
    if policy.native is None:
        raise ConfigError(f"{what} is for OLMo-core's own modules. Set model.native: true, or tensor_parallel: 1.")
    if mode not in ("fsdp", "hsdp"):
        raise ConfigError(f"{what} needs layout.parallel: fsdp or hsdp, not {mode}.")
    if world_size % tensor_parallel:
        raise ConfigError(f"{what} does not divide the number of processes, {world_size}. Change one of the two.")
    config = policy.model.config
    heads = math.gcd(config.num_attention_heads, config.num_key_value_heads)
    if heads % tensor_parallel:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(f"{what} does not divide the heads and key heads of the model. Use one of {fitting}.")


def split_rows(policy: Policy, size: int, device: torch.device) -> None:
    """Let groups of `size` neighbouring ranks split the tokens of every row. Raises ConfigError if they cannot."""
    ranks = num_ranks()
    check_context(policy, size, ranks)
    mesh = _mesh(device.type, (("data", ranks // size), ("context", size)), dist.group.WORLD)["context"]
    policy.together = mesh
    policy.context = ContextGroup(mesh.get_group().group_name, mesh.get_local_rank(), size)


def check_context(policy: Policy, size: int, world_size: int) -> None:
    """Raise ConfigError if `size` ranks cannot split a row of this model."""
    what = f"layout.context_parallel: {size}"
    if world_size % size:
        raise ConfigError(f"{what} does not divide the number of processes, {world_size}. Change one of the two.")
    if (reason := why_not_split(policy)) is not None:
        raise ConfigError(f"{what}, but {reason}. Set layout.context_parallel: 1.")
    heads = divisible_heads(policy)
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(f"{what} does not divide the heads of the model, {heads}. Use one of {fitting}.")


def why_not_split(policy: Policy) -> str | None:
    """Why no ranks can split a row of this model; None if they can."""
    if not policy.unfolded:
        return None
    return f"{policy.name} has layers whose sequences cannot be split ({policy.unfolded[0]})"


def divisible_heads(policy: Policy) -> int:
    """The largest number of ranks among which each layer's heads can be divided. Its divisors work, too.

    Heads that serve several others (of keys, or of Mamba2's B and C) do not count, because they can be repeated.
    """
    configs = layer_configs(policy.model.config.get_text_config())
    attending = (getattr(one, "num_attention_heads", None) or 0 for one in configs)
    return math.gcd(*attending, *(heads_of(policy.model.get_submodule(name)) for name in policy.following)) or 1


def data_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that have different pairs: one of each group that works on the same pairs. None: all ranks."""
    mesh = _together(model)
    if mesh is None:
        return None
    whole = mesh._get_root_mesh()
    assert whole.mesh_dim_names is not None
    return whole[whole.mesh_dim_names[:-1]]._flatten().get_group()


def speaks(model: nn.Module) -> bool:
    """Whether this rank reports for the ranks that work on the same pairs."""
    mesh = _together(model)
    return mesh is None or mesh.get_local_rank() == 0


def _together(model: nn.Module) -> DeviceMesh | None:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(inner, "together", None)


def check_shard(hsdp_shard: int | None, world_size: int, *, tensor_parallel: int = 1) -> int:
    """Ranks per HSDP shard group. Raises ConfigError if they do not divide the number of data-parallel ranks."""
    if hsdp_shard is None or hsdp_shard < 1 or world_size % hsdp_shard:
        fitting = ", ".join(str(n) for n in range(2, world_size + 1) if world_size % n == 0)
        what = "processes" if tensor_parallel == 1 else f"groups of {tensor_parallel} processes (tensor_parallel)"
        raise ConfigError(
            f"layout.hsdp_shard is {hsdp_shard}, which does not divide the number of {what}, {world_size}. "
            + (f"Use one of {fitting}." if fitting else "Start more (--nproc), or set layout.parallel: auto.")
        )
    return hsdp_shard


def has_layers(policy: Policy) -> bool:
    """Whether the model declares which blocks are its layers and can recompute them."""
    return bool(policy.model._no_split_modules) and policy.model.supports_gradient_checkpointing


def decoder_layers(policy: Policy, way_out: str = "Set layout.parallel: ddp.") -> list[nn.Module]:
    """The outermost blocks that transformers says must not be split: the units of sharding and compilation.

    Blocks that text does not use are excluded.
    """
    names = set(policy.model._no_split_modules or ())
    # FSDP gives a sharded block a new class derived from the block's.
    whole = [module for module in policy.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    inner = {id(part) for module in whole for part in module.modules() if part is not module}
    inner |= {id(part) for module in _unused_modules(policy) for part in module.modules()}
    layers = [module for module in whole if id(module) not in inner]
    if not layers:
        raise ConfigError(
            f"{policy.name} does not say which of its blocks are its layers (_no_split_modules). " + way_out
        )
    return layers


def compile_layers(policy: Policy) -> None:
    """Compile each decoder layer separately. Sizes that differ between two rows become symbolic; one graph serves all.

    (With dynamic=True, everything is symbolic from the start, including the head width under FSDP: slow kernels.)
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VERSIONS)
    for layer in decoder_layers(policy, "Set layout.compile: false."):
        layer.compile()


def can_offload(policy: Policy) -> bool:
    """Whether layers recompute through a function they are given, which can keep their inputs elsewhere."""
    if policy.native is not None or not has_layers(policy):
        return policy.native is not None
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder_layers(policy))


def checkpoint_layers(policy: Policy, count: int, *, offloaded: int = 0) -> None:
    """Make the first `count` decoder layers keep only their inputs and recompute the rest in the backward pass.

    The first `offloaded` of them keep their inputs in host memory.
    """
    if not count and not policy.model.is_gradient_checkpointing:
        return
    layers = decoder_layers(policy, "Set layout.checkpointing: none.")
    if not policy.model.supports_gradient_checkpointing:
        raise ConfigError(f"{policy.name} cannot recompute its layers. Set layout.checkpointing: none.")
    if offloaded and not can_offload(policy):
        raise ConfigError(
            f"{policy.name} recomputes its layers with code of its own, so their inputs cannot be offloaded. "
            "Set layout.offload_activations: none."
        )
    policy.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    host = HostCheckpoints()
    for number, layer in enumerate(layers):
        # The attributes that transformers' gradient_checkpointing_enable sets for all layers.
        layer.gradient_checkpointing = number < count  # type: ignore[assignment]
        how = host.recompute if number < offloaded else host.recompute_on_device
        layer._gradient_checkpointing_func = how  # type: ignore[assignment]


@contextmanager
def gradient_sync(model: nn.Module, mode: GradSync, *, last: bool) -> Iterator[None]:
    """Wraps one microbatch's forward and backward: reduce gradients after it, or leave that to a later microbatch.

    `last` keeps the full gradient, and FSDP's gathered weights, on every rank until the step's last microbatch; `every`
    gathers and reduces for each one, which costs communication but saves memory under FSDP. Across HSDP replicas, only
    the last microbatch ever reduces.
    """
    now = last or mode == "every"
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_forward(mode == "every")
        model.set_reshard_after_backward(now)
    yield


def reshard(model: nn.Module) -> None:
    """Free what FSDP gathered for a forward pass that has no backward pass to free it.

    Until then `model.parameters()` are the gathered copies, and an optimizer built on them would train nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unwrap(model: nn.Module) -> Policy:
    """The policy inside a DDP wrapper, or the policy itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, Policy)
    return inner


def device_of(model: nn.Module) -> torch.device:
    """The device a model computes on, which differs from its weights' device if they are offloaded."""
    first = next(model.parameters())
    if isinstance(first, DTensor) and first.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return first.device
