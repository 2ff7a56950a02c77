"""Models that cannot be loaded as they are: without a network, with code of their own, in a pickle."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file

from isopref.errors import ModelError
from isopref.models import hf, hub
from isopref.testing.models import tiny_folder

LOAD = """
import sys
from isopref.errors import ModelError
from isopref.models import hf
try:
    hf.load_tokenizer(sys.argv[1])
except ModelError as error:
    print(error)
"""
Asked = list[tuple[str, str]]


@pytest.fixture
def serve() -> Iterator[Callable[[bool], tuple[str, Asked]]]:
    """Starts a hub that has nothing, or one behind a network that drops every connection; returns what it is asked."""
    servers = []

    def start(answers: bool) -> tuple[str, Asked]:
        asked: Asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.command, self.path))
                if answers:
                    self.send_error(404)
                else:
                    self.close_connection = True  # without a word

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def load(endpoint: str) -> str:
    """What is said of a name on the hub in a process that may use the network."""
    left_out = {"HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "nobody/nothing"],
        env={**env, "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_network_no_file_is_asked_for(serve: Callable[[bool], tuple[str, Asked]]) -> None:
    """Each would be asked for six times, with pauses."""
    endpoint, asked = serve(False)
    message = load(endpoint)
    assert message.startswith(f"model.path: there is no folder {Path('nobody/nothing').absolute()}, nobody/nothing is")
    assert f"the hub ({endpoint}) cannot be reached (RemoteProtocolError: " in message
    assert message.endswith("with a network: hf download nobody/nothing --local-dir FOLDER.\n")
    assert [one for one in asked if "nothing" in one[1]] == []
    assert asked.count(("HEAD", "/")) == hub.ATTEMPTS


def test_a_hub_that_answers_is_asked(serve: Callable[[bool], tuple[str, Asked]]) -> None:
    endpoint, asked = serve(True)
    message = load(endpoint)
    assert "and the hub gave nothing: cannot load nobody/nothing (" in message
    assert ("HEAD", "/nobody/nothing/resolve/main/config.json") in asked


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["x.X", None]}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x", "auto_map": own}))
    expected = (
        f"model.path: {folder} needs Python code that comes with it, and that is not run unless you allow it. Read the "
        "code; if you trust it, set model.trust_remote_code: true (isopref merge: --trust-remote-code)."
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
    assert hub.has_only_pickle("a/b", error)
    assert not hub.has_only_pickle("a/b", OSError("a/b is not a local folder"))
