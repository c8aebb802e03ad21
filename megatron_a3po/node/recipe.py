"""What the example trains on each kind of device, and where one of its processes stands."""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_a3po.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A configuration with everything that must exist before it can run. Paths are relative to the checkout."""

    config: str
    model: str
    """Hugging Face folder"""
    ranks_per_node: int
    servers_per_node: int
    downloads: Mapping[str, str]
    """Path -> command with which the user downloads it"""
    made: Mapping[str, Sequence[str]]
    """Path -> arguments of Python that make it; rank 0 runs them in this order"""

    @property
    def megatron_model(self) -> str:
        """Folder of the converted model, which the ranks load."""
        return f"{self.model}-megatron"

    @property
    def conversion(self) -> Sequence[str]:
        """Arguments of Python that convert the model."""
        return ["tools/convert_hf_to_megatron.py", self.model, self.megatron_model]


_DATASET = "--repo-type dataset --local-dir"
RECIPES = {
    "cuda": Recipe(
        config="configs/qwen3_8b_dapo_math.yaml",
        model="models/Qwen3-8B",
        ranks_per_node=4,
        servers_per_node=4,
        downloads={
            "models/Qwen3-8B": "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B",
            "data/dapo-math-17k.parquet": "hf download BytedTsinghua-SIA/DAPO-Math-17k data/dapo-math-17k.parquet "
            f"{_DATASET} .",
            "data/aime-2024.parquet": f"hf download BytedTsinghua-SIA/AIME-2024 data/aime-2024.parquet {_DATASET} .",
            "data/math500/test.jsonl": f"hf download HuggingFaceH4/MATH-500 test.jsonl {_DATASET} data/math500",
        },
        made={},
    ),
    "cpu": Recipe(
        config="configs/tiny_cpu_dataset.yaml",
        model="models/tiny_qwen3",
        ranks_per_node=4,
        servers_per_node=1,
        downloads={},
        made={
            "models/tiny_qwen3": ["tools/make_tiny_model.py"],
            "data/tiny_words": ["tools/make_tiny_dataset.py"],
        },
    ),
}
"""By the value of DEVICE"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Ranks of this process and of its node, as torchrun numbers them."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls, recipe: Recipe) -> "Node":
        """Read torchrun's variables; without torchrun this is the first rank of one node of the recipe."""
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
        """Address at which other nodes reach the servers of this one. Raises ConfigError if there is none."""
        if "NODE_ADDRESS" in os.environ:
            return os.environ["NODE_ADDRESS"]
        if self.num_nodes == 1:
            return "127.0.0.1"
        host, problem = socket.gethostname(), "has no address"
        with suppress(OSError):
            address = socket.gethostbyname(host)
            if not ipaddress.ip_address(address).is_loopback:
                return address
            problem = f"resolves to {address}, as on Debian"
        raise ConfigError(
            f"the host name {host} {problem}, but other nodes must reach the servers of this one; set NODE_ADDRESS to "
            "its address in the network"
        )
