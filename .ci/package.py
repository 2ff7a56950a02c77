"""Try a wheel as a user would: in an empty environment, with only its declared dependencies.

    python .ci/package.py WHEEL FOLDER lowest|newest

`lowest` installs the lowest versions that pyproject.toml allows, `newest` the newest; both use the torch version in
constraints.txt. Then it runs `isopref init --demo` and two training steps with a tiny model. FOLDER must not exist.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = """
from pathlib import Path
from isopref.testing.models import tiny_folder
tiny_folder(Path("tiny"), max_position_embeddings=2048)
"""
TRAIN = (
    *("isopref", "train", "demo/demo.yaml", "model.path=tiny", "optim.max_steps=2", "run.folder=run", "run.samples=1"),
    "run.device=cpu",
)


def main(wheel: Path, folder: Path, versions: str) -> None:
    """Install the wheel and use it. Raises CalledProcessError if a command fails."""
    folder.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    programs = (folder / "venv" / "bin").resolve()
    # Without anything from this checkout or from the environment that runs this script.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {
        "PATH": f"{programs}:{env['PATH']}",
        "ISOPREF_CACHE": str(folder.resolve() / "cache"),
        "HF_HUB_OFFLINE": "1",
    }

    def run(*command: str) -> None:
        print("$", *("..." if "\n" in word else word for word in command), flush=True)
        subprocess.run([str(programs / command[0]), *command[1:]], cwd=folder, env=env, check=True)

    (folder / "constraints.txt").write_text(constraints(versions))
    pip = ("python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-c", "constraints.txt", str(wheel.resolve()))
    run(*pip, "check")
    run("isopref", "--version")
    run("isopref", "init", "--demo", "demo")
    run("python", "-c", TINY)
    run(*TRAIN)
    for made in ("run/report.html", "run/model/config.json"):
        assert (folder / made).exists(), made
    print(f"{wheel.name} works with the {versions} versions of its dependencies.")


def constraints(versions: str) -> str:
    """Constraints for pip."""
    if versions == "lowest":
        lowest = [sys.executable, str(ROOT / ".ci" / "lowest.py")]
        return subprocess.run(lowest, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^torch==.*\n", (ROOT / "constraints.txt").read_text(), re.M)
    assert found is not None
    return found[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
