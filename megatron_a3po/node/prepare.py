"""Make the model and the data, and check configuration, conversion and GPUs before anything starts."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_a3po.config import RunConfig
from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, has_megatron_weights
from megatron_a3po.errors import A3poError, ConfigError
from megatron_a3po.node.recipe import Node, Recipe
from megatron_a3po.preflight.load import load_config
from megatron_a3po.runtime.waiting import wait_until

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""With these, a program that runs alone would take itself for one of several ranks."""


def environment() -> dict[str, str]:
    """Return the environment for a program that runs alone."""
    return {name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES}


def load_node_config(recipe: Recipe, node: Node, overrides: Sequence[str]) -> RunConfig:
    """Load the recipe's configuration for the ranks of all nodes.

    Raises ConfigError, which names the commands that download missing files.
    """
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
            f"this program starts {recipe.servers_per_node} servers on each node, which register themselves: "
            f"rollout.servers must be `registered`, and rollout.num_servers {number}; to use other servers, start "
            "`python -m megatron_a3po train` as docs/production.md describes"
        )
    return config


def make_once(made: Mapping[str, Sequence[str]], node: Node) -> None:
    """Make the paths that do not exist, on rank 0; the other ranks wait for it. Raises A3poError if a command fails."""
    for path, command in made.items():
        if node.rank == 0 and not Path(path).exists():
            print(f"making {path}: python {shlex.join(command)}", flush=True)
            if subprocess.run([sys.executable, *command], env=environment()).returncode:
                raise A3poError(f"{path} could not be made; the lines above say why")
        _wait_for(path, node)


def _wait_for(path: str, node: Node) -> None:
    """Wait without a limit: torchrun ends this rank if rank 0 fails."""

    def remind() -> None:
        if node.local_rank == 0:
            print(f"waiting for {path}, which rank 0 makes; all nodes must see the same storage", flush=True)

    wait_until(lambda: Path(path).exists() or None, None, remind=remind)


def check_converted(recipe: Recipe) -> None:
    """Check that the converted model, if it exists, is whole and made of the present weights. Raises ConfigError."""
    folder, source = Path(recipe.megatron_model), Path(recipe.model)
    if not folder.exists():
        return
    if not has_megatron_weights(folder):
        raise ConfigError(f"{folder} holds no Megatron weights; remove it, and it is made again")
    changed = max(path.stat().st_mtime for path in source.glob("*.safetensors"))
    if changed > (folder / MEGATRON_WEIGHTS).stat().st_mtime:
        raise ConfigError(
            f"{source} is newer than {folder}, which was made from it; remove {folder}, and it is made again"
        )


def check_gpus(config: RunConfig, node: Node) -> None:
    """Check that this machine has GPUs for its ranks and its servers. Raises ConfigError."""
    if config.device == "cpu":
        return
    import torch

    serving = config.rollout.num_servers * config.rollout.server_tensor_parallel // node.num_nodes
    needed = node.local_world_size + serving
    if (found := torch.cuda.device_count()) < needed:
        raise ConfigError(
            f"{socket.gethostname()} has {found} visible GPUs, but {needed} are needed: {node.local_world_size} to "
            f"train and {serving} to serve; use a node with {needed}, or try DEVICE=cpu, which trains a tiny model"
        )
