"""Hugging Face models and tokenizers: loaded from a folder, the hub or a GGUF file; exported to a folder.

An adapter's folder stands for its base model with the adapter merged into it. Ensures what must hold for every trained
model: all weights present, no dropout, a tokenizer with an end token, no trace of a quantised file. Knows no layouts.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from isopref import optional
from isopref.errors import ModelError, UserError, shorter_pairs
from isopref.examples import Lengths
from isopref.hub import unreachable
from isopref.models import hub
from isopref.models.adapter import base_of, has_adapter, is_adapter, merged, save_adapter
from isopref.models.gguf import is_kept, kept
from isopref.models.noise import own_rates

if TYPE_CHECKING:
    from isopref.models.native import NativeModel


KEPT = {AutoTokenizer: "tokenizer", AutoConfig: "config"}  # read from GGUF files and cached (gguf.py)
WEIGHTS = "model_and_optim"  # the subfolder of an OLMo-core checkpoint that holds the weights


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, resolved to what transformers' `from_pretrained` takes."""

    name: str  # a folder or a hub name
    gguf_file: str | None = None


def locate(path: str, *, setting: str = "model.path") -> Origin:
    """Resolve a model's path: a folder, a hub name, a .gguf file or `package:PACKAGE/FILE`. Raises ModelError.

    `setting` names where the path was given, for error messages; here and below.
    """
    in_package = path.startswith(optional.IN_PACKAGE)
    if in_package and path.endswith(".gguf"):
        optional.require_gguf(path, setting)
    local = optional.package_file(path) if in_package else Path(path).expanduser()
    if local.is_dir() and not (local / "config.json").exists() and not is_adapter(local):
        is_checkpoint = (local / WEIGHTS).is_dir()  # in the run folder two levels up
        inside = (local.absolute().parents[1] if is_checkpoint else local) / "model"
        inner = f" Did you mean {inside}?" if (inside / "config.json").exists() or is_adapter(inside) else ""
        raise ModelError(
            f"{setting}: {local} is not a Hugging Face model folder: it has no config.json.{inner} "
            "Give a folder that has one, a hub name or a .gguf file."
        )
    if local.is_dir():
        return Origin(str(local))
    if local.is_file() and local.suffix == ".gguf":
        optional.require_gguf(path, setting)
        return Origin(str(local.parent), local.name)
    if local.is_file():
        raise ModelError(f"{setting}: {local} is a file. Give the model's folder, a hub name or a .gguf file.")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"{setting}: there is no folder {local.absolute()}. Check the path, or give a hub name OWNER/NAME."
        )
    return Origin(path)


def is_olmo_core(path: str) -> bool:
    """Whether the path is an OLMo-core checkpoint, which conversion.py reads."""
    folder = Path(path).expanduser()
    return (folder / WEIGHTS).is_dir() and (folder / "config.json").exists()


def load_tokenizer(path: str, *, trust_remote_code: bool = False, setting: str = "model.path") -> Any:
    """The model's tokenizer, with its chat template if it has one. Raises ModelError."""
    if is_adapter(Path(path)) and not (Path(path).expanduser() / "tokenizer_config.json").exists():
        path = base_of(path, setting=setting)
    if is_olmo_core(path) and not (Path(path).expanduser() / "tokenizer_config.json").exists():
        raise ModelError(
            f"{setting}: the OLMo-core checkpoint {path} has no tokenizer. Put the files of its tokenizer there "
            "(tokenizer.json, tokenizer_config.json)."
        )
    tokenizer = _from_pretrained(AutoTokenizer, path, setting, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{setting}: the tokenizer of {path} has no end-of-sequence token. Set its eos_token.")
    return tokenizer


def is_slow_to_read(path: str) -> bool:
    """Whether a model's tokenizer has to be converted from a GGUF file, which takes seconds."""
    try:
        origin = locate(path)
    except UserError:  # loading it reports the reason
        return False
    return origin.gguf_file is not None and not is_kept(Path(origin.name) / origin.gguf_file, KEPT[AutoTokenizer])


def stop_tokens(path: str) -> tuple[int, ...]:
    """The stop tokens in the generation config beside a model's tokenizer; empty if there is none."""
    if is_adapter(Path(path)):
        path = base_of(path, setting="model.path")
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=_needs_cache(path)).eos_token_id
    except OSError:  # there is none
        found = None
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def load_narrow(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.path", kind: Any = AutoModelForCausalLM
) -> PreTrainedModel | None:
    """The model in the dtype of its files, memory-mapped and shared by all processes, if float32 represents it exactly.

    `model.float()` then equals what `load_model` gives in float32; otherwise None. Raises ModelError.
    """
    dtype = _half_type(path, setting)
    if dtype is None:
        return None
    config = read_config(path, trust_remote_code=trust_remote_code, setting=setting)
    if getattr(config, "transformers_weights", None) is not None:  # it refers to other files
        return None
    model = load_model(path, dtype=dtype, trust_remote_code=trust_remote_code, setting=setting, kind=kind)
    # A 16-bit buffer, such as the factor of Gemma's embedding, was rounded when the model was created.
    exact = all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point())
    # Some models keep a few weights in float32 regardless of the requested dtype; FSDP needs a single one.
    uniform = all(parameter.dtype == dtype for parameter in model.parameters())
    return model if exact and uniform else None


def _half_type(path: str, setting: str) -> torch.dtype | None:
    """The dtype of all weights in a model's safetensors files if it is a single 16-bit dtype, else None."""
    origin = locate(path, setting=setting)
    if origin.gguf_file is not None or is_adapter(Path(path)):
        return None
    types: set[str] = set()
    try:
        for file in _weight_files(origin.name):
            with safe_open(file, "pt") as tensors:
                types.update(tensors.get_slice(key).get_dtype() for key in tensors.keys())  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError):  # `load_model` reports what is wrong
        return None
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(types.pop()) if len(types) == 1 else None


def _weight_files(name: str) -> list[str | None]:
    """The files transformers looks for: a single file, then an index of several."""
    find = partial(cached_file, name, local_files_only=_needs_cache(name))
    try:
        return [find(SAFE_WEIGHTS_NAME)]
    except OSError:
        index = Path(str(find(SAFE_WEIGHTS_INDEX_NAME)))
    listed = json.loads(index.read_bytes())["weight_map"]
    return [find(file) for file in sorted(set(listed.values()))]


def _needs_cache(name: str) -> bool:
    """Whether this is a hub name and the hub cannot be reached."""
    return not Path(name).exists() and unreachable() is not None


def load_model(
    path: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    trust_remote_code: bool = False,
    setting: str = "model.path",
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The model on the CPU in `dtype` (auto: the one it was saved in), as one of transformers' auto classes.

    Raises ModelError.
    """
    if is_adapter(Path(path)):
        base = load_model(
            base_of(path, setting=setting), dtype=dtype, trust_remote_code=trust_remote_code, setting=setting
        )
        return merged(base, path, setting=setting)
    model: PreTrainedModel
    model, found = _from_pretrained(
        kind,
        path,
        setting,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,  # a .bin file is a pickle
    )
    if found["missing_keys"]:
        some = ", ".join(sorted(found["missing_keys"])[:3])
        raise ModelError(
            f"{setting}: {path} lacks {len(found['missing_keys'])} of the model's weights ({some}, ...), which would "
            "be initialised at random. Check that the folder is complete and of this architecture."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        model = _dequantised(model)
    return model


def read_config(path: str, *, trust_remote_code: bool = False, setting: str = "model.path") -> PreTrainedConfig:
    """The model's config. The folder of an adapter stands for its base model. Raises ModelError."""
    if is_adapter(Path(path)):
        path = base_of(path, setting=setting)
    config = _from_pretrained(AutoConfig, path, setting, trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    return config


def load_empty(path: str, *, trust_remote_code: bool = False, setting: str = "model.path") -> PreTrainedModel:
    """The model without its weights, on the meta device: only its config is read. Raises ModelError."""
    config = read_config(path, trust_remote_code=trust_remote_code, setting=setting)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def context_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence a model supports, in tokens; None if its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def check_fits(
    model: "PreTrainedModel | NativeModel",
    tokenizer: Any,
    lengths: Lengths,
    name: Callable[[int], str],
    sharing: int = 1,
    shortest: int | None = None,
) -> None:
    """Raise ModelError if the model cannot take the tokens, or if a sequence's score would depend on its batch.

    `name` gives an example's name in messages; `sharing` is the number of ranks that split a row; `shortest` is the
    number of tokens of the shortest sequence that is scored, if there are others than those of `lengths`.
    """
    config = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    if len(tokenizer) > embedding.num_embeddings:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {embedding.num_embeddings}: they do not fit. "
            "Use the model's own tokenizer."
        )
    most, longest = int(lengths.sequence.max()), int(lengths.of_answer[lengths.sequence.argmax()])
    limit = context_length(config) or most
    if most > limit:
        raise ModelError(
            f"{name(longest)} is {most} tokens long, but the model's max_position_embeddings is {limit}. "
            f"{shorter_pairs(limit)}"
        )
    # If ranks split a row, each of them must have a token beyond the border.
    least = int(lengths.sequence.min()) if shortest is None else shortest
    least = least if sharing == 1 else int(lengths.prompt.min()) - sharing + 1
    rope = getattr(config, "rope_parameters", None) or {}
    for part in rope.values() if all(isinstance(one, dict) for one in rope.values()) else [rope]:
        border = part.get("original_max_position_embeddings") or limit
        mixes = {"dynamic": most > border, "longrope": least <= border < most}
        if mixes.get(part.get("rope_type", "")):
            raise ModelError(
                f"the model's rope ({part['rope_type']}) changes for all sequences of a forward pass if one is over "
                f"{border} tokens, as {name(longest)} is ({most}), so scores would depend on which pairs share a "
                f"microbatch. {shorter_pairs(border)}"
            )


def check_same_vocabulary(tokenizer: Any, path: str, other: Any, *, setting: str) -> None:
    """Raise ModelError if the tokens mean another text to the model at `path`, whose tokenizer is `other`."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ModelError(
            f"{setting}: {path} has another vocabulary than the model that is compared with it: {len(differ)} tokens "
            f"differ, such as {differ[0]!r} (id {theirs.get(differ[0], 'missing')}, not "
            f"{ours.get(differ[0], 'missing')}). The pairs' tokens would mean other text. Use a model with the same "
            "tokenizer."
        )


def export(model: PreTrainedModel, state: dict[str, Tensor], tokenizer: Any, folder: Path, *, base: str = "") -> None:
    """Write a folder that `from_pretrained` loads: safetensors, config, generation config, tokenizer, chat template.

    For a model with an adapter, this is the adapter's folder, and `base` is the path of the base model. Written to a
    temporary folder and renamed, so a folder of that name is always complete.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists already. Move it away, or set run.folder to another folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    if has_adapter(model):
        local = Path(base).expanduser()
        save_adapter(model, state, str(local.absolute()) if local.exists() else base, partial)
    else:
        with own_rates(model):
            _save_whole(model, state, partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def _save_whole(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    generation: Any = getattr(model, "generation_config", None)
    if generation is None:  # a reward model writes no text
        model.save_pretrained(folder, state_dict=state)
        return
    model.generation_config = GenerationConfig()  # transformers refuses to save sampling flags without sampling
    model.save_pretrained(folder, state_dict=state)
    model.generation_config = generation
    generation.to_json_file(folder / "generation_config.json")


def _dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model without any trace of the quantised file, so that it can be saved."""
    config = model.config
    del config.quantization_config
    # Built in its dtype rather than cast to it: a cast would round the rotary frequencies, which stay in float32.
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.eval()
    assert isinstance(plain, PreTrainedModel)
    return plain


def _from_pretrained(kind: Any, path: str, setting: str, **options: Any) -> Any:
    origin = locate(path, setting=setting)
    gguf = {"gguf_file": origin.gguf_file} if origin.gguf_file else {}
    no_network = None if Path(origin.name).exists() else unreachable()
    read = partial(kind.from_pretrained, origin.name, local_files_only=no_network is not None, **gguf, **options)
    try:
        if origin.gguf_file is not None and kind in KEPT:
            return kept(kind, Path(origin.name) / origin.gguf_file, KEPT[kind], read)
        return read()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{setting}: {_why_not(error, path, origin.name, no_network)}.") from error


def _why_not(error: Exception, path: str, name: str, no_network: str | None) -> str:
    """Why a model could not be loaded, and the way out."""
    if "trust_remote_code" in str(error):
        return hub.own_code(path)
    if hub.has_only_pickle(name, error):
        return hub.only_pickle(path)
    if no_network is not None:
        return hub.no_network(path, no_network)
    reason = " ".join(str(error).split())[:300].rstrip(".")
    if not Path(name).exists():
        return (
            f"there is no folder {Path(path).absolute()}, and {path} cannot be loaded from the hub ({reason}). Check "
            "the name, or give a local folder"
        )
    return f"cannot load {path}: {reason}"
