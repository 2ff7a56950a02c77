"""Which kernels the recurrent layers of a model use on this card: told to the user, or refused."""

from isopref.build.run import Run
from isopref.errors import ConfigError
from isopref.models.follow import kernel_of
from isopref.models.policy import Policy
from isopref.ops import delta


def check_kernels(run: Run, policy: Policy) -> None:
    """Tell the user if recurrent layers run without a kernel on CUDA, and why.

    Raises ConfigError if a padded batch would run into a kernel that refuses this card.
    """
    if run.env.device.type != "cuda" or not policy.following:
        return
    first = policy.following[0]
    kernel = kernel_of(policy.model.get_submodule(first))
    if kernel is None or kernel.run is not None:
        return
    if run.config.layout.rows != "padded":
        run.display.say(
            f"note: {first} and layers like it run in plain PyTorch, because {kernel.fault}. For speed: "
            f"{kernel.way_out}"
        )
    elif kernel.refuses and kernel is delta.kernel():  # transformers' own Mamba2 does not use the package
        raise ConfigError(
            f"layout.rows: padded runs transformers' own {first}, but {kernel.fault}. Set layout.rows: shared; or "
            f"{kernel.way_out}; or pip uninstall flash-linear-attention."
        )


def say_unfolded(run: Run, policy: Policy, layer: str) -> None:
    """Tell the user that the probe unfolded `layer` and others like it."""
    run.display.say(
        f"warning: isopref's own code for {layer} and layers like it does not score {policy.name} correctly, so these "
        "layers compute a shared prompt once per answer. The result is right, but the run is slower"
    )
