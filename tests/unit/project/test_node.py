"""The program of a node that trains and serves, as far as it goes without torchrun and servers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.errors import A3poError
from megatron_a3po.node.prepare import make_once
from megatron_a3po.node.recipe import Node, Recipe
from megatron_a3po.node.run import Launcher, run_node
from megatron_a3po.runtime.waiting import wait_until
from tests.support.paths import ROOT
from tests.unit.project.test_recipes import checkout as checkout
from tests.unit.project.test_recipes import readable as readable
from tests.unit.project.test_recipes import write_math500

RECIPE = Recipe(
    config=str(ROOT / "configs" / "qwen3_8b_dapo_math.yaml"),
    model="models/Qwen3-8B",
    ranks_per_node=4,
    servers_per_node=4,
    downloads={"data/dapo-math-17k.parquet": "bring the data", "models/Qwen3-8B": "bring the model"},
    made={},
)


def torchrun_says(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_ADDRESS",
        "A3PO_SERVER_KEY",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # whatever other tests have made of it


def test_a_dry_run_on_one_node(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    assert run_node(RECIPE, ["--dry-run", "seed=5"]) == 0
    output = capsys.readouterr().out
    assert "node 0: training ranks 0 to 3" in output and "node 1" not in output
    assert "convert_hf_to_megatron.py models/Qwen3-8B models/Qwen3-8B-megatron makes models/Qwen3-8B-megatron" in output
    assert "--gpus 4,5,6,7" in output and "rollouts: 4 servers (registered) x TP1" in output
    assert "layout: 4 ranks = TP4 x DP1" in output and "seed=5" in output
    assert "0 visible GPUs, but 8 are needed" in output
    assert "prompts: 7 to train on, 3 of aime24, 5 of math500\n" in output


def test_a_dry_run_reads_the_datasets(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(readable))
    good = [json.dumps({"problem": f"{index} + 1", "answer": "1", "unique_id": str(index)}) for index in range(300)]
    write_math500(readable, [*good, "{"])
    assert run_node(RECIPE, ["--dry-run"]) == 0
    (bad_rows,) = re.findall(r"rejected rows: (.*)", capsys.readouterr().out)
    assert json.loads(Path(bad_rows).read_text())["line"] == 301

    write_math500(readable, [*good[:5], "{", "{"])
    assert run_node(RECIPE, ["--dry-run"]) == 1
    assert "data/math500/test.jsonl: 7 rows, 5 prompts" in (output := capsys.readouterr().out)
    assert "repair the dataset" in output and "are valid" not in output


def test_a_dry_run_on_three_nodes(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch, RANK=4, LOCAL_RANK=0, WORLD_SIZE=12, LOCAL_WORLD_SIZE=4)
    monkeypatch.setenv("NODE_ADDRESS", "10.0.0.2")
    assert run_node(RECIPE, ["--dry-run", "rollout.prompts_per_step=96"]) == 0
    output = capsys.readouterr().out
    assert "node 2: training ranks 8 to 11" in output and "layout: 12 ranks = TP4 x DP3" in output
    assert "rollouts: 12 servers" in output and "--host 10.0.0.2 --gpus 4,5,6,7" in output


def test_servers_get_the_visible_gpus_that_training_leaves(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    assert run_node(RECIPE, ["--dry-run"]) == 0
    assert "--gpus 12,13,14,15" in capsys.readouterr().out


def test_missing_files_are_named_with_the_commands_that_bring_them(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    (checkout / "data" / "dapo-math-17k.parquet").unlink()
    for arguments in (["--dry-run"], []):
        assert run_node(RECIPE, arguments) == 2
        output = capsys.readouterr().out
        assert "1 mistake" in output and output.endswith("to download what is missing:\n  bring the data\n")


@pytest.mark.parametrize("override", ["rollout.servers=local", "rollout.num_servers=2", "rollout.servers=[http://a:1]"])
def test_other_servers_than_those_that_it_starts_are_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    torchrun_says(monkeypatch)
    for arguments in (["--dry-run", override], [override]):
        assert run_node(RECIPE, arguments) == 2
        output = capsys.readouterr().out
        assert override.partition("=")[0] in output


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_conversion_that_is_not_whole_or_of_earlier_weights_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_stale: bool
) -> None:
    torchrun_says(monkeypatch)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    weights = checkout / "models" / "Qwen3-8B-megatron" / "weights"
    weights.mkdir(parents=True)
    if is_stale:
        (weights / ".metadata").touch()
        os.utime(weights, (1e9, 1e9))
    for arguments in (["seed=1", "--dry-run", "seed=2"], []):
        assert run_node(RECIPE, arguments) == 2
        output = capsys.readouterr().out
        assert "remove " in output and "Qwen3-8B-megatron" in output and ("newer" in output) is is_stale


def test_a_node_with_too_few_gpus_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    assert run_node(RECIPE, []) == 2
    output = capsys.readouterr().out
    assert "0 visible GPUs, but 8 are needed: 4 to train and 4 to serve" in output and "DEVICE=cpu" in output


def test_several_nodes_need_a_key(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch, RANK=0, LOCAL_RANK=0, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    monkeypatch.setenv("NODE_ADDRESS", "192.0.2.7")  # of no machine
    monkeypatch.setattr("socket.create_server", lambda *_: nullcontext())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    (checkout / "models" / "Qwen3-8B-megatron" / "weights").mkdir(parents=True)
    (checkout / "models" / "Qwen3-8B-megatron" / "weights" / ".metadata").touch()
    assert run_node(RECIPE, []) == 2
    output = capsys.readouterr().out
    assert "--host 192.0.2.7: without a key" in output and "A3PO_SERVER_KEY" in output


def test_a_mistake_on_another_node_is_told_there_once_with_its_name(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_a3po.__main__._LET_OTHERS_SPEAK_SECONDS", 0.0)
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    (checkout / "key").touch(0o644)
    (checkout / "key").chmod(0o644)
    for override, message in (("seed=1", "node-b has 0 visible GPUs"), ("rollout.key_file=key", "others may read it")):
        torchrun_says(monkeypatch, RANK=4, LOCAL_RANK=0, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
        monkeypatch.setenv("NODE_ADDRESS", "10.0.0.2")
        assert run_node(RECIPE, [override]) == 2
        output = capsys.readouterr().out
        assert output.startswith("error on node-b: ") and message in output

        torchrun_says(monkeypatch, RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
        assert run_node(RECIPE, [override]) == 2
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("found", ["127.0.1.1", None])
def test_several_nodes_need_an_address_that_others_reach(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: str | None
) -> None:
    def resolve(host: str) -> str:
        if found is None:
            raise socket.gaierror(-2, "Name or service not known")
        return found

    monkeypatch.setattr("socket.gethostbyname", resolve)
    torchrun_says(monkeypatch, RANK=0, LOCAL_RANK=0, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    weights = readable / "models" / "Qwen3-8B-megatron" / "weights"
    weights.mkdir(parents=True)
    (weights / ".metadata").touch()
    for arguments, code in ((["--dry-run"], 0), ([], 2)):
        assert run_node(RECIPE, arguments) == code
        output = capsys.readouterr().out
        assert "set NODE_ADDRESS" in output and (found or socket.gethostname()) in output
    monkeypatch.setenv("NODE_ADDRESS", "127.0.0.2")
    assert run_node(RECIPE, ["--dry-run"]) == 0
    assert "NODE_ADDRESS" not in capsys.readouterr().out


def test_the_folder_where_the_run_starts_is_on_the_path_on_which_workers_find_reward_functions(
    readable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun_says(monkeypatch)
    monkeypatch.setattr("sys.path", [str(ROOT / "examples"), *filter(None, sys.path)])  # as `torchrun examples/...`
    (readable / "my_rewards_here.py").write_text("def f(samples):\n    return [1.0 for _ in samples]\n")
    assert run_node(RECIPE, ["--dry-run", "reward.scorer=my_rewards_here:f"]) == 0
    assert str(readable) in sys.path
    assert run_node(RECIPE, ["--dry-run", "reward.scorer=my_rewards_gone:f"]) == 2
    assert "reward.scorer = 'my_rewards_gone:f' cannot be imported" in capsys.readouterr().out


def test_rank_0_makes_things_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_says(monkeypatch, RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    made = tmp_path / "made"
    commands = {str(made): ["-c", f"import os; assert 'RANK' not in os.environ; os.mkdir({str(made)!r})"]}
    first = Node(rank=0, local_rank=0, world_size=2, local_world_size=2)
    waiting = threading.Thread(target=make_once, args=(commands, replace(first, rank=1, local_rank=1)))
    waiting.start()
    assert waiting.is_alive()
    make_once(commands, first)
    waiting.join(60)
    assert made.is_dir() and not waiting.is_alive()
    make_once(commands, first)  # does not make it again

    with pytest.raises(A3poError, match="nothing"):
        make_once({"nothing": ["-c", "import sys; sys.exit(3)"]}, first)


def test_the_end_of_the_launcher_ends_the_run(tmp_path: Path) -> None:
    program = (
        "from megatron_a3po.node.run import Launcher\nimport time\n"
        "with Launcher(['-c', 'import sys; sys.exit(4)']):\n    time.sleep(60)\n"
    )
    start = time.monotonic()
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=ignoring)
    assert "ended with exit code 4" in done.stdout
    assert "KeyboardInterrupt" in done.stderr and time.monotonic() - start < 50


def test_the_launcher_ends_with_the_run(tmp_path: Path) -> None:
    marker: Any = tmp_path / "ended"
    program = (
        f"import pathlib, signal, sys, time\ndef end(*_):\n    pathlib.Path({str(marker)!r}).touch(); sys.exit(0)\n"
    )
    program += (
        f"signal.signal(signal.SIGTERM, end)\npathlib.Path({str(tmp_path / 'started')!r}).touch()\ntime.sleep(60)"
    )
    with Launcher(["-c", program]):
        wait_until(lambda: (tmp_path / "started").exists() or None, 30)
    assert marker.exists()
