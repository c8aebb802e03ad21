"""One node that trains and serves: torchrun starts this program on each of its ranks, and the first rank of the node
starts rollout servers on the GPUs that training leaves over."""

import argparse
import ipaddress
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_a3po.__main__ import main as run_command
from megatron_a3po.__main__ import say_mistake
from megatron_a3po.config import RunConfig
from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, has_megatron_weights
from megatron_a3po.config.server_key import read_server_key
from megatron_a3po.errors import A3poError, ConfigError
from megatron_a3po.preflight.describe import describe_run
from megatron_a3po.preflight.load import load_architecture, load_config
from megatron_a3po.prompts.load import try_datasets
from megatron_a3po.runtime.processes import die_with_parent
from megatron_a3po.serving.launcher import check_host

_HEARTBEAT_SECONDS = 60.0
_END_SECONDS = 30.0
_MISTAKE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What an example trains, and how it gets there. Paths are relative to the checkout."""

    config: str
    model: str
    """Hugging Face folder"""
    ranks_per_node: int
    servers_per_node: int
    downloads: Mapping[str, str]
    """By path: the command that brings it, for the user"""
    made: Mapping[str, Sequence[str]]
    """By path: arguments of Python that make it, in this order, for the first rank"""

    @property
    def megatron_model(self) -> str:
        return f"{self.model}-megatron"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Where this process is, as torchrun says; one that torchrun has not started is the first of the recipe's ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls, recipe: Recipe) -> "Node":
        number = os.environ.get("LOCAL_WORLD_SIZE", str(recipe.ranks_per_node))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", number)),
            local_world_size=int(number),
        )

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def address(self) -> str:
        """At which other nodes reach the servers of this one. Raises ConfigError."""
        if "NODE_ADDRESS" in os.environ:
            return os.environ["NODE_ADDRESS"]
        if self.num_nodes == 1:
            return "127.0.0.1"
        host, problem = socket.gethostname(), "has no address"
        with suppress(OSError):
            address = socket.gethostbyname(host)
            if not ipaddress.ip_address(address).is_loopback:
                return address
            problem = f"is {address} to itself, as on Debian"
        raise ConfigError(
            f"{host} {problem}, and other nodes must reach its servers; set NODE_ADDRESS to the address that they know"
        )


def run_node(recipe: Recipe, arguments: Sequence[str]) -> int:
    """The program of one rank; returns its exit code. `arguments`: of the command line."""
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
        _make_once(recipe.made, node)
        config = _load(recipe, node, overrides)
        _check_gpus(config, node)
        if config.model == Path(recipe.model):
            _make_once({recipe.megatron_model: _conversion(recipe)}, node)
            _check_converted(recipe)
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
    with _Launcher(launch):
        return run_command(train)


def _parser(recipe: Recipe) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Train by {recipe.config}, with rollout servers on the same nodes.")
    parser.add_argument("--dry-run", action="store_true", help="say what would run where, check it, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {recipe.config}")
    return parser


def _load(recipe: Recipe, node: Node, overrides: Sequence[str]) -> RunConfig:
    """Raises ConfigError, with the commands that bring what is missing."""
    try:
        config = load_config(recipe.config, overrides, {"WORLD_SIZE": str(node.world_size)})
    except ConfigError as error:
        text = str(error)
        commands = [command for path, command in recipe.downloads.items() if path in text and not Path(path).exists()]
        hint = "".join(f"\n  {command}" for command in commands)
        raise ConfigError(f"{text}\nto download what is missing:{hint}" if commands else text) from None
    number = recipe.servers_per_node * node.num_nodes
    if config.rollout.servers != "registered" or config.rollout.num_servers != number:
        raise ConfigError(
            f"this program starts {recipe.servers_per_node} servers on each node, which register: rollout.servers must "
            f"be `registered`, and rollout.num_servers {number}; with other servers start "
            "`python -m megatron_a3po train`, as docs/production.md tells"
        )
    return config


def _check_converted(recipe: Recipe) -> None:
    folder, source = Path(recipe.megatron_model), Path(recipe.model)
    if not folder.exists():
        return
    if not has_megatron_weights(folder):
        raise ConfigError(f"{folder} is there, but holds no Megatron weights; remove it, and it is made again")
    changed = max(path.stat().st_mtime for path in source.glob("*.safetensors"))
    if changed > (folder / MEGATRON_WEIGHTS).stat().st_mtime:
        raise ConfigError(
            f"{source} is newer than {folder}, which was made of it; remove the latter, and it is made again"
        )


def _serving_gpus(config: RunConfig, recipe: Recipe, node: Node) -> list[str]:
    """Those of this node that ranks do not use, by the names that CUDA_VISIBLE_DEVICES gives them, if it is set."""
    first, number = node.local_world_size, recipe.servers_per_node * config.rollout.server_tensor_parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(first + number)]
    return names[first : first + number]


def _check_gpus(config: RunConfig, node: Node) -> None:
    if config.device == "cpu":
        return
    import torch

    needed = (
        node.local_world_size + config.rollout.num_servers * config.rollout.server_tensor_parallel // node.num_nodes
    )
    if (found := torch.cuda.device_count()) < needed:
        raise ConfigError(
            f"{socket.gethostname()} has {found} visible GPUs, and {needed} are needed: {node.local_world_size} to "
            "train, the others to serve; use such a node, or try DEVICE=cpu, which trains a tiny model"
        )


def _conversion(recipe: Recipe) -> Sequence[str]:
    return ["tools/convert_hf_to_megatron.py", recipe.model, recipe.megatron_model]


_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A program that is to run alone must not take itself for one of several ranks."""


def _make_once(made: Mapping[str, Sequence[str]], node: Node) -> None:
    """On rank 0: make what is not there; the other ranks wait for it. Raises A3poError."""
    for path, command in made.items():
        if node.rank == 0 and not Path(path).exists():
            print(f"making {path}: python {shlex.join(command)}", flush=True)
            if subprocess.run([sys.executable, *command], env=_environment()).returncode:
                raise A3poError(f"{path} could not be made; the reason stands above")
        _wait_for(path, node)


def _wait_for(path: str, node: Node) -> None:
    """torchrun ends this rank if the first one fails."""
    said = time.monotonic()
    while not Path(path).exists():
        time.sleep(0.2)
        if node.local_rank == 0 and time.monotonic() - said > _HEARTBEAT_SECONDS:
            said = time.monotonic()
            print(f"waiting for {path}, which rank 0 makes; it must be on storage that all nodes see", flush=True)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES}


def _launch_command(recipe: Recipe, config: RunConfig, node: Node, overrides: Sequence[str]) -> list[str]:
    where = ["--number", str(recipe.servers_per_node)]
    if config.device == "cuda":
        where = ["--gpus", ",".join(_serving_gpus(config, recipe, node))]
    host = ["--host", node.address]
    return ["tools/launch_rollout_servers.py", "--config", recipe.config, *host, *where, *overrides]


class _Launcher:
    """The servers of this node, while the run goes on. A context manager; if they end before it, so does the run."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._ended = threading.Event()

    def __enter__(self) -> None:
        # By which `_watch` ends the run; what a script has started in the background begins without.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A session of its own: Ctrl-C reaches the run, which ends the servers when it needs them no longer.
        self._process = subprocess.Popen(
            [sys.executable, *self._command], env=_environment(), preexec_fn=die_with_parent, start_new_session=True
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
            print(f"error: the rollout servers' launcher ended with exit code {code}, and so does the run", flush=True)
            os.kill(os.getpid(), signal.SIGINT)


def _dry_run(recipe: Recipe, node: Node, overrides: Sequence[str]) -> int:
    for line in _placement(recipe, node):
        print(line)
    for path, command in recipe.made.items():
        print(_first(path, command))
    if not all(Path(path).exists() for path in recipe.made):
        print("the rest cannot be checked before these are made")
        return 0
    config = _load(recipe, node, overrides)
    if config.model == Path(recipe.model):
        _check_converted(recipe)
        print(_first(recipe.megatron_model, _conversion(recipe)))
    for line in describe_run(config, load_architecture(config.model), node.world_size):
        print(line)
    print(f"on each rank: python -m megatron_a3po {shlex.join(['train', '--config', recipe.config, *overrides])}")
    try:
        print(f"on each node: python {shlex.join(_launch_command(recipe, config, node, overrides))}")
        _check_gpus(config, node)
    except ConfigError as error:
        print(f"this machine is no such node: {error}")
    for line in try_datasets(config):
        print(line)
    print("nothing is wrong with the configuration, the model's folder and the datasets")
    return 0


def _first(path: str, command: Sequence[str]) -> str:
    return f"first: {'there is' if Path(path).exists() else f'python {shlex.join(command)} makes'} {path}"


def _placement(recipe: Recipe, node: Node) -> Iterator[str]:
    for number in range(node.num_nodes):
        first = number * node.local_world_size
        yield (
            f"node {number}: training ranks {first} to {first + node.local_world_size - 1}, and "
            f"{recipe.servers_per_node} rollout server{'s' * (recipe.servers_per_node > 1)}"
        )
