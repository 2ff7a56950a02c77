"""`isopref plan`: what it says of a config, with which advice, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from isopref.cards import CARDS, GIB, find_card, parse_memory
from isopref.cli.main import app
from isopref.errors import ConfigError, DataError, UserError
from isopref.ops import flash
from isopref.testing.models import tiny_folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A config whose model is a config.json and nothing else, and lengths."""
    widths: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
    LlamaConfig(**widths, num_attention_heads=32, num_key_value_heads=8).save_pretrained(tmp_path / "8b")
    (tmp_path / "my.yaml").write_text(
        f"model: {{path: {tmp_path / '8b'}, dtype: float32, compute_dtype: bfloat16}}\ndata: {{train: none.jsonl}}\n"
    )
    np.save(tmp_path / "lengths.npy", np.random.RandomState(0).randint(50, 800, (300, 3)))
    return tmp_path


def change_layers(project: Path, count: int) -> None:
    config = LlamaConfig.from_pretrained(project / "8b")
    config.num_hidden_layers = count
    config.save_pretrained(project / "8b")


def run(project: Path, *arguments: str) -> str:
    command = ["plan", str(project / "my.yaml"), *arguments, "--lengths", str(project / "lengths.npy")]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def plan(project: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(project, "--json", *arguments))
    return found


def test_a_plan_without_weights_says_everything(project: Path) -> None:
    text = run(project, "--card", "H100", "--gpus", "8", "--ranks", "8,64")
    for said in (
        "8.03 B parameters on 8 x H100", "optimizer", "7.48", "it fits", "fsdp, grad_sync every", "row fill",
        "prompt sharing", "rank balance", "pairs/s, MFU", "64 hsdp 8",
    ):  # fmt: skip
        assert said in text


def test_an_objective_costs_what_it_computes(project: Path) -> None:
    """Passes and models besides the usual ones; nothing to score ahead without a reference that stays."""
    card = ("--card", "H200", "--gpus", "8")
    usual, moving, coupled, alone = (
        plan(project, *card, *overrides)
        for overrides in (
            (),
            ("objective.reference_moves=[4, 0.5]",),
            ("objective.loss=aot",),
            ("objective.loss=simpo",),
        )
    )
    weights = [one["run"]["memory"]["weights"] for one in (usual, moving, coupled, alone)]
    assert weights[1] == pytest.approx(2 * weights[0])
    assert weights[2] == weights[3] == weights[0]
    assert 1.25 * usual["hours"] < coupled["hours"] < 1.4 * usual["hours"]
    assert moving["hours"] > 1.25 * usual["hours"]
    assert alone["hours"] == usual["hours"]
    assert usual["score_hours"] == pytest.approx(coupled["score_hours"], rel=0.1)
    assert moving["score_hours"] == alone["score_hours"] == 0


def test_what_does_not_fit_gets_a_layout_that_does(project: Path) -> None:
    found = plan(project, "--card", "H100")
    assert not found["run"]["fits"]
    assert "weights and optimizer alone take 89.7 GiB" in found["notes"][0]
    assert found["run"]["memory"]["weights"] == 4 * found["parameters"]
    (other,) = found["alternatives"]
    *overrides, option, gpus = other["overrides"].split()
    again = plan(project, *overrides, option, gpus)
    assert again["run"]["fits"]
    assert sum(again["run"]["memory"].values()) / GIB == pytest.approx(other["memory_gib"])


SHORT = ("--card", "H100", "model.compute_dtype=float32", "optim.batch_size=20")
FULL = ("layout.microbatch_tokens=8192", "layout.checkpointing=full")


@pytest.mark.parametrize(("memory", "gpus"), [("20GB", 32), ("23GB", 16), ("40GB", 8)])
def test_what_does_not_fit_gets_the_fewest_gpus_that_do(project: Path, memory: str, gpus: int) -> None:
    """Short pairs, so that no microbatch is as large as it may be."""
    change_layers(project, 8)
    np.save(project / "lengths.npy", np.full((60, 3), 40))
    card = (*SHORT, "--memory", memory)
    (other,) = plan(project, *card)["alternatives"]
    *overrides, option, count = other["overrides"].split()
    assert (option, int(count)) == ("--gpus", gpus)
    assert plan(project, *card, *overrides, option, count)["run"]["fits"]
    fewer = gpus // 2 if gpus > 8 else 1
    assert not plan(project, *card, *overrides, option, str(fewer))["run"]["fits"]


def test_float8_is_faster_and_takes_the_same_memory(project: Path) -> None:
    card = ("--card", "H200", "--gpus", "8")
    half, narrow = (plan(project, *card, f"model.compute_dtype={dtype}")["run"] for dtype in ("bfloat16", "float8"))
    assert narrow["memory"] == half["memory"]
    assert 1.1 < narrow["examples_per_s"] / half["examples_per_s"] < 1.5


@pytest.mark.parametrize(
    ("card", "installed", "head_width", "kernel", "noted"),
    [
        ("H100", False, 128, "FlashAttention 2", "because flash-attn-4 is not installed here"),
        ("H100", True, 128, "FlashAttention 4", None),
        ("B200", True, 64, "FlashAttention 4", None),
        ("A100", True, 128, "FlashAttention 2", None),
        ("H200", True, 256, "FlashAttention 2", "its speed was not measured for heads of width 256"),
    ],
)
def test_the_kernel_is_the_one_that_the_card_would_run(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: str,
    installed: bool,
    head_width: int,
    kernel: str,
    noted: str | None,
) -> None:
    monkeypatch.setattr(flash, "load", lambda: flash.Package(object() if installed else None, None))
    config = LlamaConfig.from_pretrained(project / "8b")
    config.update({"head_dim": head_width, "num_attention_heads": 4096 // head_width})
    config.save_pretrained(project / "8b")
    found = plan(project, "--card", card, "--gpus", "8")
    assert found["attention"].startswith(kernel)
    notes = [note for note in found["notes"] if note.startswith("attention:")]
    assert [noted in note for note in notes] == ([True] if noted else [])
    assert re.search(rf"attention +{kernel}", run(project, "--card", card, "--gpus", "8"))
    padded = plan(project, "--card", card, "--gpus", "8", "layout.rows=padded")
    assert padded["attention"] == "the model's own"


ROOT = 2 * 128256 * 4096 + 4096  # of the 8B shape: embedding, head, last norm; a layer is smaller


@pytest.mark.parametrize(
    ("layout", "share"),
    [((), 1 / 64), (("layout.offload=true",), 0), (("layout.parallel=hsdp", "layout.hsdp_shard=32"), 1 / 32)],
)
def test_a_model_larger_than_a_card_comes_from_the_host(project: Path, layout: tuple[str, ...], share: float) -> None:
    """8.03 B numbers of four bytes are 29.9 GiB, and eight ranks of a machine hold them: 239 GiB."""
    on_a_24gb_card = ("--card", "RTX 3090", "--gpus", "64", *layout)
    found = plan(project, *on_a_24gb_card)
    assert found["run"]["fits"]
    assert found["run"]["loading"] == pytest.approx(4 * (share * found["parameters"] + ROOT))
    assert (
        "while loading, the 8 ranks of a machine share one copy of the weights if the files have 16 bits; otherwise, "
        "loading takes up to 239 GiB of host memory"
    ) in found["notes"]
    whole = plan(project, *on_a_24gb_card, "--memory", "41GB")
    assert whole["run"]["loading"] == 4 * found["parameters"] < 0.8 * 41e9
    assert not any("while loading" in note for note in whole["notes"])


def test_many_gpus_hold_what_one_cannot(project: Path) -> None:
    """70.6 B numbers with float32 masters: 16 bytes each over the ranks, and more for a step."""
    config = LlamaConfig.from_pretrained(project / "8b")
    config.update({"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64})
    config.save_pretrained(project / "8b")
    found = plan(project, "--card", "H100")
    assert not found["run"]["fits"]
    assert found["notes"][0] == "weights and optimizer alone take 788.5 GiB."
    (other,) = found["alternatives"]
    *overrides, option, gpus = other["overrides"].split()
    assert (option, int(gpus)) == ("--gpus", 32)
    again = plan(project, "--card", "H100", *overrides, option, gpus)
    assert again["run"]["fits"]
    assert again["run"]["loading"] < 0.2 * 4 * again["parameters"]


def test_four_bits_are_whole_on_every_rank(project: Path) -> None:
    """0.516 bytes of each number of a layer, two of the root's, four of the adapter's; 14 of an unpacked one's."""
    small = ("--memory", "5GiB", "--gpus", "8", "model.adapter={rank: 16, quantize: nf4}")
    found = plan(project, *small)
    assert found["run"]["loading"] == pytest.approx(
        0.516 * 6.98e9 + 2 * 1.05e9 + 4 * 41.9e6 + 14 * 4096 * 14336, rel=0.01
    )
    assert (found["hours"], found["largest_fit"], found["alternatives"]) == (None, 0, [])
    assert "weights and optimizer alone take 5." in found["notes"][0]
    assert "loading the model alone takes 6." in plan(project, *small, *FULL)["notes"][0]
    assert "without model.adapter.quantize, FSDP shards it" in found["notes"][1]
    assert re.search(
        r"during loading +6\.\d \n.*it does not fit\n.*GPUs fits; use shorter", run(project, *small), re.DOTALL
    )


def test_the_way_out_of_hsdp_is_no_conflict(project: Path) -> None:
    asked = ("layout.parallel=hsdp", "layout.hsdp_shard=2", "--memory", "40GB")
    (other,) = plan(project, *asked, "--gpus", "2")["alternatives"]
    assert plan(project, *asked, *other["overrides"].split())["run"]["fits"]


@pytest.mark.parametrize(
    ("memory", "gpus", "overrides", "fits"),
    [("80GB", 1, (), False), ("20GB", 64, (), False), ("48GB", 8, (), True), ("40GB", 8, FULL, True)],
)
def test_what_memory_takes_agrees_with_what_fits(
    project: Path, memory: str, gpus: int, overrides: tuple[str, ...], fits: bool
) -> None:
    """One of 8,192 tokens does not fit into 40 GB, but none is as large as that."""
    np.save(project / "lengths.npy", np.full((60, 3), 40))
    shown = run(project, *SHORT, "--memory", memory, "--gpus", str(gpus), *overrides)
    found = re.search(r"the largest with ([\d,]+) tokens \(limit ([\d,]+); memory allows ([\d,]+|none)\)", shown)
    assert found is not None
    largest, limit, takes = (0 if text == "none" else int(text.replace(",", "")) for text in found.groups())
    assert ("it fits" in shown, largest <= takes) == (fits, fits)
    assert (limit <= takes) == (fits and not overrides)


LORA = ("model.adapter.rank=16", "model.dtype=bfloat16", "model.compute_dtype=null", "--card", "H200")


def test_a_long_pair_gets_what_it_needs_and_no_more(project: Path) -> None:
    """Pairs of 64k to 1M tokens, half of them prompt: recomputing, offloading, tiles, and finally too long."""
    found = []
    for tokens in (2**16, 2**18, 2**19, 2**20):
        np.save(project / "lengths.npy", np.array([[tokens // 2, tokens // 4, tokens // 4]] * 64))
        one = plan(project, *LORA, "optim.batch_size=8")
        found.append((one["run"]["fits"], one["recompute"] > 0, one["offloaded"] > 0, one["tile"] is not None))
        if one["run"]["fits"]:
            assert one["run"]["memory"]["activations"] + one["run"]["memory"]["logits"] < one["usable"]
        reaches = [reach["tokens"] for reach in one["reaches"]]
        assert reaches == sorted(reaches)
        assert len(set(reaches)) == 4
        assert [reach["too_long"] for reach in one["reaches"]] == [64 if reach < tokens else 0 for reach in reaches]
    assert found == [
        (True, True, False, False),
        (True, True, True, False),
        (True, True, True, True),
        (False, True, True, True),
    ]
    (note, *_) = one["notes"]
    assert "Offloading layer inputs and computing MLPs in tiles does not free enough memory." in note
    assert "at auto" not in note


def test_tiles_come_as_soon_as_offloading_is_not_enough(project: Path) -> None:
    np.save(project / "lengths.npy", np.array([[2**17, 2**16, 2**16]] * 8))
    offload, tile = [one["tokens"] for one in plan(project, *LORA)["reaches"]][2:]
    for tokens in (offload - 8, offload + 8, tile - 8):
        np.save(project / "lengths.npy", np.array([[tokens // 2, tokens // 4, tokens // 4]] * 8))
        found = plan(project, *LORA)
        assert found["run"]["fits"]
        assert (found["tile"] is None) == (tokens < offload)


def test_offloading_and_tiles_that_are_asked_for_are_planned(project: Path) -> None:
    np.save(project / "lengths.npy", np.array([[2**15, 2**14, 2**14]] * 64))
    asked = ("layout.microbatch_tokens=65536", "layout.checkpointing=full")
    offload, tile = "layout.offload_activations=full", "layout.mlp_tile_tokens=4096"
    plain, offloaded, tiled = (plan(project, *LORA, *asked, *more) for more in ((), (offload,), (tile,)))
    row = 65536 * 4096 * 2  # bytes of one layer's input
    saved = plain["run"]["memory"]["activations"] - offloaded["run"]["memory"]["activations"]
    assert saved == 30 * row  # of 32 layers one is in use and one on its way
    assert offloaded["run"]["time"]["copies"] == 0  # hidden by what attention takes at this length
    inner = 65536 * 14336 * 2
    assert plain["run"]["memory"]["logits"] - tiled["run"]["memory"]["logits"] > 4 * inner
    shown = run(project, *LORA, *asked, offload)
    assert "31 offload their inputs" in shown
    assert "offloaded activations take 15.5 GiB of host memory for each rank" in " ".join(shown.split())


def test_what_does_not_fit_takes_no_time(project: Path) -> None:
    """89.7 GiB of weights and optimizer: too much for one card, but not for one of eight."""
    arguments = ("--card", "H100", "--ranks", "1,8")
    found = plan(project, *arguments)
    alone, sharded = found["scale"]
    for one in (found["run"], alone):
        assert not one["fits"]
        assert [one[name] for name in ("examples_per_s", "mfu", "time")] == [None] * 3
    assert (found["hours"], found["score_hours"]) == (None, None)
    assert sharded["fits"]
    (other,) = found["alternatives"]
    assert other["examples_per_s"] > 0
    assert sharded["examples_per_s"] > 0
    text = run(project, *arguments)
    assert re.search(rf"it does not fit\n.*\nto make it fit\n  {re.escape(other['overrides'])} \(", text, re.DOTALL)
    assert not re.search(r"one step +\d|the run|before it|speed  ", text)
    assert [line.split()[-5:-1] for line in text.splitlines() if line.startswith(" 1 fsdp")] == [["-"] * 4]
    assert text.endswith("\n-: does not fit\n")


def test_a_layout_that_a_run_would_refuse_takes_no_time(project: Path) -> None:
    """Memory is that of the steps looked at, and fits; a microbatch as large as asked for would not."""
    np.save(project / "lengths.npy", np.full((8, 3), 50))
    found = plan(project, "--gpus", "8", "layout.microbatch_tokens=2000000")
    assert sum(found["run"]["memory"].values()) < found["usable"]
    assert "a microbatch of 2000000 tokens does not fit" in found["notes"][0]
    assert (found["run"]["fits"], found["run"]["time"], found["hours"]) == (False, None, None)


def test_a_smaller_card_recomputes_layers_and_a_larger_one_none(project: Path) -> None:
    small, large = (plan(project, "--gpus", "8", "--card", "A100", "--memory", size) for size in ("40GB", "80GiB"))
    assert 0 < small["recompute"] <= small["layers"]
    assert large["recompute"] == 0
    for one in (small, large):
        assert one["run"]["fits"]
        assert one["run"]["largest_tokens"] <= one["microbatch_tokens"]
        assert one["microbatch_tokens"] <= one["largest_fit"]


@pytest.mark.parametrize("hard", [["--ranks", "4096"], ["--ranks", "16", "--network", "25"]])
def test_hsdp_wins_where_rings_are_long_or_links_are_slow(project: Path, hard: list[str]) -> None:
    fsdp, hsdp = plan(project, *hard, "layout.microbatch_tokens=4096")["scale"]
    assert (fsdp["parallel"], hsdp["parallel"], hsdp["shard"]) == ("fsdp", "hsdp", 8)
    assert hsdp["examples_per_s"] > fsdp["examples_per_s"]
    assert hsdp["time"]["network"] < fsdp["time"]["network"]


def test_optimizers_and_adapters_are_planned_for(project: Path) -> None:
    plain, small, tuned, packed = (
        plan(project, "--gpus", "8", *other)
        for other in (
            [],
            ["optim.kind=adamw_8bit"],
            ["model.adapter={rank: 16}"],
            ["model.adapter={rank: 16, quantize: nf4}"],
        )
    )
    assert small["run"]["memory"]["optimizer"] == pytest.approx(plain["run"]["memory"]["optimizer"] / 4, rel=0.02)
    assert tuned["run"]["memory"]["optimizer"] < 0.01 * plain["run"]["memory"]["optimizer"]
    assert tuned["run"]["flops"] < 0.7 * plain["run"]["flops"]
    assert packed["run"]["memory"]["weights"] / GIB == pytest.approx(0.516 * 6.98e9 / GIB + 1.96, rel=0.05)
    assert "4-bit weights" in packed["notes"][0]
    assert any("adapter" in note for note in plan(project)["notes"])


def test_lengths_come_from_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    model = tiny_folder(tmp_path / "model", "llama")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    record = json.dumps({"prompt": "Hello?", "chosen": "Yes.", "rejected": "No, not at all."})
    (tmp_path / "train.jsonl").write_text(f"{record}\n{record.replace('Hello', 'Good day')}\n")
    (tmp_path / "my.yaml").write_text(f"model: {{path: {model}}}\ndata: {{train: {tmp_path / 'train.jsonl'}}}\n")
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "my.yaml"), "--json"], catch_exceptions=False)
    found, busy = json.loads(result.output), ("products", "attention", "elementwise", "imbalance")
    assert found["examples"] == 2
    assert found["score_hours"] * 3600 == pytest.approx(sum(found["run"]["time"][n] for n in busy) / 3)
    assert found["steps"] == 1
    assert "float32" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--card", "H9000"], "--card H9000: unknown GPU. Use one of B200, H200"),
        (["--memory", "80"], "--memory 80: write a number and a unit, as in 80GB"),
        (["--memory", ".GB"], "--memory .GB: write a number and a unit, as in 80GB"),
        (["--network", "inf"], "--network: must be a number of Gb/s, as in 400; found inf."),
        (["--ranks", "8,x"], "--ranks 8,x: must be positive whole numbers"),
        (["--gpus", "2", "model.compute_dtype=float32", "layout.parallel=single"], "a plan for 2 GPUs"),
        (["--gpus", "6", "layout.parallel=hsdp", "layout.hsdp_shard=4"], "does not divide the number of processes, 6"),
        (["layout.microbatch_tokens=100"], "layout.microbatch_tokens is 100"),
        (["model.dtype=float64", "model.compute_dtype=null"], "float64 is for checks on a CPU"),
        (["--card", "A100", "model.compute_dtype=float8"], "needs a Hopper GPU or newer, not --card A100"),
    ],
)
def test_errors_say_what_to_do(project: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        run(project, *arguments)
    assert said in str(refusal.value)


@pytest.mark.parametrize("bad", [np.ones((4, 2), int), np.ones((0, 3), int), np.zeros((4, 3), int), np.ones((4, 3))])
def test_lengths_of_another_form_are_refused(project: Path, bad: Any) -> None:
    np.save(project / "lengths.npy", bad)
    with pytest.raises(DataError, match="three columns"):
        run(project)


@pytest.mark.parametrize("bad", [b"", b"PK\x03\x04", b"[[1, 2, 3]]"])
def test_a_file_without_lengths_is_refused(project: Path, bad: bytes) -> None:
    (project / "lengths.npy").write_bytes(bad)
    with pytest.raises(DataError, match="cannot be read"):
        run(project)


def test_several_arrays_are_no_lengths(project: Path) -> None:
    with (project / "lengths.npy").open("wb") as file:
        np.savez(file, lengths=np.ones((4, 3), int))
    with pytest.raises(DataError, match=r"cannot be read \(an archive of arrays\)"):
        run(project)


def test_memory_in_both_units_and_cards_in_any_case() -> None:
    assert parse_memory("80GB") == 80e9
    assert parse_memory("79.5 gib") == 79.5 * 2**30
    assert parse_memory(".5TB") == 5e11
    assert find_card("h100") is CARDS["H100"]
    assert find_card("RTX4090") is CARDS["RTX 4090"]
    with pytest.raises(ConfigError):
        parse_memory("0GB")
