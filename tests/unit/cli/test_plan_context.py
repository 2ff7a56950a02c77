"""`isopref plan` of ranks that split rows: how long pairs may be, what that costs, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from isopref.cards import GIB
from isopref.cli.main import app
from isopref.errors import ConfigError
from isopref.testing.families import tiny_config
from isopref.testing.models import tiny_folder

MILLION = 2**20
CARD = ("--card", "H100", "--gpus", "8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 8B Llama's config, and pairs of a million tokens."""
    folder = tmp_path_factory.mktemp("plan")
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
    ).save_pretrained(folder / "8b")
    (folder / "my.yaml").write_text(
        f"model: {{path: {folder / '8b'}, dtype: float32, compute_dtype: bfloat16}}\ndata: {{train: none.jsonl}}\n"
        "optim: {batch_size: 4}\n"
    )
    np.save(folder / "lengths.npy", np.array([[MILLION // 2, MILLION // 4, MILLION // 4]] * 4))
    return folder


def text(project: Path, *arguments: str) -> str:
    command = ["plan", str(project / "my.yaml"), *arguments, "--lengths", str(project / "lengths.npy")]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def plan(project: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(project, "--json", *arguments))
    return found


def test_a_pair_too_long_for_one_gpu_fits_on_several(project: Path) -> None:
    alone = plan(project, *CARD)
    assert not alone["run"]["fits"]
    reaches = {one["overrides"].split()[-1]: one for one in alone["reaches"]}
    split = [reaches[f"layout.context_parallel={size}"] for size in (2, 4, 8)]
    tokens = [one["tokens"] for one in [*reaches.values()]]
    assert tokens == sorted(tokens)
    assert [one["too_long"] for one in split] == [4, 0, 0]
    (other, *_) = alone["alternatives"]
    assert "layout.context_parallel=4" in other["overrides"]
    again = plan(project, *CARD, *other["overrides"].split())
    assert again["run"]["fits"]
    assert again["run"]["context"] == 4
    assert again["run"]["exchanged_bytes"] > 0
    assert again["run"]["time"]["exchange"] > 0
    assert any("has not run on GPUs yet" in note for note in again["notes"])


@pytest.mark.parametrize(
    ("card", "way_out"), [("H200", "layout.tensor_parallel=8"), ("H100", "layout.context_parallel=4")]
)
def test_ranks_that_compute_layers_together_may_do_so_otherwise(project: Path, card: str, way_out: str) -> None:
    asked = ("layout.tensor_parallel=2", "layout.checkpointing=full", "layout.offload_activations=full")
    card_and_asked = ("--card", card, "--gpus", "8", "model.native=true", *asked)
    found = plan(project, *card_and_asked)
    assert not found["run"]["fits"]
    (other, *_) = found["alternatives"]
    assert way_out in other["overrides"]
    again = plan(project, *card_and_asked, *other["overrides"].split())
    assert again["run"]["fits"]
    assert sum(again["run"]["memory"].values()) / GIB == pytest.approx(other["memory_gib"])


def test_rows_are_shared_by_a_group(project: Path) -> None:
    """On eight GPUs, two groups of four have two pairs each."""
    shown = text(project, *CARD, "layout.context_parallel=4")
    assert "fsdp, 4 ranks per row, grad_sync" in shown
    assert "GB inside layers" in shown
    assert re.search(r"microbatches +2\.0 per rank, the largest with 1,048,576 tokens", shown)
    found = plan(project, *CARD, "layout.context_parallel=8")
    assert [one["overrides"] for one in found["reaches"] if "context" in one["overrides"]] == []  # no more than 8 GPUs
    assert found["run"]["microbatches"] == 4


def test_low_speeds_have_digits(project: Path) -> None:
    """Of a pair of a million tokens, a group of GPUs computes one in seconds."""
    arguments = (*CARD, "layout.context_parallel=8", "--ranks", "8,16")
    found, shown = plan(project, *arguments), text(project, *arguments)
    assert 0 < found["run"]["examples_per_s"] < 0.1
    assert f"  {found['run']['examples_per_s']:.3g} pairs/s, MFU" in shown
    for one in found["scale"]:
        assert f" {one['examples_per_s']:.3g} " in shown


@pytest.mark.parametrize(
    ("gpus", "size", "message"),
    [
        ("6", 4, "layout.context_parallel: 4 does not divide 6 GPUs. Change --gpus or layout.context_parallel."),
        ("3", 3, "layout.context_parallel: 3 does not divide 32, the number of parts into which ranks can divide the"),
    ],
)
def test_what_cannot_split_a_row_is_refused(project: Path, gpus: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(project, "--gpus", gpus, f"layout.context_parallel={size}")


@pytest.mark.parametrize(
    ("family", "tiles"), [("mamba2", False), ("opt", False), ("zaya", False), ("llama4_text", True)]
)
def test_only_mlps_that_a_run_computes_in_tiles_are_planned_so(
    project: Path, tmp_path: Path, family: str, tiles: bool
) -> None:
    tiny_config(family).save_pretrained(tmp_path / "model")
    found = plan(project, *CARD, f"model.path={tmp_path / 'model'}")
    assert any("mlp_tile_tokens" in one["overrides"] for one in found["reaches"]) == tiles


def test_layers_that_cannot_follow_a_row_offer_no_split(project: Path, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "mamba", "mamba")
    found = plan(project, *CARD, f"model.path={model}", "model.dtype=bfloat16", "model.compute_dtype=null")
    assert [one for one in found["reaches"] if "context" in one["overrides"]] == []
    with pytest.raises(ConfigError) as refusal:
        plan(project, *CARD, f"model.path={model}", "layout.context_parallel=2")
    assert str(refusal.value) == (
        "layout.context_parallel: 2, but MambaForCausalLM has layers whose sequences cannot be split "
        "(backbone.layers.0.mixer). Set layout.context_parallel: 1."
    )
