"""An adapter and its base model as one model."""

from pathlib import Path

import torch

from isopref.build.run import quiet_libraries
from isopref.errors import ModelError
from isopref.models import hf, reward
from isopref.models.adapter import CONFIG_FILE, is_adapter
from isopref.runs.files import MODEL_FOLDER


def merge(folder: Path, out: Path, *, dtype: str | None, trust_remote_code: bool) -> None:
    """Write the model that `folder`, of a run or of an adapter, stands for. `dtype` None: the base model's own."""
    quiet_libraries()
    adapter = folder if is_adapter(folder) else folder / MODEL_FOLDER
    if not is_adapter(adapter):
        raise ModelError(
            f"{folder} holds no adapter: there is no {CONFIG_FILE} in it or in its folder '{MODEL_FOLDER}'. Give a "
            "finished run with model.adapter, or an adapter's folder."
        )
    if out.exists():
        raise ModelError(f"{out} exists already, and is not overwritten. Choose another folder.")
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
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    hf.export(model, model.state_dict(), tokenizer, out)
