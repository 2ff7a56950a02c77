"""Decides whether recurrent layers follow the tree of a packed row, and tells the user."""

import os

from isopref.build.run import Run
from isopref.errors import ConfigError
from isopref.models.follow import has_kernel
from isopref.models.policy import Policy
from isopref.ops import delta

# The code with which layers follow a row has run only on CPUs. Once tests/gpu/test_states.py and benchmarks/layouts.py
# have run on a GPU, remove this variable and let the layers follow everywhere.
FOLLOW_ON_CUDA = "ISOPREF_FOLLOW_STATES"


def settle_states(run: Run, policy: Policy, *, quiet: bool = False) -> None:
    """Unfold recurrent layers on CUDA unless an environment variable overrides that, and log which kernels they use.

    Called before a policy scores its first row. `quiet`: log nothing, because the user has been told. Raises
    ConfigError if ranks split rows, since unfolded layers do not support that.
    """
    if run.env.device.type != "cuda" or run.config.layout.rows not in ("shared", "packed") or not policy.following:
        return
    first = policy.following[0]
    layer = policy.model.get_submodule(first)
    if os.environ.get(FOLLOW_ON_CUDA) != "1":
        if (size := run.config.layout.context_parallel) > 1:
            raise ConfigError(
                f"layout.context_parallel: {size} needs code for {first} and layers like it that has been tested only "
                f"on CPUs. To try it on this GPU, set {FOLLOW_ON_CUDA}=1 in the environment; or set "
                "layout.context_parallel: 1."
            )
        policy.unfold_all()
        if quiet:
            return
        run.display.say(
            f"note: {first} and layers like it compute a shared prompt once per answer. The code that computes it only "
            f"once has been tested only on CPUs; to try it on this GPU, set {FOLLOW_ON_CUDA}=1 in the environment"
        )
    elif has_kernel(layer) and delta.kernel() is None and not quiet:
        run.display.say(
            f"note: {first} and layers like it run in plain PyTorch, because flash-linear-attention is not installed. "
            "For speed: pip install 'isopref[linear]'"
        )


def say_unfolded(run: Run, policy: Policy, layer: str) -> None:
    """Tell the user that the probe unfolded `layer` and others like it."""
    run.display.say(
        f"warning: isopref's own code for {layer} and layers like it does not score {policy.name} correctly, so these "
        "layers compute a shared prompt once per answer. The result is right, but the run is slower"
    )
