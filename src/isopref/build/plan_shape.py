"""The shape of the model that a config trains, for `isopref plan`."""

import torch
from transformers import PreTrainedModel

from isopref.build.model import check_base, new_adapter
from isopref.build.run_plan import Hardware
from isopref.config.schema import Config
from isopref.errors import ConfigError
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
