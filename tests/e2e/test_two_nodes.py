"""Two nodes on one machine: two torchrun agents in network namespaces that a cable joins, as on two machines.

Each node has an address and a cache of its own; only the run's folder is shared. Needs unprivileged user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from isopref.testing import oracle
from support.project import MakeProject, Project, Weights

TIMEOUT_S = 240
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]
# The first node is the namespace this runs in; a process that sleeps keeps the second one.
JOINED = """
set -e
unshare -n sleep 600 & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add veth0 type veth peer name veth1
ip link set veth1 netns $other
on_second="nsenter -t $other -n"
ip link set lo up && ip addr add 10.77.0.1/24 dev veth0 && ip link set veth0 up
$on_second ip link set lo up && $on_second ip addr add 10.77.0.2/24 dev veth1 && $on_second ip link set veth1 up
"""
START = (
    JOINED
    + """
agent() {
    env GLOO_SOCKET_IFNAME=$1 ISOPREF_CACHE=$2 "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \\
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29577 --rdzv-id pair --local-addr $3 --rdzv-conf is_host=$4 \\
        -m isopref train my.yaml $ARGUMENTS
}
export -f agent
$on_second bash -c 'agent veth1 cache_second 10.77.0.2 0' & second=$!
agent veth0 cache_first 10.77.0.1 1 || failed=1
wait $second || failed=1
exit ${failed:-0}
"""
)


def in_namespaces(script: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run a script in a network namespace of its own, for a bounded time. What it starts ends with it."""
    process = subprocess.Popen(
        ["unshare", "-rn", "--kill-child", "bash", "-c", script],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        out = "timed out"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), out


@cache
def why_not() -> str | None:
    """What keeps this machine from having two nodes."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "bash") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    code, out = in_namespaces(JOINED, Path.cwd(), dict(os.environ))
    return f"network namespaces are not allowed here: {out.strip()}" if code else None


@pytest.fixture
def project(make_project: MakeProject) -> Project:
    if (reason := why_not()) is not None:
        pytest.skip(f"TWO NODES NOT TESTED: {reason}")
    return make_project("gpt2", optim={"lr": 1e-3, "batch_size": 5, "max_steps": 4}, run={"save_every": 2})


def on_two_nodes(project: Project, *arguments: str) -> tuple[int, str]:
    env = {**project.env, "PYTHON": sys.executable, "ARGUMENTS": " ".join(arguments)}
    return in_namespaces(START, project.folder, env)


def test_two_nodes_train_as_one_process(project: Project, load_weights: Callable[[Path], Weights]) -> None:
    code, out = on_two_nodes(project, "run.folder=two", "layout.parallel=fsdp")
    assert code == 0, out
    assert "2 x cpu" in out
    expected = load_weights(project.train("one") / "model")
    assert oracle.relative_error(load_weights(project.folder / "two" / "model"), expected) < 1e-10
    for cache_of_node in ("cache_first", "cache_second"):  # tables were built, and the reference is complete, on both
        project.extra_env["ISOPREF_CACHE"] = str(project.folder / cache_of_node)
        assert "cache 23 of 23 training pairs" in project.isopref("cache", "my.yaml").out
