"""A reader who follows the docs in a folder where every name that they use exists, with tiny content.

Commands run as they are written, with these exceptions: `--nproc` and torchrun's part are left out (one process here;
the tests of launchers start several), REPLACED and SHORTER.
"""

import ast
import contextlib
import inspect
import io
import json
import pkgutil
import re
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import yaml
from torch.distributed.run import get_args_parser

from isopref.config.load import read_values
from isopref.data.spot_checks import read_spot_checks
from isopref.testing.models import tiny_folder
from support.families import FAMILIES
from support.forked import run_script
from support.pages import Snippet
from support.project import Outcome, Project, Record, make_pairs

ROOT = Path(__file__).parents[2]
MODELS = ("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "some/model")
RUNS = ("runs/first", "runs/my-ID", "runs/reward", "A", "B", "RUN")
PROMPTS = [{"prompt": f"question {number}?"} for number in range(4)]
ANSWERS = ("p.answers.jsonl", "prompts.answers.jsonl", "prompts.judged.jsonl")
CONFIG = """\
model: {path: some/model}
data: {train: pairs.jsonl, eval: held_out.jsonl}
optim: {batch_size: 8}
run: {samples: 0}
"""  # my.yaml on pages without a config
REWARD = "def brevity(prompt, answers):\n    return [-len(one) for one in answers]\n"
REPLACED = {"JUDGE": "my_rewards:brevity", "CONFIG": "my.yaml", "/path/to/model": "some/model"}
SERVER = "http://localhost:8000/v1"
SHORTER = ("--max-tokens", "8")  # added to commands with one of these words: a random model seldom ends an answer
SAMPLING = {"sample", "rounds", "--win-rate"}
# What a snippet of Python takes for granted.
GIVEN = {
    "isopref.": "import isopref",
    "AutoModelForCausalLM": "from transformers import AutoModelForCausalLM",
    "DataCollatorForSeq2SeqDPO": "from isopref import DataCollatorForSeq2SeqDPO",
    "read_pairs": f"import sys; sys.path.append({str(ROOT / 'examples')!r}); from olmo_core_packed import read_pairs",
    "tokenizer=tokenizer": "from isopref.testing.models import byte_tokenizer; tokenizer = byte_tokenizer()",
    "dataset": "import json; dataset = [json.loads(line) for line in open('pairs.jsonl')]",
}
REFUSED_ON_CPUS = {"isopref train my.yaml layout.offload=true": "layout.offload: true has no effect on the CPU"}


class Shelf:
    """What all readers share: a model, a cache, runs, and a language model's server."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, url
        self.model = tiny_folder(
            folder / "model",
            num_hidden_layers=1,
            num_attention_heads=8,  # as many as the ranks of docs/multi-node.md that split them
            num_key_value_heads=8,
            head_dim=4,
            max_position_embeddings=1024,
        )
        self.run = cache(self._run)
        _copy_examples(folder / "examples")

    def _run(self, *overrides: str) -> Path:
        """A finished run."""
        folder = self.folder / f"reader{len(list(self.folder.glob('reader*')))}"
        return Reader(folder, self).train("run", "optim.max_steps=1", *overrides)


def _copy_examples(folder: Path) -> None:
    """The demo and the rounds, with a few records, a tiny model, and a reward for what that writes."""
    for name in ("demo", "rounds"):
        shutil.copytree(ROOT / "examples" / name, folder / name)
    (folder / "rounds" / "reward.py").write_text(REWARD.replace("brevity", "reward"))
    for file in folder.rglob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))
    for file in folder.rglob("*.yaml"):
        file.write_text(re.sub(r"package:\S+", MODELS[0], file.read_text()))


class Reader(Project):
    """Follows one snippet in a folder of its own."""

    def __init__(self, folder: Path, shelf: Shelf, config: str | None = None):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, shelf.model)
        self.shelf = shelf
        self.extra_env["ISOPREF_CACHE"] = str(shelf.folder / "cache")
        (folder / "my.yaml").write_text(config or CONFIG)
        (folder / "my_rewards.py").write_text(REWARD)
        (folder / "examples").symlink_to(shelf.folder / "examples")
        for name in MODELS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(shelf.model)
        self._write_data()

    def _write_data(self) -> None:
        pairs = make_pairs(40, seed=2)
        self.write_pairs("pairs.jsonl", pairs)
        self.write_pairs("held_out.jsonl", make_pairs(6, seed=3))
        self.write_pairs("math.jsonl", [{"question": one.pop("prompt"), **one} for one in make_pairs(40, seed=4)])
        for name in ("prompts.jsonl", "p.jsonl"):
            self.write_pairs(name, PROMPTS)
        self.write_pairs("spot_checks.jsonl", [{"prompt": "What is 1 plus 1?", "expect": "2"}])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(make_pairs(60, seed=5)), self.folder / "chat.parquet")
        (self.folder / "trl-lib/ultrafeedback_binarized").mkdir(parents=True)
        self.write_pairs("trl-lib/ultrafeedback_binarized/train.jsonl", pairs)

    def follow(self, snippet: Snippet) -> None:
        """Raise AssertionError if a snippet does not do what its page says."""
        how: dict[str, Callable[[Snippet], None]] = {
            "command": self._run_command,
            "python": self._run_python,
            "signature": check_signature,
            "yaml": self._plan,
            "json": self._read_records,
        }
        assert snippet.kind in how, UNKNOWN
        how[snippet.kind](snippet)

    def _run_command(self, snippet: Snippet) -> None:
        words = [REPLACED.get(word, word).replace(SERVER, self.shelf.url) for word in shlex.split(snippet.line)]
        if words[0] == "torchrun":
            words = _without_torchrun(words)
        assert words[0] == "isopref", UNKNOWN
        words = shlex.split(re.sub(r" --nproc[ =]\S+", "", shlex.join(words)))[1:]
        self._prepare(words)
        outcome = self.isopref(*words, *(SHORTER if SAMPLING & set(words) else ()))
        if snippet.line in REFUSED_ON_CPUS and not torch.cuda.is_available():
            assert outcome.code == 1
            assert REFUSED_ON_CPUS[snippet.line] in outcome.err
        elif not (snippet.inline and _is_mention(outcome)):
            assert outcome.code == 0, outcome.err

    def _prepare(self, words: list[str]) -> None:
        """Make what the command finds when its turn has come."""
        if words[0] == "init":
            (self.folder / "my.yaml").unlink()
        if words[0] == "ls":
            words = [*words, "runs/first"]
        if words[-1] == "--resume" and "my.yaml" in words:  # a run with only its export left to do
            assert self.isopref(*words[:-1]).code == 0
            (model,) = self.folder.glob("runs/*/model")
            shutil.rmtree(model)
        self._put_results(" ".join(words), adapter=words[0] == "merge")

    def _put_results(self, text: str, *, adapter: bool = False) -> None:
        """What earlier commands would have written, if the text names it: a command may also be the one that writes."""
        for name in RUNS:
            if _names(text, name):
                overrides = ["objective.loss=bradley_terry"] if "reward" in name else ["run.samples=1"]
                overrides += ["model.adapter.rank=2"] if adapter else []
                shutil.copytree(self.shelf.run(*overrides), self.folder / name, symlinks=True)
        for name in ANSWERS:
            if _names(text, name):
                self.write_pairs(
                    name, [{**one, "responses": ["yes", "no, never"], "scores": [2, 1]} for one in PROMPTS]
                )

    def _run_python(self, snippet: Snippet) -> None:
        self._put_results(snippet.text)
        text = snippet.text
        for name, replacement in REPLACED.items():
            text = text.replace(f'"{name}"', f'"{replacement}"')
        given = [line for name, line in GIVEN.items() if name in text]
        script = self.folder / "snippet.py"
        script.write_text("\n".join([*given, text]))
        outcome = run_script(self, script)
        assert outcome.code == 0, outcome.err

    def _plan(self, snippet: Snippet) -> None:
        """A config, or the part of one that the snippet shows in CONFIG, is planned for a machine with eight GPUs."""
        (self.folder / "snippet.yaml").write_text(snippet.text)
        sections = yaml.safe_load(CONFIG)
        for name, fields in read_values(self.folder / "snippet.yaml").items():
            shown = {field: value for field, value in fields.items() if value != "..."}
            sections[name] = {**sections.get(name, {}), **shown}
        (self.folder / "snippet.yaml").write_text(yaml.safe_dump(sections))
        outcome = self.isopref("plan", "snippet.yaml", "--card", "H100", "--gpus", "8")
        assert outcome.code == 0, outcome.err

    def _read_records(self, snippet: Snippet) -> None:
        """Records of training data, as `isopref data` reads them, or spot checks."""
        records = _records(snippet.text)
        self.write_pairs("records.jsonl", records)
        if "expect" in records[0]:
            with contextlib.chdir(self.folder):
                read_spot_checks("records.jsonl")
            return
        (self.folder / "tools.jinja").write_text(FAMILIES["qwen2.5"].template)
        settings = ["data.train=records.jsonl", "data.eval=null"]
        settings += ["data.template=tools.jinja"] if "tools" in records[0] else []
        settings += ["objective.loss=kto"] if "label" in records[0] else []
        outcome = self.isopref("data", "my.yaml", *settings)
        assert outcome.code == 0, outcome.err
        assert f"{len(records)} read" in outcome.out, outcome.out


UNKNOWN = "neither a snippet that support/reader.py can run nor one that NOT_RUN lists"


def _names(text: str, name: str) -> bool:
    """Whether a text has a name, or a path in the folder of that name."""
    return re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", text) is not None


def _without_torchrun(words: list[str]) -> list[str]:
    """The command that torchrun starts; torchrun's own parser checks its options."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parsed = get_args_parser().parse_args(words[1:])
        except SystemExit:
            raise AssertionError(f"torchrun: {said.getvalue()}") from None
    assert parsed.module, "torchrun: starts no module"
    return [parsed.training_script, *parsed.training_script_args]


def _is_mention(outcome: Outcome) -> bool:
    """Whether the text only names a command or one of its options."""
    return outcome.code == 2 and ("Missing" in outcome.err or "requires an argument" in outcome.err)


def _records(text: str) -> list[Record]:
    """One record over several lines, or one per line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def check_signature(snippet: Snippet) -> None:
    """A public name exists, and takes the parameters that docs/api.md shows."""
    name, bracket, rest = snippet.text.strip().partition("(")
    found = pkgutil.resolve_name(name)
    if bracket:
        (shown,) = ast.parse(f"def shown({rest}: ...").body
        assert isinstance(shown, ast.FunctionDef)
        parameters = {node.arg for node in ast.walk(shown.args) if isinstance(node, ast.arg)}
        taken = set(inspect.signature(found).parameters)
        assert parameters == taken, f"{name}: shown, not taken, or the other way round: {parameters ^ taken}"
