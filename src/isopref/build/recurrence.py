"""Reports what computes the recurrent layers of a model, and refuses what would fail in the first backward pass."""

from isopref.build.run import Run
from isopref.errors import ConfigError
from isopref.models.follow import kernel_of
from isopref.models.policy import Policy
from isopref.ops import delta


def check_recurrence(run: Run, policy: Policy, followed: tuple[str, ...], *, trained: bool) -> None:
    """Report recurrent layers that the probe has unfolded or that run without a kernel on CUDA, and why.

    `followed`: the layers that followed rows before the probe. Raises ConfigError if a `trained` model would run into a
    kernel that refuses this card: transformers calls it for layers in padded rows and for unfolded ones.
    """
    if not followed:
        return
    first = followed[0]
    if not policy.following:
        run.display.say(
            f"warning: isopref's own code for {first} and layers like it does not score {policy.name} correctly, so "
            "these layers compute a shared prompt once per answer. The result is right, but the run is slower"
        )
    kernel = kernel_of(policy.model.get_submodule(first)) if run.env.device.type == "cuda" else None
    if kernel is None or kernel.run is not None:
        return
    if policy.following and run.config.layout.rows != "padded":
        run.display.say(
            f"note: {first} and layers like it run in plain PyTorch, because {kernel.fault}. For speed: "
            f"{kernel.way_out}"
        )
    elif trained and kernel.refuses and kernel is delta.kernel():  # transformers' Mamba2 does not use the package
        shared = "set layout.rows: shared, " if policy.following else ""
        raise ConfigError(
            f"{first} and layers like it run in transformers' own code here, but {kernel.fault}. Try: {shared}"
            f"{kernel.way_out}, or pip uninstall flash-linear-attention."
        )
