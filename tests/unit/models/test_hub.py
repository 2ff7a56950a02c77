"""Models that cannot be loaded as they are: without a network, with code of their own, in a pickle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isopref.errors import ModelError
from isopref.hub import ATTEMPTS
from isopref.models import hf
from isopref.models.hub import has_only_pickle
from isopref.testing.models import tiny_folder
from support.offline_hub import hub, run_online

LOAD = """
from isopref.errors import ModelError
from isopref.models import hf
try:
    hf.load_tokenizer("nobody/nothing")
except ModelError as error:
    print(error)
"""


def test_without_a_network_no_file_is_asked_for() -> None:
    """Each would be asked for six times, with pauses."""
    with hub(answers=False) as (endpoint, asked):
        message = run_online(LOAD, endpoint)
    assert message.startswith(f"model.path: there is no folder {Path('nobody/nothing').absolute()}, nobody/nothing is")
    assert f"the hub ({endpoint}) cannot be reached (RemoteProtocolError: " in message
    assert message.endswith("with a network: hf download nobody/nothing --local-dir FOLDER.\n")
    assert [one for one in asked if "nothing" in one[1]] == []
    assert asked.count(("HEAD", "/")) == ATTEMPTS


def test_a_hub_that_answers_is_asked() -> None:
    with hub(answers=True) as (endpoint, asked):
        message = run_online(LOAD, endpoint)
    assert "and nobody/nothing cannot be loaded from the hub (" in message
    assert ("HEAD", "/nobody/nothing/resolve/main/config.json") in asked


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["x.X", None]}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x", "auto_map": own}))
    expected = (
        f"model.path: {folder} requires custom Python code, which isopref does not run by default. Review it; if you "
        "trust it, set model.trust_remote_code: true (isopref merge: --trust-remote-code)."
    )
    for loaded in (hf.read_config, lambda path: hf.load_model(path, dtype=torch.float32)):
        with pytest.raises(ModelError) as caught:
            loaded(str(folder))
        assert str(caught.value) == expected


def test_weights_in_a_pickle_are_converted_by_the_command_given(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "old", "llama")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle, which can run code when it is loaded") as caught:
        hf.load_model(str(folder), dtype=torch.float32)
    code, folder_name = str(caught.value).split('python -c "')[1].rstrip(".").split('" and use ')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=150)
    assert folder_name == "old-safetensors"
    hf.load_tokenizer(str(tmp_path / folder_name))
    model = hf.load_model(str(tmp_path / folder_name), dtype=torch.float32)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_only_a_pickle_on_the_hub() -> None:
    error = OSError("a/b does not appear to have a file named model.safetensors or model.safetensors.index.json and")
    assert has_only_pickle("a/b", error)
    assert not has_only_pickle("a/b", OSError("a/b is not a local folder"))
