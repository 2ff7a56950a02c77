"""Resolves a config's layout with pure rules that `train` and `isopref plan` share.

A run knows its model and its GPU; a plan knows the model's shape and the card's name. Both pass sizes in bytes, and
nothing here touches a device.
"""

from isopref.config.schema import Config, OptimConfig
from isopref.data.schedule import num_batches
from isopref.models.parallel import GradSync, Parallel

STATE_SHARE = 0.4  # of a rank's memory: above this, weights, gradients and optimizer are sharded
BYTES_8BIT = 1 + 4 / 256  # one byte, and a float32 scale per block
GRADIENT_SHARE = 0.1  # of a rank's memory: above this, FSDP reduces gradients after every microbatch
WHOLE_SHARE = 0.8  # of a device's memory: above this, a model is sharded from host memory


def all_steps(optim: OptimConfig, pairs: int) -> int:
    """Steps in all epochs."""
    return optim.epochs * num_batches(pairs, optim.batch_size)


def num_steps(optim: OptimConfig, pairs: int) -> int:
    """Steps in a run, limited by optim.max_steps."""
    every = all_steps(optim, pairs)
    return min(every, optim.max_steps or every)


def num_references(config: Config) -> int:
    """Models in memory in addition to the trained one: a moving reference."""
    return int(config.objective.reference_moves is not None)


def training_bytes(config: Config, *, trained: float, whole: float) -> float:
    """Bytes of weights, gradients and two averages. `trained` and `whole` are the bytes of trained and all weights."""
    return 3 * trained + (1 + num_references(config)) * whole


def parallel(config: Config, state: float, room: float, *, ranks: int) -> Parallel:
    """layout.parallel, or what `auto` resolves to. `state`: from `training_bytes`; `room`: bytes per rank."""
    if config.layout.parallel != "auto":
        return config.layout.parallel
    if config.only_fsdp_for is not None:
        return "fsdp"
    if ranks == 1:
        return "single"
    return "ddp" if state < STATE_SHARE * room else "fsdp"


def can_compile(config: Config, *, on_cuda: bool, balanced: bool, wrapped: bool, unfolded: bool = False) -> bool:
    """Whether layers compile once for all rows. Only the CUDA kernel takes a full row; others recompile for each row.

    `balanced`: the loss needs router decisions, which compiled layers do not expose. `wrapped`: an adapter is on fused
    experts or routers; with one on a router, a layer would recompile in every pass. `unfolded`: recurrent layers unfold
    a row into its sequences.
    """
    half = config.model.pass_dtype == "bfloat16"
    one_code = not balanced and not wrapped and not unfolded
    return on_cuda and half and config.layout.rows in ("shared", "packed") and one_code


def compiles(config: Config, *, can: bool, has_layers: bool) -> bool:
    """layout.compile, or what null resolves to. `can`: from `can_compile`; `has_layers`: the model names its layers.

    Layers that ranks compute together have never been compiled on GPUs, so null does not compile them.
    """
    if config.layout.compile is not None:
        return config.layout.compile
    return can and has_layers and config.layout.ranks_together == 1


def may_tile(config: Config) -> bool:
    """Whether layout.mlp_tile_tokens: auto may choose tiles: only if setting them explicitly would be accepted."""
    alone = config.layout.tensor_parallel == 1 and not config.objective.balance_weight
    return config.layout.mlp_tile_tokens == "auto" and alone


def kept_whole(config: Config, *, trained: float, whole: float) -> float:
    """Bytes that layout.grad_sync: last keeps on every sharded rank: gradients, or frozen weights under an adapter."""
    return trained if config.model.adapter is None else whole


def grad_sync(config: Config, kept: float, room: float, *, sharded: bool) -> GradSync:
    """layout.grad_sync, or what `auto` resolves to. `last` costs memory only on sharded ranks: see `kept_whole`."""
    asked = config.layout.grad_sync
    if asked != "auto":
        return asked
    return "last" if not sharded or (kept < GRADIENT_SHARE * room and not config.layout.offload) else "every"


def from_host(weights: float, room: float, *, sharded: bool) -> bool:
    """Whether a model of `weights` bytes is sharded from host memory layer by layer, never in full on a device."""
    return sharded and weights > WHOLE_SHARE * room


def attention_share(width: int) -> float:
    """Cost of attending to one token relative to passing one through the linear layers, for the row planner.

    The former takes 4 D FLOPs per layer, the latter about 24 D^2.
    """
    return 1 / (6 * width)


def state_bytes(kind: str, weight: int, *, in_matrices: float = 0.0) -> float:
    """Bytes of optimizer state per trained number of `weight` bytes; `in_matrices`: share in layers' matrices.

    Without a share, this is the maximum for the optimizer.
    """
    if "8bit" in kind:
        return 2 * BYTES_8BIT
    return weight * (2 - in_matrices if kind == "muon" else 2)  # Muon has one average for the layers' matrices
