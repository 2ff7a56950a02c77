"""The command line, through the installed `isopref` script: messages, exit codes, files, imports."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from isopref import __version__
from isopref.cli.arguments import words
from isopref.cli.main import app
from isopref.config.load import load_config
from isopref.config.schema import run_id
from support.runs import make_run, noisy_metrics

SCRIPT = Path(sys.executable).with_name("isopref")
OPENING = re.compile(rf"^isopref {re.escape(__version__)}: (?:loading|starting) .*\n", re.MULTILINE)
Isopref = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def isopref(tmp_path: Path) -> Isopref:
    """Run the script in tmp_path; `build` is Python code that stands in for what the commands call.

    The line that a command opens with is in `args`.
    """

    def run(*arguments: str, build: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(tmp_path, build, env),
            capture_output=True,
            text=True,
            timeout=120,
        )
        done.args, done.stdout = OPENING.findall(done.stdout), OPENING.sub("", done.stdout)
        return done

    return run


def environment(folder: Path, build: str | None, extra: dict[str, str]) -> dict[str, str]:
    """Variables under which every Python process finds `build` in place of them."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | extra
    if build is not None:
        stub = folder / "stub"
        stub.mkdir(exist_ok=True)
        (stub / "standin.py").write_text(build)
        # Python runs sitecustomize at its start, in the ranks that torchrun starts too.
        (stub / "sitecustomize.py").write_text(
            "import sys, standin\n"
            "for name in ('train', 'cache', 'evaluate'):\n    sys.modules[f'isopref.build.{name}'] = standin\n"
        )
        env["PYTHONPATH"] = os.pathsep.join([str(stub), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.config.yaml"
    path.write_text("model: {path: m}\ndata: {train: d}\n")
    return path


# --- help and version ------------------------------------------------------------------------------


HELP = [["--help"], ["train", "--help"], ["init", "-h"], ["config", "--help"], ["eval", "-h"], ["cache", "--help"]]


HELP += [["cache", "ls", "-h"], ["data", "-h"], ["report", "-h"], ["ls", "-h"], ["compare", "-h"]]


@pytest.mark.parametrize("arguments", HELP)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    result = run_without_torch(arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: isopref")


def test_looking_at_runs_needs_no_torch(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "run", noisy_metrics(2)))
    for arguments in (["ls", str(tmp_path)], ["report", run], ["compare", run, run]):
        result = run_without_torch(arguments)
        assert result.returncode == 0, result.stderr


def run_without_torch(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that fails if something heavy was imported."""
    code = f"""
import sys
sys.argv = ["isopref", *{arguments!r}]
from isopref.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "transformers", "olmo_core", "pyarrow", "datasets"}} & set(sys.modules)
assert not heavy, heavy
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_shows_overrides(isopref: Isopref) -> None:
    text = isopref("train", "--help").stdout
    assert "isopref train my.yaml optim.lr=2e-6 objective.beta=0.3\n" in text
    assert "--resume" in text
    assert "--nproc" in text


def test_without_a_command_it_is_the_help(isopref: Isopref) -> None:
    result = isopref()
    assert (result.stdout + result.stderr).startswith("Usage: isopref [OPTIONS] COMMAND")
    assert "Traceback" not in result.stderr


def test_version(isopref: Isopref) -> None:
    result = isopref("--version")
    assert (result.returncode, result.stdout) == (0, f"isopref {__version__}\n")


def test_python_m_isopref() -> None:
    result = subprocess.run([sys.executable, "-m", "isopref", "--version"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, f"isopref {__version__}\n")


def test_wrong_usage_is_exit_code_2(isopref: Isopref, config_file: Path) -> None:
    for arguments in (["train"], ["train", str(config_file), "--nproc", "0"], ["trian"]):
        result = isopref(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--learning_rate", "--learning-rate", "--lr"])
def test_a_field_given_as_an_option(isopref: Isopref, config_file: Path, option: str) -> None:
    result = isopref("train", config_file.name, option, "1e-5")
    assert result.returncode == 2
    assert result.stderr.endswith(
        f"Error: No such option: {option}. To set a config field, write section.field=value, e.g. "
        "optim.lr=1e-6. Did you mean optim.lr=value?\n"
    )
    assert "section.field" not in isopref("ls", option).stderr  # no config there
    assert "section.field" not in isopref("train", config_file.name, "--nprocs", "2").stderr


# --- train -----------------------------------------------------------------------------------------

# One write each: ranks share the standard output.
SAY = "import sys\ndef say(*words): sys.stdout.write(' '.join(map(str, words)) + '\\n')\n"
REPORT = SAY + "def train(config, *, name, resume): say(config.optim.lr, config.data.columns, name, resume)"


def test_train_hands_over_config_name_and_resume(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, "optim.lr=2e-6", "data.columns.prompt=q", "--resume", build=REPORT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2e-06 {'prompt': 'q'} my.config must\n"
    assert isopref("train", config_file.name, build=REPORT).stdout == "1e-06 {} my.config no\n"


def test_a_command_opens_with_a_line_before_its_imports(isopref: Isopref, config_file: Path) -> None:
    loading = f"isopref {__version__}: loading PyTorch and transformers\n"
    result = isopref("train", config_file.name, build="raise ImportError('torch')")
    assert (result.args, result.returncode) == ([loading], 1)
    assert isopref("train", config_file.name, build=REPORT).args == [loading]
    assert isopref("train", config_file.name, build=REPORT, RANK="1").args == []  # its launcher said it
    several = isopref("train", config_file.name, "--nproc", "2", build=REPORT)
    assert several.args == [f"isopref {__version__}: starting 2 processes\n"]


@pytest.mark.parametrize(
    ("told", "handed_over"),
    [
        ((), "no"),
        (("--resume",), "must"),
        (("--resume", "optim.lr=1"), "must"),
        (("--resume", "auto"), "auto"),
        (("--resume=auto",), "auto"),
    ],
)
def test_values_of_resume(isopref: Isopref, config_file: Path, told: tuple[str, ...], handed_over: str) -> None:
    assert isopref("train", config_file.name, *told, build=REPORT).stdout.split()[-1] == handed_over


def test_resume_before_the_config_file(isopref: Isopref, config_file: Path) -> None:
    config_file.rename(config_file.with_name("plain"))
    result = isopref("train", "--resume", "plain", build=REPORT)
    assert result.stdout.split()[-2:] == ["plain", "must"], result.stderr


@pytest.mark.parametrize("told", [("--resume=latest",), ("--resume", "latest"), ("--resume=",), ("--resume", "12")])
def test_a_value_that_resume_does_not_have(isopref: Isopref, config_file: Path, told: tuple[str, ...]) -> None:
    result = isopref("train", config_file.name, *told, build=REPORT)
    found = told[-1].removeprefix("--resume=")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f'error: --resume: takes no value or "auto"; found "{found}". --resume resumes from the last intact '
        "checkpoint; --resume auto resumes the run if it exists and starts it otherwise.\n"
    )


def test_user_error_is_one_message_and_exit_code_1(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", "nowhere.yaml")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: nowhere.yaml: no such file. To create a starter config: isopref init nowhere.yaml\n"
    )
    result = isopref("train", config_file.name, "optim.lr=fast")
    assert result.returncode == 1
    assert result.stderr == (
        "error: override 'optim.lr=fast': optim.lr: must be a number, at least 0; found \"fast\".\n"
    )


FAIL = """
from isopref.errors import DataError
def train(config, *, name, resume): raise DataError("x.jsonl:3: bad")
"""


def test_user_error_from_the_run_names_the_rank(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, build=FAIL)
    assert (result.returncode, result.stderr) == (1, "error: x.jsonl:3: bad\n")
    result = isopref("train", config_file.name, build=FAIL, RANK="3")
    assert (result.returncode, result.stderr) == (1, "error on rank 3: x.jsonl:3: bad\n")


STOPPED = "import signal\ndef train(config, *, name, resume): return signal.SIGTERM"


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", LONG),
        ("init", "--demo", LONG),
        ("report", LONG),
        ("compare", LONG, LONG),
        ("ls", LONG),
        ("merge", LONG, "o"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_path_that_the_system_refuses_is_one_message(isopref: Isopref, arguments: tuple[str, ...]) -> None:
    done = isopref(*arguments)
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {LONG}\S*: File name too long\. Choose another path\.\n", done.stderr), done.stderr


def test_a_run_that_a_signal_stopped_is_no_success(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, build=STOPPED)
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "")


AGAIN = """
from isopref.errors import StartAgainError
import os
def train(config, *, name, resume):
    if StartAgainError.variable in os.environ:
        print("started again")
        return
    error = StartAgainError("no memory")
    error.at_once = "ASKED_TO_STOP" not in os.environ
    raise error
"""


def test_a_run_that_has_to_start_again(isopref: Isopref, config_file: Path) -> None:
    """One process does so itself; a rank leaves it to its launcher; one that was asked to stop ends."""
    result = isopref("train", config_file.name, build=AGAIN)
    assert (result.returncode, result.stdout, result.stderr) == (0, "started again\n", "warning: no memory\n")
    result = isopref("train", config_file.name, build=AGAIN, RANK="0")
    assert (result.returncode, result.stderr) == (75, "error: no memory\n")
    result = isopref("train", config_file.name, "--nproc", "2", build=AGAIN)
    assert (result.returncode, result.stdout) == (0, "started again\n" * 2), result.stderr
    result = isopref("train", config_file.name, build=AGAIN, ASKED_TO_STOP="1")
    assert (result.returncode, result.stderr) == (1, "error: no memory\n")


def test_fault_of_ours_keeps_its_traceback(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, build="def train(config, *, name, resume): 1 / 0")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_ctrl_c_is_exit_code_130(tmp_path: Path, config_file: Path) -> None:
    build = "import time\ndef train(config, *, name, resume): print('started', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [str(SCRIPT), "train", config_file.name],
        cwd=tmp_path,
        env=environment(tmp_path, build, {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background inherit an ignored SIGINT; a person at a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout
    assert OPENING.fullmatch(process.stdout.readline())
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr


# --- several processes -----------------------------------------------------------------------------


def test_nproc_runs_the_same_command_on_every_rank(isopref: Isopref, config_file: Path, tmp_path: Path) -> None:
    build = (
        "import os, pathlib\n"
        "def train(config, *, name, resume):\n"
        "    text = f'{os.environ[\"WORLD_SIZE\"]} {config.optim.lr} {name} {resume}'\n"
        "    pathlib.Path('rank' + os.environ['RANK']).write_text(text)\n"
    )
    result = isopref("train", config_file.name, "optim.lr=2e-6", "--nproc", "2", "--resume", build=build)
    assert result.returncode == 0, result.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("rank*")} == {
        "rank0": "2 2e-06 my.config must",
        "rank1": "2 2e-06 my.config must",
    }


def test_nproc_reports_a_failure_of_the_ranks(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, "--nproc", "2", build=FAIL)
    assert result.returncode == 1
    assert result.stderr == "error: x.jsonl:3: bad\n"  # once, and without torchrun's report


def test_nproc_checks_the_config_before_it_starts_anything(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, "optim.lr=fast", "--nproc", "2")
    assert result.returncode == 1
    assert result.stderr.startswith("error: override 'optim.lr=fast'")
    assert result.stderr.count("\n") == 1


def test_nproc_inside_torchrun_is_refused(isopref: Isopref, config_file: Path) -> None:
    result = isopref("train", config_file.name, "--nproc", "2", RANK="0")
    assert result.returncode == 1
    assert result.stderr.startswith("error: --nproc 2: this process was started by torchrun.")


EVALUATE = (
    SAY
    + """
def evaluate_model(config, *, name, model, reference_model, json_file):
    say(config.data.eval, name, model, reference_model, json_file)
def fill_cache(config, *, name): say("fill", name, config.optim.lr)
"""
)


def test_eval_and_cache_hand_over_their_arguments(isopref: Isopref, config_file: Path) -> None:
    options = ["--model", "m", "--reference", "r", "--json", "f"]
    result = isopref("eval", *options, config_file.name, "data.eval=e", build=EVALUATE)
    assert result.stdout == "e my.config m r f\n", result.stderr
    assert isopref("eval", config_file.name, "--model", "m", build=EVALUATE).stdout == "None my.config m None None\n"
    for command in (["cache"], ["cache", "fill"]):
        assert isopref(*command, config_file.name, "optim.lr=1", build=EVALUATE).stdout == "fill my.config 1.0\n"


@pytest.mark.parametrize("option", ["--model", "--reference"])
def test_eval_refuses_what_cannot_be_a_path(isopref: Isopref, config_file: Path, option: str) -> None:
    result = isopref("eval", config_file.name, "--model", "m", option, "~no_such_user/a", build=EVALUATE)
    assert (result.returncode, result.stdout) == (1, "")
    message = f"error: {option}: must be a path in a home folder that exists; found '~no_such_user/a'.\n"
    assert result.stderr == message


def test_a_misspelt_command_of_the_cache_is_no_config(isopref: Isopref, config_file: Path) -> None:
    assert "No such command 'verfiy'. Did you mean 'verify'?" in isopref("cache", "verfiy").stderr
    config_file.with_name("fill.yaml").write_text(config_file.read_text())
    assert isopref("cache", "fill.yaml", build=EVALUATE).stdout.startswith("fill fill ")


def test_eval_and_cache_start_ranks(isopref: Isopref, config_file: Path) -> None:
    options = ["--model", "m", "--reference", "r", "--json", "f", "--nproc", "2"]
    result = isopref("eval", config_file.name, "data.eval=e", *options, build=EVALUATE)
    assert result.stdout == "e my.config m r f\n" * 2, result.stderr
    result = isopref("cache", config_file.name, "optim.lr=1", "--nproc", "2", build=EVALUATE)
    assert result.stdout == "fill my.config 1.0\n" * 2, result.stderr


def test_a_path_without_access_is_one_message(isopref: Isopref, config_file: Path) -> None:
    build = "def train(*_, **__):\n    raise PermissionError(13, 'Permission denied', '/home/else/model')\n"
    done = isopref("train", config_file.name, build=build)
    assert done.returncode == 1
    way_out = "Check its permissions, or choose another path."
    assert done.stderr == f"error: /home/else/model: Permission denied. {way_out}\n"


def test_a_home_folder_in_an_option(isopref: Isopref, tmp_path: Path) -> None:
    """Shells leave the ~ of --out=~/FILE as it is, and a folder of that name is dangerous to remove."""
    make_run(tmp_path / "run", noisy_metrics(3))
    done = isopref("report", "run", "--out=~/found/report.html", HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home" / "found" / "report.html").exists()
    assert not (tmp_path / "~").exists()
    done = isopref("report", "run", "--out=~no_such_user/report.html")
    assert done.stderr == "error: ~no_such_user/report.html: there is no such home folder. Write the path without ~.\n"


def test_text_that_the_locale_cannot_print_is_escaped(isopref: Isopref, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "läuft", noisy_metrics(3))
    done = isopref("ls", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"runs/l\xe4uft" in done.stdout


# --- init and config -------------------------------------------------------------------------------


def test_init_writes_a_starter_once(isopref: Isopref, tmp_path: Path) -> None:
    assert isopref("init").returncode == 0
    assert load_config(tmp_path / "isopref.yaml", ["model.path=m", "data.train=d"]).model.path == "m"
    (tmp_path / "isopref.yaml").write_text("mine")
    result = isopref("init")
    assert result.returncode == 1
    assert result.stderr == (
        "error: isopref.yaml: already exists and will not be overwritten. Choose another name, or remove it.\n"
    )
    assert (tmp_path / "isopref.yaml").read_text() == "mine"
    assert isopref("init", "new/folder/my.yaml").returncode == 0
    assert (tmp_path / "new/folder/my.yaml").exists()


def test_init_in_a_place_that_cannot_be(isopref: Isopref, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = isopref("init", "file/my.yaml")
    assert result.returncode == 1
    assert result.stderr.startswith("error: file/my.yaml: cannot be written")


def test_init_demo_writes_a_config_and_its_data(isopref: Isopref, tmp_path: Path) -> None:
    result = isopref("init", "--demo", "some/where")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "some/where"
    assert sorted(path.name for path in folder.iterdir()) == [
        "demo.yaml",
        "eval.jsonl",
        "spot_checks.jsonl",
        "train.jsonl",
    ]
    config = load_config(folder / "demo.yaml")
    assert (config.data.train, config.data.eval) == ("some/where/train.jsonl", "some/where/eval.jsonl")
    assert result.stdout.endswith("\n  isopref train some/where/demo.yaml\n")
    assert config.run.spot_checks == "some/where/spot_checks.jsonl"


@pytest.mark.parametrize("name", ["demo.yaml", "train.jsonl", "eval.jsonl", "spot_checks.jsonl"])
def test_init_demo_overwrites_nothing(isopref: Isopref, tmp_path: Path, name: str) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / name).write_text("mine")
    result = isopref("init", "--demo")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: demo/{name}: already exists")
    assert [path.read_text() for path in (tmp_path / "demo").iterdir()] == ["mine"]


def test_config_prints_the_resolved_config_and_its_run_id(isopref: Isopref, config_file: Path) -> None:
    result = isopref("config", config_file.name, "optim.lr=2e-6")
    assert result.returncode == 0, result.stderr
    config = load_config(config_file, ["optim.lr=2e-6"])
    assert result.stdout.splitlines()[0] == f"# run id: {run_id(config)}"
    assert yaml.safe_load(result.stdout) == config.model_dump(mode="json")


def test_config_prints_the_parameters_of_the_loss(isopref: Isopref, config_file: Path) -> None:
    """The file has null for a parameter left at its default, which differs from loss to loss."""
    lines = isopref("config", config_file.name, "objective.label_smoothing=0.2").stdout.splitlines()
    assert lines[1:3] == ["# sigmoid: beta 0.1, label_smoothing 0.2, divergence reverse_kl", "model:"]
    lines = isopref("config", config_file.name, "objective.loss={simpo: 1, ipo: 0.5}").stdout.splitlines()
    assert lines[1:4] == ["# simpo: beta 2.0, gamma 1.0", "# ipo: beta 0.1", "model:"]


def test_help_lists_commands_in_the_order_of_a_project() -> None:
    group: Any = typer.main.get_command(app)
    listed = group.list_commands(None)
    assert [name for name in listed if name in ("init", "data", "train", "report", "push")] == [
        *("init", "data", "train", "report", "push")
    ]
    assert set(listed) == set(group.commands)
    for command in group.commands.values():
        assert len(command.help.partition("\n")[0]) <= 72, command.name  # fits a line of the list


def test_options_as_words_of_a_command_line() -> None:
    options = {"--prompts": Path("p.jsonl"), "--url": None, "--model": ("a", "b c"), "--seed": 0, "--top-p": 1.0}
    assert words(options) == ["--prompts", "p.jsonl", "--model", "a", "--model", "b c", "--seed", "0", "--top-p", "1.0"]
    assert words({"--model": ()}) == []
