"""What a report makes of a run: figures, curves, comparison, text that stays text."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from isopref.cli.report import compare
from isopref.errors import RunError
from isopref.report import charts
from isopref.report.charts import Line, fitted, over_steps
from isopref.report.compare import math_that_differs, parting
from isopref.report.curves import curves
from isopref.report.elements import element, fixed, join, number
from isopref.report.figures import duration, entries, field_rows, figure_rows
from isopref.report.html import page
from isopref.report.markdown import markdown
from isopref.runs.read import RunRecord, read_run
from isopref.runs.state import State
from isopref.runs.write import write_rewards
from support.runs import losses, make_run, noisy_metrics

MINUS = "\N{MINUS SIGN}"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m | `code` [a](b) @all"


# --- numbers and markup ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.69314718, "0.6931"),
        (-52.1, f"{MINUS}52.1"),
        (1e-6, f"1e{MINUS}6"),
        (1.23456e7, "1.235e7"),
        (0.0, "0"),
        (1234.5, "1234"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_durations() -> None:
    assert [duration(seconds) for seconds in (3.2, 59.6, 61, 3600, 7384)] == [
        *("3 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "2 h 3 min")
    ]


def test_fixed_figures() -> None:
    assert [fixed(value, 2, "+") for value in (0.5, -0.5, 0.001, -0.001)] == ["+0.50", f"{MINUS}0.50", "0.00", "0.00"]


def test_text_is_escaped_once_and_markup_is_not() -> None:
    inner = element("b", "<i> & \x1b")
    assert inner == "<b>&lt;i&gt; &amp; \\x1b</b>"
    assert join(inner, "<") == "<b>&lt;i&gt; &amp; \\x1b</b>&lt;"
    assert element("p", class_='"x"', data_a=1, title=None) == '<p class="&quot;x&quot;" data-a="1"></p>'


def test_a_sample_without_a_drawn_answer(tmp_path: Path) -> None:
    sample = dict.fromkeys(("prompt", "greedy_before", "greedy_after"), "yes")
    html = page([read_run(make_run(tmp_path / "run", losses([0.7]), samples=[sample]))])
    assert html.count("<pre>") == 2
    assert "sampled answers" not in html


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    sample = dict.fromkeys(("prompt", "greedy_before", "greedy_after", "sampled_before", "sampled_after"), HOSTILE)
    state = State("failed", 1, 2, 1.0, HOSTILE)
    folder = make_run(
        tmp_path / "a<b>", losses([0.7]), settings={"model": {"path": HOSTILE}}, state=state, samples=[sample]
    )
    run = read_run(folder)
    html = page([run])
    assert html.count("<script") == 2  # the page's own: data, and code
    assert "<img" not in html
    assert "\x1b" not in html
    assert "&lt;img src=x onerror=alert(2)&gt;" in html
    assert html.count("<pre>") == 4  # greedy and drawn, before and after
    text = markdown([run])
    assert "<img" not in text
    assert "\\| \\`code\\` \\[a\\](b) @\u200ball" in text
    table = [line for line in text.splitlines() if "onerror" in line and line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4) for line in table)


def test_a_name_that_would_end_the_script(tmp_path: Path) -> None:
    """Two runs of one name are told apart by their paths, and a path can hold what ends a script."""
    runs = [read_run(make_run(tmp_path / name / "script>", losses([0.7]))) for name in ("a<", "b<")]
    html = page(runs)
    assert html.count("</script>") == html.count("<script") == 2
    assert "a\\u003c/script>" in html


# --- charts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], [0, 0.25, 0.5, 0.75, 1]),
        ([0.12, 0.69], [0, 0.2, 0.4, 0.6, 0.8]),
        ([-155.6, -30.0], [-200, -150, -100, -50, 0]),
        ([1e-7, 3e-5], [0, 1e-5, 2e-5, 3e-5]),
    ],
)
def test_scales_begin_and_end_on_round_ticks(values: list[float], ticks: list[float]) -> None:
    scale = fitted(values, 100, 0)
    assert scale.ticks == pytest.approx(ticks)
    assert (scale(ticks[0]), scale(ticks[-1])) == pytest.approx((100, 0))


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.0], [math.nan], [39.4, 39.4 + 1e-12]])
def test_scales_of_one_value_have_a_width(values: list[float]) -> None:
    scale = fitted(values, 0, 1)
    assert scale.high > scale.low


def commands(svg: str, style: str = "line") -> list[str]:
    found = re.search(rf'<path d="([^"]*)" class="{style} ', svg)
    assert found
    return re.findall(r"[ML]", found[1])


def test_every_point_of_a_line_is_drawn() -> None:
    figure, data = over_steps("Loss", [Line("training", range(1, 2001), np.linspace(1, 0, 2000).tolist())], "loss")
    assert commands(figure) == ["M"] + ["L"] * 1999
    assert data["lines"][0]["x"] == list(range(1, 2001))


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    figure, data = over_steps("Loss", [Line("training", [1, 2, 3, 4], [1.0, math.nan, 0.5, 0.25])], "loss")
    assert commands(figure) == ["M", "M", "L"]
    assert json.loads(json.dumps(data, allow_nan=False))["lines"][0]["y"] == [1.0, None, 0.5, 0.25]


def test_a_very_long_line_keeps_its_extremes_and_ends() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    values[[12_345, 40_001]] = 50, -60
    _, data = over_steps("Loss", [Line("training", range(50_000), values.tolist())], "loss")
    x, y = data["lines"][0]["x"], data["lines"][0]["y"]
    assert len(x) <= charts.MOST_POINTS
    assert x == sorted(x)
    assert (x[0], x[-1]) == (0, 49_999)
    assert (x[y.index(50)], x[y.index(-60)]) == (12_345, 40_001)


def test_the_trend_of_a_very_long_line_is_that_of_all_its_points() -> None:
    """Nine in ten values are 0, one is 1: the mean is 0.1, though half of the points that are drawn are 1."""
    values = [float(n % 10 == 0) for n in range(50_000)]
    figure, _ = over_steps("Loss", [Line("training", range(50_000), values, noisy=True)], "loss")
    assert re.findall(r'class="end [^"]*">([^<]*)<', figure) == ["0.0999"]  # 100 ones of the last 1,001


def test_a_trend_is_the_mean_around_each_value() -> None:
    values = [float(n % 2) for n in range(200)]  # 0 1 0 1: of a 25th, 4 on either side, a window has 4 or 5 ones
    trend = Line("", range(200), values, noisy=True).trend
    assert trend is not None
    assert trend[100] == pytest.approx(4 / 9)
    assert trend[101] == pytest.approx(5 / 9)
    assert trend[0] == pytest.approx(2 / 5)  # 0 1 0 1 0
    assert Line("", range(200), values).trend is None
    assert Line("", range(100), values[:100], noisy=True).trend is None


def test_a_run_that_has_only_begun_can_be_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    for name in ("evaluation.json", "rewards.npz", "samples.jsonl", "starts.jsonl", "state.json"):
        (folder / name).unlink()
    run = read_run(folder)
    assert run.status == "unknown"
    assert "<h1>run</h1>" in page([run])
    assert markdown([run]).startswith("## run\n")


def test_a_run_that_diverged_can_be_shown(tmp_path: Path) -> None:
    """Just then one looks. A drawing has no place for what is not finite."""
    lines = [{**line, "train/loss": math.nan, "train/margin": -math.inf} for line in noisy_metrics(5)]
    folder = make_run(tmp_path / "run", lines)
    figures = json.loads((folder / "evaluation.json").read_text())
    figures["after"]["loss"] = dict.fromkeys(("value", "low", "high"), math.nan)
    (folder / "evaluation.json").write_text(json.dumps(figures))
    after = np.ones((40, 2))
    after[:3, 0] = math.nan
    write_rewards(folder, np.full((40, 2), 7), np.zeros((40, 2)), after)
    html = page([read_run(folder)])
    assert not re.findall(r'="[^"]*\b(?:nan|inf)', html)
    assert "3 pairs with non-finite rewards are left out." in html
    assert "<td>nan<small>nan to nan</small></td>" in html
    assert "nan" in markdown([read_run(folder)])


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="lays the page out in Chromium")
@pytest.mark.parametrize("width", [500, 600, 1200])
def test_labels_of_figures_keep_their_words_whole(tmp_path: Path, width: int) -> None:
    """Of two words, the label has two lines at most; broken by letters it had nine and more."""
    measure = (
        "<script>document.title = [...document.querySelectorAll('.figures tbody th')]"
        ".map(th => th.getClientRects()[0].height / parseFloat(getComputedStyle(th).lineHeight)).join()</script>"
    )
    file = tmp_path / "page.html"
    html = page([read_run(make_run(tmp_path / "run", noisy_metrics(3)))])
    file.write_text(html.replace("Content-Security-Policy", "none") + measure)  # which runs the page's own script alone
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(CHROMIUM), *options, f"--window-size={width},900", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search("<title>([^<]+)</title>", shown)
    assert title
    lines = [float(height) for height in title[1].split(",")]
    assert len(lines) == 2  # preference accuracy, loss
    assert max(lines) < 3  # with padding


# --- several runs ------------------------------------------------------------------------------------


def test_runs_with_other_held_out_pairs_each_say_how_many(tmp_path: Path) -> None:
    """The title had the first run's number, as if all were measured on the same pairs."""
    runs = [read_run(make_run(tmp_path / name, noisy_metrics(3))) for name in ("a", "b")]
    assert "<h2>40 held-out pairs</h2>" in page(runs)
    runs[1].evaluation["after"]["pairs"] = 7
    html = page(runs)
    assert "<h2>Held-out metrics</h2>" in html
    assert "a: 40 held-out pairs. b: 7 held-out pairs." in html


@pytest.mark.parametrize("left_out", ["speed/mfu", "speed/"])
def test_runs_without_mfu_or_without_any_speed(tmp_path: Path, left_out: str) -> None:
    """As a run on a CPU has no MFU; alone, and beside one that has it."""
    lines = [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in noisy_metrics(3)]
    cpu = read_run(make_run(tmp_path / "cpu", lines))
    gpu = read_run(make_run(tmp_path / "gpu", noisy_metrics(3)))
    assert "MFU" not in page([cpu])
    assert "MFU" in page([cpu, gpu])
    for runs in ([cpu], [cpu, gpu]):
        assert "MFU" not in markdown(runs)


def test_math_that_differs(tmp_path: Path) -> None:
    first = read_run(make_run(tmp_path / "a", losses([0.7]), settings={"optim": {"lr": 1e-6}}))
    settings: dict[str, dict[str, object]] = {
        "optim": {"lr": 2e-6},
        "layout": {"rows": "padded"},
        "run": {"folder": "x"},
    }
    second = read_run(make_run(tmp_path / "b", losses([0.7]), settings=settings))
    assert [(row.name, row.values) for row in math_that_differs([first, second])] == [("optim.lr", [1e-6, 2e-6])]
    assert math_that_differs([first, first]) == []
    layout = [row.name for row in field_rows([first, second], math=False) if row.differs]
    assert layout == ["layout.rows", "run.folder"]
    html = page([first, second])
    assert html.count('<tr class="differs">') == 5  # the rate twice, the two of the layout, the run id
    assert "The math that differs" in html


def test_a_default_written_out_is_the_same_math(tmp_path: Path) -> None:
    """simpo has beta 2 and gamma 1 where nothing is said."""

    def run(name: str, **objective: object) -> RunRecord:
        return read_run(
            make_run(tmp_path / name, losses([0.7]), settings={"objective": {"loss": "simpo", **objective}})
        )

    bare, same, other = run("a"), run("b", beta=2.0, gamma=1.0), run("c", beta=2.0, gamma=0.5)
    assert math_that_differs([bare, same]) == []
    found = [(row.name, row.values) for row in math_that_differs([bare, other])]
    assert found == [("objective.gamma", [None, 0.5])]
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text().replace("loss: simpo", "loss: of_a_later_version"))
    names = [row.name for row in math_that_differs([bare, read_run(tmp_path / "b")])]
    assert names == ["objective.loss", "objective.beta", "objective.gamma"]


def test_other_pairs_are_other_math(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, losses([0.7])) for name in "ab"]
    starts = runs[1] / "starts.jsonl"
    starts.write_text(starts.read_text().replace('"d1"', '"d2"'))
    differing = math_that_differs([read_run(folder) for folder in runs])
    assert [(row.name, row.values) for row in differing] == [("training pairs (digest)", ["d1", "d2"])]


@pytest.mark.parametrize(
    ("dtype", "gap", "step"),
    [("float64", 1e-5, 3), ("float32", 1e-5, None), ("float32", 1e-3, 3), ("bfloat16", 1e-2, None)],
)
def test_where_curves_part(tmp_path: Path, dtype: str, gap: float, step: int | None) -> None:
    """From step 3 on they are `gap` apart; one of them logs steps 2 and 3 together, as their mean."""
    settings = {"model": {"dtype": dtype}}
    a = make_run(tmp_path / "a", losses([0.7, 0.6, 0.5, 0.4]), settings=settings)
    b = make_run(
        tmp_path / "b",
        [line for line in losses([0.7, 9.0, 0.55 + gap, 0.4 + gap]) if line["step"] != 2],
        settings=settings,
    )
    found = parting(read_run(a), read_run(b))
    assert found is not None
    assert (found.num_steps, found.step) == (3, step)
    assert found.largest == pytest.approx(gap)


def test_steps_that_both_skipped_do_not(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / name, losses([0.7, math.nan, 0.5])) for name in "ab")
    found = parting(read_run(a), read_run(b))
    assert found is not None
    assert (found.step, found.largest) == (None, 0.0)


def test_a_loss_that_is_not_finite_parts_the_curves(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / str(end), losses([0.7, end])) for end in (0.6, math.nan))
    found = parting(read_run(a), read_run(b))
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize(("steps", "said"), [((1, 3, 6), "3 and 1"), ((1, 3, 5, 6), None)])
def test_compare_says_where_means_are_over_other_steps(
    tmp_path: Path, steps: tuple[int, ...], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines are at the first step, at every third or second, and at the last: the mean since the line before."""
    every = losses([0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    a = make_run(tmp_path / "a", [line for line in every if line["step"] in steps])
    compare(a, make_run(tmp_path / "b", every))
    notes = [line for line in capsys.readouterr().out.splitlines() if "run.log_every" in line]
    expected = f"Training metrics are means since the last line (run.log_every): {said} steps."
    assert notes == ([] if said is None else [expected])


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", losses([0.7])))
    with pytest.raises(RunError, match="7 runs are too many for one report, which shows up to 6"):
        page([run] * 7)


def test_losses_that_are_added_are_written_as_in_a_config(tmp_path: Path) -> None:
    settings = {"objective": {"loss": {"sigmoid": 1.0, "hinge": 0.5}}}
    run = read_run(make_run(tmp_path / "run", losses([0.7]), settings=settings))
    assert " · {sigmoid: 1.0, hinge: 0.5}, weighted by example" in page([run])


def test_figures_in_markdown(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "my run", noisy_metrics(3)))
    text = markdown([run])
    assert "| preference accuracy | 0.500 (0.450 to 0.550) | 0.900 (0.850 to 0.950) |" in text
    assert "| model.path | m |" in text
    assert [row.label for row in figure_rows(run)] == ["preference accuracy", "loss"]


# --- charts --------------------------------------------------------------------------------------------


def test_held_out_curves_begin_before_training(tmp_path: Path) -> None:
    metrics = [{"step": step, "train/loss": 0.6, "eval/loss": 0.8 - 0.1 * step} for step in (1, 2)]
    _, data = curves(entries([read_run(make_run(tmp_path / "run", metrics))]))
    training, held_out = data["loss"]["lines"]
    assert (training["x"], held_out["x"]) == ([1, 2], [0, 1, 2])
    assert held_out["y"] == pytest.approx([0.5, 0.7, 0.6])  # what was evaluated before training, and at both steps


def test_strips_of_intervals_have_a_scale() -> None:
    scale = charts.fitted([-0.5, 1.5], 0, 100)
    strip = charts.intervals([({"value": 0.5, "low": 0.25, "high": 0.75}, "was")], scale)
    assert re.findall(r'x="([^"]*)" y="22" text-anchor="middle">([^<]*)<', strip) == [
        ("0.00%", f"{MINUS}0.5"),
        ("25.00%", "0"),
        ("50.00%", "0.5"),
        ("75.00%", "1"),
        ("100.00%", "1.5"),
    ]
    assert 'cx="50.00%"' in strip
    assert 'x1="25.00%" x2="25.00%" y1="0" y2="13" class="zero"' in strip


def test_interval_plots_span_all_that_a_share_can_be(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", noisy_metrics(3)))
    accuracy, loss = re.findall(r'<svg (?=[^>]*class="strip").*?</svg>', page([run]))
    ticks = [re.findall(r'text-anchor="middle">([^<]*)<', strip) for strip in (accuracy, loss)]
    assert ticks[0] == ["0", "0.25", "0.5", "0.75", "1"]
    assert ticks[1] == ["0.4", "0.6", "0.8", "1"]  # 0.45 to 0.95


def test_several_runs_share_a_scale_and_have_one_row_each_at_the_top(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, noisy_metrics(3))) for name in "abc"]
    html = page(runs)
    overview = html[html.index('class="overview"') : html.index("</table>")]
    assert overview.count("<tr>") == 1 + 3
    strips = re.findall(r'<svg (?=[^>]*class="strip").*?</svg>', html)
    assert [strip.count("<text") for strip in strips] == [5, 0, 0, 0, 4, 0, 0, 0]  # the numbers stand once, above


def test_rewards_of_a_reward_model_are_not_in_nats(tmp_path: Path) -> None:
    policy = page([read_run(make_run(tmp_path / "policy", noisy_metrics(3)))])
    settings = {"objective": {"loss": "bradley_terry"}}
    rewards = page([read_run(make_run(tmp_path / "rewards", noisy_metrics(3), settings=settings))])
    assert "nats times beta" in policy
    assert "nats times beta" not in rewards


def test_axes_are_named(tmp_path: Path) -> None:
    html = page([read_run(make_run(tmp_path / "run", noisy_metrics(20)))])
    for title in ("step", "reward", "tokens of the answer"):
        assert f">{title}</text>" in html
    assert "<small>share of answers</small>" in html


def test_names_of_fields_are_broken_at_their_joints(tmp_path: Path) -> None:
    html = page([read_run(make_run(tmp_path / "run", noisy_metrics(20)))])
    assert '<th class="field">objective.<wbr>nll_<wbr>weight</th>' in html


def test_hints_fit_the_device(tmp_path: Path) -> None:
    html = page([read_run(make_run(tmp_path / "run", noisy_metrics(20)))])
    assert '<span class="mouse">Point at a chart' in html
    assert '<span class="touch">Tap a chart' in html
