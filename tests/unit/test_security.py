"""What is never done: run what a file holds, hand text to a shell, write down a secret."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import isopref
from isopref.build.run import say_trust
from isopref.config.load import load_config
from isopref.engine.display import Display
from isopref.errors import ModelError
from isopref.models.hf import load_model
from isopref.testing.models import tiny_folder

SOURCE = Path(isopref.__file__).parent
ROOT = SOURCE.parents[1]


def faults(text: str) -> Iterator[str]:
    """Calls in a module that would run what they are given."""
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if given.get("shell", "False") != "False":
            yield f"{name} with a shell"
        if name in ("os.system", "os.popen", "eval", "exec", "compile", "pickle.load", "pickle.loads", "yaml.load"):
            yield name
        if given.get("trust_remote_code") == "True":
            yield f"{name} with trust_remote_code"


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(f'ls {name}', shell=True)",
        "os.system(name)",
        "pickle.load(file)",
        "yaml.load(text, Loader=Loader)",
        "x.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_scan_finds(line: str) -> None:
    assert list(faults(line))


def test_nothing_of_that_is_in_the_source() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 50
    found = {str(path.relative_to(SOURCE)): list(faults(path.read_text())) for path in files}
    assert {name: what for name, what in found.items() if what} == {}


def test_pickle_is_known_only_where_it_is_refused() -> None:
    users = [
        path.name for path in SOURCE.rglob("*.py") if re.search(r"^\s*(import|from) pickle", path.read_text(), re.M)
    ]
    assert users == ["plain.py"]


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "gpt2")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.path: .* has no safetensors file, only a \.bin file"):
        load_model(str(folder), dtype=torch.float32)


def test_code_of_a_model_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("model: {path: some/model}\ndata: {train: a.jsonl}\n")
    say_trust(load_config(file), Display())
    assert capsys.readouterr().out == ""
    say_trust(load_config(file, ["model.trust_remote_code=true", "model.reference=other"]), Display())
    assert capsys.readouterr().out == (
        "warning: model.trust_remote_code: code from some/model and other will run with your permissions\n"
    )


def test_versions_are_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[^=*]+", line) for line in lines)
