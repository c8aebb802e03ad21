"""The Slurm job, with scripted Slurm commands: what starts where, and what follows a signal or an exit code."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_a3po.runtime.signals import PREEMPTED_EXIT_CODE
from tests.support.paths import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "run_a3po.sbatch"

SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$CALLS/scontrol"
[ "$1" != show ] || printf 'train-%d\\n' 1 2 3
"""
# As srun does: the command runs elsewhere, and SIGUSR1 is passed on to it, but SIGTERM means SIGKILL.
SRUN = """#!/usr/bin/env bash
group=$(grep -oE 'het-group=[01]' <<< "$*")
while [ "$1" != bash ]; do echo "$1" >> "$CALLS/srun.$group"; shift; done
child=
trap 'kill -USR1 $child' USR1
trap 'echo "srun: forcing job termination" >&2; kill -KILL $child' TERM
SLURMD_NODENAME=node-7 "$@" &
child=$!
while kill -0 $child 2> /dev/null; do wait $child; status=$?; done
exit "$status"
"""
LAUNCHER = """#!{python}
import os, pathlib, signal, sys
folder = pathlib.Path(os.environ["CALLS"])
if "LAUNCHER_ENDS" in os.environ:
    sys.exit("error: no key")
signal.signal(signal.SIGUSR1, lambda *_: ((folder / "launcher_ended").touch(), sys.exit(0)))
(folder / "launcher").write_text("\\n".join(sys.argv[1:]))
signal.pause()
"""
TRAINER = """#!{python}
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CALLS"])
ignored = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
signal.signal(signal.SIGUSR1, lambda *_: (folder / "rank_signalled").write_text(str(ignored)))
while not ((folder / "launcher").exists() or "LAUNCHER_ENDS" in os.environ):
    time.sleep(0.01)
(folder / "torchrun").write_text("\\n".join(sys.argv[1:]))
while os.environ.get("WAITS") and not (folder / "rank_signalled").exists():
    time.sleep(0.01)
print(os.environ.get("SAYS", ""), file=sys.stderr)
sys.exit(int(os.environ.get("ENDS", "1")))
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.calls, programs = folder / "calls", folder / "bin"
        self.calls.mkdir()
        programs.mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python": LAUNCHER, "torchrun": TRAINER}.items():
            (programs / name).write_text(text.replace("{python}", sys.executable))
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "VENV": str(folder / "none"),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "train-[1-3]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "node-7",
        }
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def said(self, name: str) -> list[str]:
        return (self.calls / name).read_text().splitlines()

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def test_the_first_group_trains_and_the_second_one_serves(cluster: Cluster) -> None:
    status, _ = cluster.run("my.yaml", "num_steps=3", "run_dir=runs/with space", ENDS="0", SERVED_MODEL="models/fp8")

    common = ["my.yaml", "rollout.key_file=server.key", "num_steps=3", "run_dir=runs/with space"]
    assert status == 0
    assert cluster.said("launcher") == [
        *("tools/launch_rollout_servers.py", "--host", "node-7", "--config"),
        *common,
        "model=models/fp8",
    ]
    assert cluster.said("torchrun") == [
        *("--nnodes", "3", "--nproc-per-node", "gpu", "--rdzv-backend", "c10d", "--rdzv-endpoint", "train-1:24711"),
        *("--rdzv-id", "4711-0", "-m", "megatron_a3po", "train", "--config"),
        *common,
    ]
    assert cluster.said("scontrol") == ["show hostnames train-[1-3]"]
    assert (cluster.calls / "launcher_ended").exists()


def test_steps_take_options_of_their_own_and_one_task_per_node(cluster: Cluster) -> None:
    cluster.run(
        "my.yaml", ENDS="0", TRAINER_SRUN_ARGS="--container-image=a --x", ROLLOUT_SRUN_ARGS="--container-image=b"
    )

    step = ["--ntasks-per-node=1", "--cpus-per-task=64"]
    assert cluster.said("srun.het-group=0") == [
        *(*step, "--het-group=0", "--kill-on-bad-exit=1", "--container-image=a", "--x"),
    ]
    assert cluster.said("srun.het-group=1") == [
        *(*step, "--het-group=1", "--kill-on-bad-exit=0", "--container-image=b"),
    ]


@pytest.mark.parametrize(
    ("said", "is_queued_again"),
    [
        (f"failed (exitcode: {PREEMPTED_EXIT_CODE}) local_rank: 0", True),
        ("failed (exitcode: 1) local_rank: 0", False),
        ("", False),
    ],
)
def test_a_run_that_was_preempted_is_queued_again_and_one_that_failed_is_not(
    said: str, is_queued_again: bool, cluster: Cluster
) -> None:
    status, output = cluster.run("my.yaml", SAYS=said)

    assert status == 1 and said in output
    assert ("requeue 4711" in cluster.said("scontrol")) is is_queued_again


PREEMPTED = f"failed (exitcode: {PREEMPTED_EXIT_CODE}) local_rank: 0"


@pytest.mark.parametrize(
    ("sent", "said", "is_queued_again"),
    [(signal.SIGUSR1, "", True), (signal.SIGTERM, "", False), (signal.SIGTERM, PREEMPTED, False)],
)
def test_a_signal_reaches_the_ranks_and_only_the_time_limit_queues_the_job_again(
    sent: signal.Signals, said: str, is_queued_again: bool, cluster: Cluster
) -> None:
    job = cluster.start("my.yaml", WAITS="1", SAYS=said)
    while not (cluster.calls / "torchrun").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(sent)
    job.communicate(timeout=60)

    assert cluster.said("rank_signalled") == ["True"]  # ignored by torchrun, in whose place it stands
    assert [call.split()[0] for call in cluster.said("scontrol")] == ["show", *["requeue"] * is_queued_again]
    assert (cluster.calls / "launcher_ended").exists() and (is_queued_again or job.returncode != 0)


def test_where_the_launcher_ends_first_training_is_ended_and_the_job_does_not_come_back(cluster: Cluster) -> None:
    status, output = cluster.run("my.yaml", WAITS="1", LAUNCHER_ENDS="1")

    assert status != 0
    assert "error: no key" in output and "exit code 1" in output
    assert [call.split()[0] for call in cluster.said("scontrol")] == ["show"]


def test_what_torchrun_says_is_read_to_its_end(cluster: Cluster) -> None:
    slow = Path(cluster.environment["PATH"].split(":")[0]) / "tee"
    slow.write_text(f'#!/usr/bin/env bash\nsleep 1\nexec {shutil.which("tee")} "$@"\n')
    slow.chmod(0o755)
    cluster.run("my.yaml", SAYS=f"failed (exitcode: {PREEMPTED_EXIT_CODE}) local_rank: 0")
    assert cluster.said("scontrol")[-1] == "requeue 4711"


def test_without_a_configuration_it_says_what_to_give(cluster: Cluster) -> None:
    status, output = cluster.run()
    assert status != 0 and "give a configuration" in output
