"""How many GPUs may split a row in a plan."""

from isopref.config.schema import Config
from isopref.errors import ConfigError
from isopref.models.shape import ModelShape


def check_context(shape: ModelShape, size: int, gpus: int) -> None:
    """Raise ConfigError if this many of so many GPUs cannot split the rows of a model."""
    what = f"layout.context_parallel: {size}"
    if gpus % size:
        raise ConfigError(f"{what} does not divide {gpus} GPUs. Change --gpus or layout.context_parallel.")
    if shape.row_parts % size:
        fitting = ", ".join(str(n) for n in range(1, shape.row_parts + 1) if shape.row_parts % n == 0)
        raise ConfigError(f"{what} does not divide the heads of the model, or it has none to divide. Use {fitting}.")


def contexts(config: Config, shape: ModelShape, gpus: int) -> list[int]:
    """Numbers of ranks that could split a row on so many GPUs, beyond what the config asks for."""
    layout = config.layout
    if layout.rows not in ("shared", "packed") or layout.tensor_parallel > 1:
        return []
    sizes = (2**n for n in range(1, gpus.bit_length()))
    return [n for n in sizes if n > layout.context_parallel and gpus % n == 0 and shape.row_parts % n == 0]
