"""The example scripts run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isopref.testing.models import tiny_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("processes", [1, 2])
def test_olmo_core_trainer(tmp_path: Path, processes: int) -> None:
    model = tiny_folder(tmp_path / "model")
    script = [str(EXAMPLES / "olmo_core_trainer.py"), str(model), str(tmp_path / "out")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, *script], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # 20 pairs in batches of 6, twice: four steps an epoch, the last of two pairs
    assert (tmp_path / "out" / "step8" / ".metadata.json").exists()
