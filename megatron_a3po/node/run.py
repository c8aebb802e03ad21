"""One node that trains and serves.

torchrun starts this program on every rank. The first rank of each node starts rollout servers on the GPUs that training
does not use.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NoReturn

from megatron_a3po.__main__ import main as run_command
from megatron_a3po.__main__ import say_mistake
from megatron_a3po.config import RunConfig
from megatron_a3po.config.server_key import read_server_key
from megatron_a3po.errors import A3poError, ConfigError
from megatron_a3po.node.prepare import check_converted, check_gpus, environment, load_node_config, make_once
from megatron_a3po.node.recipe import RECIPES, Node, Recipe
from megatron_a3po.preflight.describe import describe_run
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.prompts.load import try_datasets
from megatron_a3po.rewards.worker_pool import try_scorer
from megatron_a3po.runtime.processes import die_with_parent, end_process
from megatron_a3po.serving.launcher import check_host

_END_SECONDS = 30.0
_MISTAKE = 2


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the example for the environment variable DEVICE, which is cuda (the default) or cpu."""
    device = os.environ.get("DEVICE", "cuda")
    if device not in RECIPES:
        sys.exit(f"error: DEVICE={device}; use cpu or cuda")
    end_process(run_node(RECIPES[device], arguments))


def run_node(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Run the program of one rank with these command-line arguments; return its exit code."""
    sys.path.insert(0, os.getcwd())  # as `python -m` does, for reward functions
    parsed = _parser(recipe).parse_intermixed_args(arguments)
    node = Node.from_environment(recipe)
    overrides = [
        f"model={recipe.model}",
        f"rollout.num_servers={recipe.servers_per_node * node.num_nodes}",
        *parsed.overrides,
    ]
    try:
        if parsed.dry_run:
            return _dry_run(recipe, node, overrides)
        make_once(recipe.made, node)
        config = load_node_config(recipe, node, overrides)
        check_gpus(config, node)
        if config.model == Path(recipe.model):
            make_once({recipe.megatron_model: recipe.conversion}, node)
            check_converted(recipe)
            overrides.append(f"model={recipe.megatron_model}")
        launch = _launch_command(recipe, config, node, overrides)
        if node.local_rank == 0:
            check_host(node.address, read_server_key(config.rollout.key_file))
    except A3poError as error:
        say_mistake(error, rank=node.rank, file=sys.stdout)
        return _MISTAKE if isinstance(error, ConfigError) else 1
    train = ["train", "--config", recipe.config, *overrides]
    if node.local_rank > 0:
        return run_command(train)
    with Launcher(launch):
        return run_command(train)


def _parser(recipe: Recipe) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Train with {recipe.config}, with rollout servers on the same nodes. DEVICE=cpu trains a tiny "
        "model without a GPU."
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run where, check it, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"changes to {recipe.config}")
    return parser


def _launch_command(recipe: Recipe, config: RunConfig, node: Node, overrides: Sequence[str]) -> list[str]:
    where = ["--number", str(recipe.servers_per_node)]
    if config.device == "cuda":
        where = ["--gpus", ",".join(_serving_gpus(config, recipe, node))]
    host = ["--host", node.address]
    return ["tools/launch_rollout_servers.py", "--config", recipe.config, *host, *where, *overrides]


def _serving_gpus(config: RunConfig, recipe: Recipe, node: Node) -> list[str]:
    """Return the GPUs of this node that ranks do not use, named as in CUDA_VISIBLE_DEVICES if it is set."""
    first, number = node.local_world_size, recipe.servers_per_node * config.rollout.server_tensor_parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(first + number)]
    return names[first : first + number]


class Launcher:
    """A context manager that runs the launcher of this node's servers; if it ends early, the run is interrupted."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: arguments of Python"""
        self._command = command
        self._ended = threading.Event()

    def __enter__(self) -> None:
        # `_watch` ends the run by SIGINT, which a process in the background of a script ignores by default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # In a session of its own: Ctrl-C reaches the run only, which ends the servers when it needs them no longer.
        self._process = subprocess.Popen(
            [sys.executable, *self._command], env=environment(), preexec_fn=die_with_parent, start_new_session=True
        )
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._ended.is_set():
            print(
                f"error: the launcher of the rollout servers ended with exit code {code}; the run ends too", flush=True
            )
            os.kill(os.getpid(), signal.SIGINT)


def _dry_run(recipe: Recipe, node: Node, overrides: Sequence[str]) -> int:
    for line in _placement(recipe, node):
        print(line)
    for path, command in recipe.made.items():
        print(_first(path, command))
    if not all(Path(path).exists() for path in recipe.made):
        print("the rest can be checked when these exist")
        return 0
    config = load_node_config(recipe, node, overrides)
    if config.model == Path(recipe.model):
        check_converted(recipe)
        print(_first(recipe.megatron_model, recipe.conversion))
    for line in describe_run(config, load_architecture(config.model), node.world_size):
        print(line)
    print(f"on each rank: python -m megatron_a3po {shlex.join(['train', '--config', recipe.config, *overrides])}")
    try:
        print(f"on each node: python {shlex.join(_launch_command(recipe, config, node, overrides))}")
        check_gpus(config, node)
    except ConfigError as error:
        print(f"not possible on this machine: {error}")
    for line in chain(try_datasets(config), try_scorer(config)):
        print(line)
    print("configuration, model folder and datasets are valid")
    return 0


def _first(path: str, command: Sequence[str]) -> str:
    exists = Path(path).exists()
    return f"first: {path} exists" if exists else f"first: python {shlex.join(command)} makes {path}"


def _placement(recipe: Recipe, node: Node) -> Iterator[str]:
    for number in range(node.num_nodes):
        first = number * node.local_world_size
        yield (
            f"node {number}: training ranks {first} to {first + node.local_world_size - 1}, and "
            f"{recipe.servers_per_node} rollout server{'s' * (recipe.servers_per_node > 1)}"
        )
