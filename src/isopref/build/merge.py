"""Merges an adapter into its base model."""

from pathlib import Path

import torch

from isopref.build.run import quiet_libraries
from isopref.errors import ModelError
from isopref.models import hf, reward
from isopref.models.adapter import CONFIG_FILE, is_adapter
from isopref.runs.files import MODEL_FOLDER


def merge(folder: Path, out: Path, *, dtype: str | None, trust_remote_code: bool) -> None:
    """Write the merged model of `folder`, a run or an adapter. `dtype` None: the base model's dtype."""
    quiet_libraries()
    adapter = folder if is_adapter(folder) else folder / MODEL_FOLDER
    if not is_adapter(adapter):
        raise ModelError(
            f"{folder}: no adapter found: neither it nor its folder '{MODEL_FOLDER}' contains {CONFIG_FILE}. Pass a "
            "finished run with model.adapter, or an adapter folder."
        )
    if out.exists():
        raise ModelError(f"{out} already exists and will not be overwritten. Choose another folder.")
    name, setting = str(adapter), "ADAPTER"
    is_reward = reward.is_reward_model(name, setting=setting)
    model = (reward.load_reward_model if is_reward else hf.load_model)(
        name,
        dtype="auto" if dtype is None else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        setting=setting,
    )
    tokenizer = hf.load_tokenizer(name, trust_remote_code=trust_remote_code, setting=setting)
    if is_reward:
        reward.adopt_padding(model, tokenizer)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        hf.export(model, model.state_dict(), tokenizer, out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error}). Choose another folder.") from error
