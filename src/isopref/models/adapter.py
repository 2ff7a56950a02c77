"""Adapters (LoRA, DoRA, rsLoRA) on a frozen model, by peft; and frozen layers in four bits (QLoRA), by torchao.

A model with an adapter is still the same transformers model: the target layers are wrapped, and only what the wrappers
add is trained. The output head is never a target, because the policy applies it itself; the head of a reward model is
trained in full.
"""

import copy
import logging
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from isopref import optional
from isopref.errors import ModelError
from isopref.models.head import REWARD_HEADS, head_of, reward_head_name
from isopref.models.low_rank import compute_beside, wrapped_experts
from isopref.models.unused import is_inside, without_gradient

Kind = Literal["lora", "dora", "rslora"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"  # what peft calls an adapter that has no name
PREFIX = "base_model.model."  # of tensor names in an adapter's folder
# The fields of an adapter's config that may differ from peft's defaults: which layers have updates, their rank and
# scale. Other fields could change tokens, train more of the model, or change the base's weights, as PiSSA does.
COMMON = frozenset(
    {
        "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "lora_dropout",
        "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
        "fan_in_fan_out", "ensure_weight_tying",
        "base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version",
    }
)  # fmt: skip
# The initialisations that do not change the base's weights.
PLAIN_STARTS = [("init_lora_weights", how) for how in (False, "gaussian", "orthogonal")]
NF4_BLOCK, NF4_SCALES = 64, 256  # weights per scale, and scales per scale of scales, as in the QLoRA paper


@dataclass(frozen=True)
class NewAdapter:
    """A new adapter. `targets`: the ends of layer names; None: every linear layer but the head.

    Parts without a gradient (unused.py) are never targets.
    """

    kind: Kind
    rank: int
    alpha: float
    targets: Sequence[str] | None = None


class FourBitLinear(nn.Linear):
    """A linear layer with frozen weights in four bits, unpacked in the forward pass and again in the backward pass.

    torchao's product does that when it runs eagerly. A compiler sees both passes at once: it would unpack the weights
    only once and keep them in memory in between. Unpacking under a checkpoint makes it recompute them.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(hidden)
        weight = checkpoint(Tensor.to, self.weight, hidden.dtype, use_reentrant=False)
        return nn.functional.linear(hidden, weight, self.bias)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in peft's format."""
    return (folder.expanduser() / CONFIG_FILE).exists()


def has_adapter(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "peft_config", None))


def add_adapter(model: PreTrainedModel, new: NewAdapter, *, dtype: torch.dtype, seed: int) -> None:
    """Freeze the model and wrap its layers. The same seed gives the same weights on every rank and device."""
    peft = _peft("model.adapter is set")
    _check_rank(model, new.rank)
    config = peft.LoraConfig(
        r=new.rank,
        lora_alpha=new.alpha,
        target_modules="all-linear" if new.targets is None else list(new.targets),
        exclude_modules="|".join(rf"{re.escape(part)}(\..*)?" for part in without_gradient(model)) or None,
        use_dora=new.kind == "dora",
        use_rslora=new.kind == "rslora",
        task_type="CAUSAL_LM" if reward_head_name(model) is None else "SEQ_CLS",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(seed)
        _inject(peft, model, config, dtype)
    _train_reward_head(model, dtype)
    names = [f".{name}" for name, _ in model.named_modules()]
    final: Any = model.peft_config[NAME]
    for target in final.target_modules:  # peft lists targets in fused experts elsewhere
        if not any(name.endswith(f".{target}") for name in names):
            raise ModelError(
                f"model.adapter.targets: no layer of {type(model).__name__} has a name that ends with {target}. "
                "Correct or remove the target, or use auto."
            )


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Compute without the model's adapter while the context is open."""
    layer = _wrapper(_peft("model.adapter is set"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapted: list[Any] = [module for module in model.modules() if isinstance(module, layer)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
        for parameter in trained:
            parameter.requires_grad_(True)


def plain_targets(model: PreTrainedModel) -> list[str]:
    """Two of the adapter's targets in attention, or anywhere, that are ordinary linear layers."""
    wrapper = _wrapper(_peft("model.adapter is set"))
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, wrapper)]
    plain = [name for name, module in wrapped if type(module.get_base_layer()) is nn.Linear]
    names = [name for name in plain if "attn" in name] or plain or [name for name, _ in wrapped]
    return sorted({name.rpartition(".")[2] for name in names}, reverse=True)[:2]


def has_wrapped_parameters(model: PreTrainedModel) -> bool:
    """Whether an adapter is on weights that belong to no layer, such as those of fused experts and of routers.

    In every pass, peft creates a new class for a router, which torch.compile would have to compile again.
    """
    return has_adapter(model) and any(isinstance(module, _param_wrapper()) for module in model.modules())


def summed_parameters(model: PreTrainedModel) -> int:
    """The number of weights with an adapter that belong to no layer and are not computed beside it (low_rank.py).

    Routers are such weights. In every pass, peft adds the update to all of them and keeps the sum for the backward
    pass.
    """
    if not has_adapter(model):
        return 0
    wrapper = _param_wrapper()
    beside = {id(one) for nested in wrapped_experts(model, wrapper) if "forward" in vars(nested[0]) for one in nested}
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, wrapper)]
    return sum(one.get_param().numel() for one in wrappers if id(one) not in beside)


def is_quantised(parameter: nn.Parameter) -> bool:
    return type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor)


def stored_bytes(parameter: nn.Parameter) -> int:
    """Memory of a parameter. A four-bit tensor reports the dtype of unpacked weights, so its parts are counted."""
    if not is_quantised(parameter):
        return parameter.numel() * parameter.element_size()
    parts, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(int(getattr(parameter, part).nbytes) for part in parts)


def load_adapter(model: PreTrainedModel, path: str, *, dtype: torch.dtype, setting: str) -> None:
    """Freeze the model and wrap its layers with an adapter from a folder, to train it further. Raises ModelError."""
    peft = _peft(f"{setting} is the adapter {path}")
    config = _read_config(peft, path, setting)
    if config.use_dora and any(is_quantised(weight) for weight in model.parameters()):
        raise ModelError(
            f"{setting}: {path} is a DoRA adapter, which needs unquantised weights. Remove model.adapter.quantize."
        )
    config.inference_mode, config.modules_to_save = False, None
    _inject(peft, model, config, dtype)
    heads = _train_reward_head(model, dtype)
    file = Path(path).expanduser() / WEIGHTS_FILE
    try:
        state = load_file(file)
    except Exception as error:
        raise ModelError(f"{setting}: cannot read {file} ({error}). Check the folder.") from error
    names = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    parts = without_gradient(model)
    if idle := sorted(name for name in names if is_inside(name, parts)):
        raise ModelError(
            f"{setting}: the adapter {path} has {len(idle)} tensors in parts of the model that have no gradient, such "
            f"as {idle[0]}: they could not be trained. Merge it into its base model first: isopref merge {path} FOLDER."
        )
    expected = {*peft.get_peft_model_state_dict(model), *heads}
    _refuse_names(path, names.keys() ^ expected, setting)
    with _fitting(path, setting):
        for name, head in heads.items():
            head.data.copy_(names.pop(name))
        peft.set_peft_model_state_dict(model, names)


def _train_reward_head(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Train the head of a reward model in full, beside the adapter. Returns its parameters by name.

    peft lists such layers in `modules_to_save`. The head is not wrapped: peft's wrapper would hold it twice.
    """
    name = reward_head_name(model)
    if name is None:
        return {}
    config: Any = model.peft_config[NAME]
    config.modules_to_save = [name]  # for peft, when it loads the exported folder
    head = getattr(model, name).to(dtype).requires_grad_(True)
    return {f"{name}.{part}": parameter for part, parameter in head.named_parameters()}


def is_of_reward_model(path: str, *, setting: str) -> bool:
    """Whether an adapter belongs to a model for sequence classification. Raises ModelError."""
    config = _read_config(_peft(f"{setting} is the adapter {path}"), path, setting)
    return bool(config.task_type == "SEQ_CLS")


def merged(model: PreTrainedModel, path: str, *, setting: str) -> PreTrainedModel:
    """The model with an adapter's update added to its weights: a plain model again. Raises ModelError."""
    peft = _peft(f"{setting} is the adapter {path}")
    config = _read_config(peft, path, setting)
    with _fitting(path, setting):
        adapted = peft.PeftModel(model, config)
        found = adapted.load_adapter(
            Path(path).expanduser(), NAME, key_mapping=getattr(model, "_checkpoint_conversion_mapping", {})
        )
        _refuse_names(path, {*found.missing_keys, *found.unexpected_keys}, setting)
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        if any(isinstance(end, _wrapper(peft)) for end in ends) and ends[0].weight is ends[1].weight:
            raise ModelError(
                f"{setting}: the adapter {path} changes the embedding or the output head of a model in which the two "
                "share one weight, so it cannot be merged. Use it unmerged, on top of its base model, as peft does."
            )
        whole = adapted.merge_and_unload()
    vars(whole).pop("peft_config", None)
    whole.requires_grad_(True)
    assert isinstance(whole, PreTrainedModel)
    return whole


def base_of(path: str, *, setting: str) -> str:
    """The model that an adapter's folder says it belongs to."""
    base = _read_config(_peft(f"{setting} is the adapter {path}"), path, setting).base_model_name_or_path
    if not base:
        raise ModelError(
            f"{setting}: {Path(path) / CONFIG_FILE} does not name its base model. Set base_model_name_or_path there."
        )
    return str(base)


def save_adapter(model: PreTrainedModel, state: dict[str, Tensor], base: str, folder: Path) -> None:
    """Write the adapter as peft does. `state`: the trained tensors; `base`: the path of its base model."""
    peft = _peft("model.adapter is set")
    config = copy.deepcopy(model.peft_config[NAME])
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(folder)
    names = peft.get_peft_model_state_dict(model, state_dict=state)
    names |= {name: state[name] for name in state if name.split(".")[0] == reward_head_name(model)}
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in names.items()}, folder / WEIGHTS_FILE)


def quantize_nf4(module: nn.Module, device: torch.device, *, head: nn.Module | None = None) -> None:
    """Quantise every linear layer but the head to four bits on the device, one by one: the model need not fit there.

    torchao rather than bitsandbytes, because it uses plain PyTorch operations: a CPU gives the same numbers, and layers
    can be compiled.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of missing kernels, which are not used here
    nf4: Any = optional.require("torchao.quantization", extra="adapters", why="model.adapter.quantize is nf4").NF4Tensor
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear) or layer is head:
            continue
        scales, rest = divmod(layer.weight.numel(), NF4_BLOCK)
        if rest:
            raise ModelError(
                f"model.adapter.quantize: {name} has {layer.weight.numel()} weights, which is not a multiple of "
                f"{NF4_BLOCK}. Remove model.adapter.quantize."
            )
        weight = nf4.from_tensor(layer.weight.detach().to(device), NF4_BLOCK, math.gcd(scales, NF4_SCALES))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if type(layer) is nn.Linear:  # a subclass may compute something else
            module.set_submodule(name, FourBitLinear(layer.weight, layer.bias))


def _peft(why: str) -> Any:
    return optional.require("peft", extra="adapters", why=why)


def _check_rank(model: PreTrainedModel, rank: int) -> None:
    """Raise ModelError for a rank above that of every matrix of the model: the excess would only take memory."""
    highest = max(min(weight.shape[-2:]) for weight in model.parameters() if weight.ndim >= 2)
    if rank > highest:
        raise ModelError(
            f"model.adapter.rank: {rank} is more than {highest}, the highest rank that a matrix of "
            f"{type(model).__name__} can have. Set it to {highest} or less."
        )


def _param_wrapper() -> Any:
    """The class of what peft puts around a weight that is no layer."""
    return _peft("model.adapter is set").tuners.lora.layer.ParamWrapper


def _wrapper(peft: Any) -> Any:
    """The class of peft's wrappers around layers."""
    return peft.tuners.tuners_utils.BaseTunerLayer


def _read_config(peft: Any, path: str, setting: str) -> Any:
    if not is_adapter(Path(path)):
        inside = Path(path) / "model"  # of a run
        hint = f"Did you mean {inside}?" if is_adapter(inside) else "Give one that has."
        raise ModelError(f"{setting}: {path} is not an adapter's folder: it has no {CONFIG_FILE}. {hint}")
    try:
        config = peft.PeftConfig.from_pretrained(Path(path).expanduser())
    except Exception as error:
        raise ModelError(f"{setting}: cannot read {Path(path) / CONFIG_FILE} ({error}). Check the folder.") from error
    usual = peft.LoraConfig().to_dict()
    odd = {
        name: value
        for name, value in config.to_dict().items()
        if not (name in COMMON or value == usual.get(name) or (name, value) in PLAIN_STARTS)
    }
    if config.task_type == "SEQ_CLS" and {*odd.get("modules_to_save", ())} <= {*REWARD_HEADS}:
        odd.pop("modules_to_save", None)  # peft lists both names of a head, though a model has one
    if odd:
        raise ModelError(
            f"{setting}: {path} is an adapter of type {config.peft_type.value} with {odd}, but isopref supports only "
            "plain LoRA, DoRA and rsLoRA. Merge it into its base model with peft, and start from the merged model."
        )
    return config


def _refuse_names(path: str, different: Collection[str], setting: str) -> None:
    """Raise ModelError for tensors that are in an adapter's file or in the model under it, but not in both."""
    if different:
        some = ", ".join(sorted(different)[:3])
        raise ModelError(
            f"{setting}: the adapter {path} does not belong to this model: their tensors differ in {some}, ... Use a "
            "complete adapter that was made for this base model."
        )


@contextmanager
def _fitting(path: str, setting: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{setting}: the adapter {path} does not fit its base model: {reason}") from error


def _inject(peft: Any, model: PreTrainedModel, config: Any, dtype: torch.dtype) -> None:
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model.adapter: {type(model).__name__} cannot have this adapter: {reason.rstrip('.')}. Name other layers "
            "in model.adapter.targets, such as [q_proj, v_proj], or set another model.adapter.kind."
        ) from error
    for what, layer in (("output head", head_of(model)), ("embedding", model.get_input_embeddings())):
        if isinstance(layer, _wrapper(peft)):
            raise ModelError(f"model.adapter.targets: the {what} cannot be a target. Name other layers, or use auto.")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    compute_beside(model, _param_wrapper())
    if config.use_dora:
        _measure_lengths(model, dtype)


def _measure_lengths(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Initialise DoRA's magnitudes with the exact row lengths of the base's weights: peft rounds them to its dtype."""
    for layer in model.modules():
        lengths: Any = getattr(layer, "lora_magnitude_vector", {})
        if NAME in lengths:
            base: Any = layer.get_base_layer()  # type: ignore[operator]
            lengths[NAME].weight.data = lengths[NAME].get_weight_norm(base.weight.detach().to(dtype), 0.0, scaling=1.0)
