"""What a plan starts from: the shape of the model, the lengths of its pairs, and how rows can be split over ranks."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from isopref.build.model import check_base, new_adapter
from isopref.build.run_plan import Hardware
from isopref.config.schema import Config
from isopref.errors import ConfigError, DataError
from isopref.examples import Lengths
from isopref.models import adapter, conversion, hf, reward
from isopref.models.shape import ModelShape, shape_of


def model_shape(config: Config, hardware: Hardware) -> ModelShape:
    """The shape of the model that a config trains, from the model's config. Raises ConfigError for what has no plan."""
    model = config.model
    if "float64" in (model.dtype, model.compute_dtype):
        raise ConfigError("model.dtype: float64 is for checks on a CPU and cannot be planned. Use float32.")
    if model.is_float8 and hardware.card.flops_float8 is None:
        raise ConfigError(
            f"model.compute_dtype: float8 needs a Hopper GPU or newer, not --card {hardware.card_name}. Use bfloat16."
        )
    if config.layout.tensor_parallel > 1:
        raise ConfigError(
            f"layout.tensor_parallel: {config.layout.tensor_parallel} cannot be planned: its communication has "
            "not been measured. Plan with layout.tensor_parallel=1."
        )
    if hf.is_olmo_core(model.path):
        empty = conversion.empty_checkpoint(model.path)
    elif config.objective.trains_reward_model:
        empty = reward.load_empty(model.path, trust_remote_code=model.trust_remote_code)
    else:
        empty = hf.load_empty(model.path, trust_remote_code=model.trust_remote_code)
    if model.native:
        conversion.transformer_config(empty)  # raises if there is none
    adapt(config, empty)
    return shape_of(empty)


def adapt(config: Config, empty: PreTrainedModel) -> None:
    """Add the config's adapter to a model without weights."""
    asked, dtype = config.model.adapter, getattr(torch, config.model.dtype)
    if asked is None:
        return
    check_base(config.model.path)
    if asked.path is None:
        adapter.add_adapter(empty, new_adapter(asked), dtype=dtype, seed=config.optim.seed)
    else:
        adapter.load_adapter(empty, asked.path, dtype=dtype, setting="model.adapter.path")


def read_lengths(path: Path) -> Lengths:
    """Lengths from a .npy file: one row per pair with the tokens of prompt, chosen and rejected."""
    try:
        lengths = np.load(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--lengths {path}: cannot be read ({error}). Pass a .npy file with three columns.") from error
    right = lengths.ndim == 2 and lengths.shape[1:] == (3,) and len(lengths) > 0
    if not right or not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 1:
        raise DataError(
            f"--lengths {path}: expected positive whole numbers in three columns (tokens of prompt, chosen and "
            f"rejected), found {lengths.dtype} of shape {lengths.shape}."
        )
    return Lengths.of_pairs(lengths)


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
    if layout.rows not in ("shared", "packed"):
        return []
    sizes = (2**n for n in range(1, gpus.bit_length()))
    return [n for n in sizes if n > layout.context_parallel and gpus % n == 0 and shape.row_parts % n == 0]
