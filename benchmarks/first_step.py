"""Seconds from the start of `isopref train` to its first line, and to its first step, with cold and with warm caches.

    python benchmarks/bench.py --only first-step
    python benchmarks/first_step.py 1b

The command runs twice on a saved model with random weights and chat lengths, one step each: first with empty caches of
compiled code, then with those that the first run left. Reading the model from disk counts, but it was just written, so
it comes from the page cache.
"""

import argparse
import json
import os
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload

from isopref.testing.models import byte_tokenizer

PAIRS = 64


def prepare(shape: str, folder: Path) -> Path:
    """A model, pairs and a config in a folder. Returns the config."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload.model(shape, dtype=torch.bfloat16, device=device).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    random = np.random.RandomState(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for lengths in workload.lengths("chat", PAIRS):
            texts = ("".join(random.choice([*string.ascii_lowercase], size)) for size in lengths)
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")
    config = {
        "model": {"path": str(folder / "model"), "compute_dtype": "bfloat16", "dtype": "bfloat16"},
        "data": {"train": str(folder / "pairs.jsonl")},
        "optim": {"batch_size": PAIRS, "max_steps": 1},
        "run": {"export": False, "samples": 0, "save_every": 10**6},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def run(config: Path, caches: Path) -> dict[str, Any]:
    """Seconds to the first line and to the first step, and when each line was printed."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # not its default
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(caches / "flash"),
        "ISOPREF_CACHE": str(caches / "isopref" / str(time.time_ns())),  # tokens and references are made every time
        "PYTHONUNBUFFERED": "1",
    }
    folder = config.parent / f"run-{time.time_ns()}"
    command = [sys.executable, "-m", "isopref", "train", str(config), f"run.folder={folder}"]
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [(round(time.perf_counter() - begun, 2), line.rstrip()) for line in process.stdout]
    if process.returncode:
        raise RuntimeError("\n".join(text for _, text in lines[-20:]))
    first = next(seconds for seconds, text in lines if text.startswith("step 1/"))
    return {"first_line_s": lines[0][0], "first_step_s": first, "lines": lines}


def measure(shape: str, *, tiny: bool = False) -> dict[str, Any]:
    """Both runs."""
    with tempfile.TemporaryDirectory() as scratch:
        config = prepare("tiny" if tiny else shape, Path(scratch))
        caches = Path(scratch) / "caches"
        cold, warm = run(config, caches), run(config, caches)
    return {"cold": cold, "warm": warm, "first_step_s": warm["first_step_s"], "cold_first_step_s": cold["first_step_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=workload.SHAPES)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this on a CPU")
    args = parser.parse_args()
    print(json.dumps({**measure(args.shape, tiny=args.tiny), "about": workload.versions()}, indent=1))


if __name__ == "__main__":
    main()
