"""What `auto` in the layout chooses where memory decides: pure rules, the same for a run and for its plan."""

from isopref.models.parallel import GradSync, Parallel

STATE_SHARE = 0.4  # of a rank's memory: with more, weights, gradients and optimizer are sharded
BYTES_8BIT = 1 + 4 / 256  # one, and a float32 scale for each block of a number's average
GRADIENT_SHARE = 0.1  # of a rank's memory: with more, FSDP reduces gradients after every microbatch
WHOLE_SHARE = 0.8  # of a device's memory: with more, a model is sharded from the host's memory


def parallel(state: float, room: float, *, only_fsdp: bool, ranks: int) -> Parallel:
    """`state`: bytes of weights, gradients and optimizer; `room`: bytes a rank has."""
    if only_fsdp:
        return "fsdp"
    if ranks == 1:
        return "single"
    return "ddp" if state < STATE_SHARE * room else "fsdp"


def grad_sync(gradient: float, room: float, *, sharded: bool, offload: bool) -> GradSync:
    """Only sharded ranks pay memory for `last`: the whole gradient, `gradient` bytes, on every one."""
    return "last" if not sharded or (gradient < GRADIENT_SHARE * room and not offload) else "every"


def from_host(weights: float, room: float, *, sharded: bool) -> bool:
    """Whether a model of `weights` bytes is sharded layer by layer from the host's memory, never whole on a device."""
    return sharded and weights > WHOLE_SHARE * room


def attention_share(width: int) -> float:
    """Cost of attending to one token over that of passing one through the linear maps, for the planner of rows.

    The one takes 4 D flops of a layer, the other about 24 D^2.
    """
    return 1 / (6 * width)


def state_bytes(kind: str, weight: int, *, in_matrices: float) -> float:
    """Bytes of the optimizer for each trained number of `weight` bytes; `in_matrices`: share in layers' matrices."""
    if "8bit" in kind:
        return 2 * BYTES_8BIT
    return weight * (2 - in_matrices if kind == "muon" else 2)  # Muon has one average for the layers' matrices
