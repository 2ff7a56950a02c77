"""The templates for clusters, with the cluster's commands replaced by ones that print what they are given."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Commands of a cluster."""
    folder = tmp_path / "tools"
    folder.mkdir()
    does_what = {
        "srun": 'echo "$@"; exit ${SRUN_ENDS_WITH:-0}',
        "python": 'echo "$@"',
        "scontrol": 'case $1 in show) echo node1; echo node2;; *) echo scontrol "$@";; esac',
    }
    for name, does in does_what.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    return folder


def shell(command: list[str], tools: Path, **env: str) -> tuple[int, list[str]]:
    path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path, "HOME": "/home/me", **env}, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.split()


def slurm(tools: Path, tmp_path: Path, srun_ends_with: int) -> tuple[int, list[str]]:
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "isopref", "SLURM_JOB_ID": "7",
           "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "my.yaml", "optim.lr=2e-6"]
    return shell(command, tools, **job, SRUN_ENDS_WITH=str(srun_ends_with))


def test_slurm_starts_one_launcher_on_each_node_and_resumes(tools: Path, tmp_path: Path) -> None:
    code, started = slurm(tools, tmp_path, 0)
    folder = tmp_path / "runs" / "isopref-7"
    assert code == 0
    assert started[started.index("python") :] == [
        *(
            "python",
            "-m",
            "isopref.cli.elastic",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "8",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "7-0",
        ),
        *("--rdzv-endpoint", "node1:29500", "-m", "isopref", "train", "my.yaml", "--resume", "auto"),
        *(f"run.folder={folder}", "optim.lr=2e-6"),
    ]


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (1, False), (137, False)])
def test_slurm_requeues_a_run_that_sigterm_stopped(tools: Path, tmp_path: Path, code: int, requeued: bool) -> None:
    ended_with, said = slurm(tools, tmp_path, code)
    assert ended_with == code
    assert (said[-3:] == ["scontrol", "requeue", "7"]) == requeued


def test_kubernetes_starts_the_launcher_and_resumes(tools: Path, tmp_path: Path) -> None:
    job: Any = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in replicas["Master"]["template"]["spec"]["volumes"]}
    command, folder = [*container["command"], *container["args"]], tmp_path / "run"
    code, started = shell(command, tools, FOLDER=str(folder))
    assert code == 0
    assert started == [
        "-m",
        "isopref.cli.elastic",
        "-m",
        "isopref",
        "train",
        "/config/my.yaml",
        "--resume",
        "auto",
        f"run.folder={folder}",
    ]
