"""Error messages for models that cannot be loaded: no network, custom code, pickled weights."""

from pathlib import Path

from huggingface_hub import constants


def no_network(path: str, reason: str) -> str:
    """The message for a hub name without network access."""
    return (
        f"there is no folder {Path(path).absolute()}, {path} is not in the local cache, and the hub "
        f"({constants.ENDPOINT}) cannot be reached ({reason}). Check the name and the network, or give a local "
        f"folder. To make one on a machine with a network: hf download {path} --local-dir FOLDER"
    )


def own_code(path: str) -> str:
    """The message for a model that ships Python code."""
    return (
        f"{path} requires custom Python code, which isopref does not run by default. Review it; if you trust it, set "
        "model.trust_remote_code: true (isopref merge: --trust-remote-code)"
    )


def only_pickle(path: str) -> str:
    """The message for weights that exist only as pickles."""
    folder = f"{Path(path).name}-safetensors"
    convert = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; M.from_pretrained({path!r}, "
        f"dtype='auto').save_pretrained({folder!r}); T.from_pretrained({path!r}).save_pretrained({folder!r})"
    )
    return (
        f"{path} has no safetensors file, only a .bin file: a pickle, which can run code when it is loaded, so isopref "
        f'does not load it. If you trust its source, convert it once: python -c "{convert}" and use {folder}'
    )


def has_only_pickle(name: str, error: Exception) -> bool:
    """Whether a folder, or a model on the hub for which transformers raised `error`, has only pickled weights."""
    folder = Path(name)
    if folder.is_dir():
        return any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))
    return "does not appear to have a file named model.safetensors" in str(error)
