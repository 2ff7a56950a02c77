"""Figures that README and other pages quote are those that the benchmarks wrote."""

import importlib
import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]


def speed_rows(page: str) -> list[list[str]]:
    """The cells of README's speed table, row by row."""
    table = page[page.index("| pairs/s |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def test_speed_figures_are_the_measured_ones() -> None:
    """README and RESULTS.md quote benchmarks/measured.json, which bench.py wrote, rounded."""
    measured = json.loads((ROOT / "benchmarks" / "measured.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = speed_rows((ROOT / "README.md").read_text())
    for cell, (_, isopref, *peers) in zip(("1b-chat", "1b-hh", "8b-chat", "8b-lora"), rows, strict=True):
        ours = speed[cell, "isopref"]
        assert float(isopref) == rounded(ours, isopref)
        for system, text in zip(("trl", "trl-liger"), peers, strict=True):
            assert bool(text) == ((cell, system) in speed), (cell, system)
            if text:
                pairs_per_s, ratio = re.fullmatch(r"([\d.]+) \(([\d.]+)x\)", text).groups()  # type: ignore[union-attr]
                theirs = speed[cell, system]
                assert float(pairs_per_s) == rounded(theirs, pairs_per_s)
                assert float(ratio) == rounded(ours / theirs, ratio)
                assert f"{ours / theirs:.2f}x as fast" in results


def test_figures_of_lists_labels_and_rewards_are_the_measured_ones() -> None:
    """README and RESULTS.md quote benchmarks/measured_tasks.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_tasks.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): 1 / one["step_s"] for one in measured}
    results, readme = ((ROOT / name).read_text() for name in ("benchmarks/RESULTS.md", "README.md"))
    ratios = {
        (cell, system): speed[cell, "isopref"] / theirs
        for (cell, system), theirs in speed.items()
        if system != "isopref"
    }
    assert len(ratios) >= 5
    for ratio in ratios.values():
        assert f"{ratio:.2f}x as fast" in results
    for quoted in (("1b-lists", "trl"), ("1b-kto", "trl-liger"), ("1b-reward-chat", "trl"), ("1b-reward-hh", "trl")):
        assert f"{ratios[quoted]:.1f}" in readme


def test_figures_of_late_divergence_are_the_measured_ones() -> None:
    """RESULTS.md, README and docs/conversations.md quote benchmarks/measured_agents.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_agents.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("diverge late")[1].split("\n## ")[0]
    for one in measured:
        assert f"{one['pairs_per_s']:.3g} | {one['peak_memory_gib']:.1f}" in results, one["system"]
    ratios = {key: speed[key[0], "isopref"] / theirs for key, theirs in speed.items() if key[1].startswith("trl")}
    for ratio in ratios.values():
        assert f"{ratio:.2f}x as fast" in results
    page, readme = ((ROOT / name).read_text() for name in ("docs/conversations.md", "README.md"))
    assert f"{ratios['1b-agents', 'trl']:.1f} times as fast as with TRL and" in page
    assert f"{ratios['1b-agents-16', 'trl-liger']:.1f} times as fast as with TRL and Liger" in page
    assert f"diverge late | {ratios['1b-agents', 'trl']:.1f} times as fast as TRL |" in readme


def test_figures_of_rows_are_the_measured_ones() -> None:
    """RESULTS.md quotes benchmarks/measured_layouts.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_layouts.json").read_text())["results"]
    speed = {(one["model"], one["layout"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("## Shared rows compared")[1].split("\n## ")[0]
    assert len(speed) >= 6
    for one in measured:
        line = f"| {one['pairs_per_s']:.1f} | {one['peak_memory_gib']:.1f} |"
        if one["layout"] != "shared":
            line += f" {speed[one['model'], 'shared'] / one['pairs_per_s']:.2f}x as fast |"
        assert line in results, one
    steps = next(one["steps_s"] for one in measured if (one["model"], one["layout"]) == ("lfm2", "padded-compiled"))
    others = sorted(steps)[:-1]
    steady = 64 * len(others) / sum(others)
    assert f"took {max(steps)} s" in results
    assert f"runs at {steady:.1f} pairs/s" in results
    assert f"about {speed['lfm2', 'shared'] / steady:.1f} times as fast" in results


def test_figures_of_long_pairs_are_the_measured_ones() -> None:
    """RESULTS.md quotes benchmarks/measured_long.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_long.json").read_text())["results"]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("\n## Long pairs")[1].split("\n## ")[0]
    assert len(measured) >= 4
    for one in measured:
        assert (
            not one["fits"] or f"| {one['tokens']:,} | {one['step_s']:.2f} | {one['peak_memory_gib']:.1f} |" in results
        ), one
    isopref, trl = (
        [one["step_s"] for one in measured if (one["kind"], one["tokens"]) == (kind, 32768)]
        for kind in ("8b-lora", "trl-8b-lora")
    )
    assert f"isopref is {min(trl) / min(isopref):.2f}x as fast" in results
    assert f"| {min(trl) / max(isopref):.2f}x |" in results  # where both recompute all layers
    stayed, left = (one["step_s"] for one in measured if (one["kind"], one["tokens"]) == ("8b-lora", 65536))
    assert f"| {left / stayed - 1:.1%} slower |" in results


def test_sentences_about_speed_are_the_measured_ones() -> None:
    """What README says beside its table: the range of ratios, the card and the day."""
    measured = json.loads((ROOT / "benchmarks" / "measured.json").read_text())
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured["results"]}
    ratios = [speed[cell, "isopref"] / theirs for (cell, system), theirs in speed.items() if system.startswith("trl")]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times the speed of TRL" in readme
    card = measured["about"]["device"].removeprefix("NVIDIA ")
    assert f"One {card}, {measured['about']['date']}, compared with TRL {measured['about']['trl'][:4]}" in readme


def test_figures_of_float8_are_the_measured_ones() -> None:
    """docs/concepts.md and NOTES.md quote benchmarks/measured_float8.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_float8.json").read_text())["results"]
    speed = {one["system"]: one["pairs_per_s"] for one in measured if one.get("cell") == "8b-chat"}
    concepts, notes = ((ROOT / name).read_text() for name in ("docs/concepts.md", "benchmarks/NOTES.md"))
    assert f"{speed['isopref']:.1f} to {speed['isopref-float8']:.1f} pairs/s" in notes
    ratio = speed["isopref-float8"] / speed["isopref"]
    assert f"it trains {int(100 * ratio) / 100} times as many pairs per second" in concepts
    adapted = {one["system"]: one["step_s"] for one in measured if one.get("cell") == "8b-lora"}
    saved = 1 - adapted["isopref-float8"] / adapted["isopref"]
    assert f"LoRA in [float8](docs/concepts.md#float8) {saved:.0%} less" in " ".join(
        (ROOT / "README.md").read_text().split()
    )
    assert f"and {int(100 / (1 - saved)) / 100} times as many with LoRA" in concepts
    layouts = {one["precision"]: one["layouts"] for one in measured if "precision" in one}
    both = [[one["gradient"] for one in layouts[name].values()] for name in ("bfloat16", "float8")]
    for half, narrow in zip(*both, strict=True):
        assert f"| {half:.1g} | {narrow:.2f} |" in concepts


def test_figures_of_models_are_the_measured_ones() -> None:
    """RESULTS.md and README quote benchmarks/measured_models.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_models.json").read_text())["results"]
    found = {(one["cell"], one["system"]): one for one in measured}
    results, readme = ((ROOT / name).read_text() for name in ("benchmarks/RESULTS.md", "README.md"))
    trl = found["olmoe-chat", "trl"]
    ours, theirs = found["olmoe-chat", "isopref"]["pairs_per_s"], trl["pairs_per_s"]
    by_attention = [trl["pairs_per_s_by_attention"][name] for name in ("cudnn", "no_cudnn")]
    speeds = " | ".join(f"{speed:.2f}" for speed in (theirs, *by_attention))
    assert f"| {speeds} | {trl['peak_memory_gib']:.1f} | {ours / theirs:.2f}x as fast |" in results
    assert f"6.9B weights | {ours / theirs:.1f} times as fast as TRL," in readme
    lora, qlora = (found[cell, "isopref"] for cell in ("8b-lora", "8b-qlora"))
    for one in (lora, qlora):
        slower = one["step_s"] / lora["step_s"]
        assert f"| {one['pairs_per_s']:.1f} | {one['peak_memory_gib']:.1f} | {slower:.2f} |" in results
    assert f"QLoRA takes {qlora['step_s'] / lora['step_s'] - 1:.0%} more time than LoRA" in " ".join(readme.split())


def test_figures_of_the_real_training_are_the_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """RESULTS.md and README quote benchmarks/measured_hh.json, which bench.py wrote; so does the picture."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hh_curves = importlib.import_module("hh_curves")
    runs = json.loads((ROOT / "benchmarks" / "measured_hh.json").read_text())["results"]
    found = hh_curves.summary(runs, runs[0]["plan"]["batch_size"])
    results, readme = (" ".join((ROOT / name).read_text().split()) for name in ("benchmarks/RESULTS.md", "README.md"))
    ours, theirs, beside = found["isopref"], found["trl-liger"], found["beside_isopref"]["trl-liger"]
    steady = theirs["steady_pairs_per_s"], ours["steady_pairs_per_s"]
    for line in (
        f"| {median(ours['train_s']):.1f} s | {median(theirs['train_s']):.1f} s | {beside['train_s_ratio']:.2f} times",
        f"| {steady[1]:.0f} | {steady[0]:.0f} | isopref is {steady[1] / steady[0]:.2f}x as fast |",
        f"| {ours['peak_memory_gib']:.1f} GiB | {theirs['peak_memory_gib']:.1f} GiB |",
        f"| {median(ours['final_loss']):.3f} | {median(theirs['final_loss']):.3f} |",
        f"| {median(ours['final_accuracy']):.3f} | {median(theirs['final_accuracy']):.3f} |",
        f"{beside['eval_loss_difference']['mean']:.4f} on average and by {beside['eval_loss_difference']['max']:.4f}",
        f"differs by {beside['eval_accuracy_difference']['mean']:.3f} on average",
        f"held-out loss was {found['isopref-float8']['final_loss'][0]:.3f}",
    ):
        assert line in results, line
    assert f"{steady[1] / steady[0]:.1f} times the speed of TRL with Liger" in readme
    assert f"losses of isopref and TRL agree to {beside['eval_loss_difference']['max']:.3f}" in readme
    assert f"{median(ours['train_s']):.1f} instead of {median(theirs['train_s']):.1f} s" in readme
    assert (ROOT / "docs" / "hh-training.svg").read_text() == hh_curves.picture(runs)


def rounded(value: float, like: str) -> float:
    """A value with as many decimals as a text has."""
    return round(value, len(like.partition(".")[2]))
