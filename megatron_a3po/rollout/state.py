"""The state of the rollouts in a checkpoint, and its file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from megatron_a3po.errors import DataError
from megatron_a3po.parallel.broadcast import (
    EncodedTrajectories,
    TrajectoryRow,
    decode_trajectories,
    encode_trajectories,
)
from megatron_a3po.types import TrajectoryGroup

_DTYPES = {"token_ids": torch.int64, "behaviour_logprobs": torch.float32, "weight_versions": torch.int64}
_METADATA = "rollout_state"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutState:
    """The rollout side at one moment. It has every open group exactly once.

    A resumed run first issues the groups of `in_flight` again, with the same numbers and so the same prompts. Groups
    that completed after this moment and before the kill are among them. Their lost responses were not trained on,
    because the kill also took the training steps since the checkpoint. Groups that were issued or consumed in between
    are issued or consumed again.
    """

    version: int
    """The weight version that servers sample with"""
    next_batch: int
    issued: int
    """The number of groups issued so far, which is also the number of the next new group"""
    consumed: int
    dropped: dict[str, int]
    """by reason"""
    buffered: tuple[TrajectoryGroup, ...]
    in_flight: tuple[int, ...]
    """Issued groups without a result, in the order in which they are issued again"""
    prompts: str = ""
    """Fingerprint of the prompts that the groups' numbers stand for; empty: not known"""

    def __post_init__(self) -> None:
        """Raises ValueError unless every issued group is accounted for once."""
        still_open = [*(group.group_id for group in self.buffered), *self.in_flight]
        unknown = [group_id for group_id in still_open if not 0 <= group_id < self.issued]
        if unknown or len(set(still_open)) != len(still_open):
            raise ValueError(f"groups {sorted(still_open)} are open, of which {self.issued} were issued, each once")
        closed = self.consumed + sum(self.dropped.values())
        if self.issued != closed + len(still_open):
            raise ValueError(
                f"{self.issued} groups issued, but {self.consumed} consumed, {self.dropped} dropped, "
                f"{len(self.buffered)} buffered and {len(self.in_flight)} in flight"
            )


class _Metadata(BaseModel):
    """Everything but the tensors of the buffered groups."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    format: Literal[1]
    version: NonNegativeInt
    next_batch: NonNegativeInt
    issued: NonNegativeInt
    consumed: NonNegativeInt
    dropped: dict[str, NonNegativeInt]
    in_flight: list[NonNegativeInt]
    prompts: str = ""
    buffered: list[tuple[int, NonNegativeInt]]
    """Number of each group and how many of `trajectories` are its own."""
    trajectories: list[TrajectoryRow]


def save_rollout_state(state: RolloutState, path: Path) -> None:
    """Write one safetensors file: the concatenated tensors of all buffered trajectories, and the rest as JSON.

    The write is not atomic and not flushed to the disk; the writer of the checkpoint does both. Raises OSError.
    """
    encoded = encode_trajectories([item for group in state.buffered for item in group.trajectories])
    metadata = _Metadata(
        format=1,
        version=state.version,
        next_batch=state.next_batch,
        issued=state.issued,
        consumed=state.consumed,
        dropped=state.dropped,
        in_flight=list(state.in_flight),
        prompts=state.prompts,
        buffered=[(group.group_id, len(group.trajectories)) for group in state.buffered],
        trajectories=list(encoded.rows),
    )
    tensors = {name: getattr(encoded, name) for name in _DTYPES}
    # Not by safetensors' save_file, which raises an error of its own if the disk is full.
    path.write_bytes(save(tensors, {_METADATA: metadata.model_dump_json()}))


def load_rollout_state(path: Path) -> RolloutState:
    """Read what `save_rollout_state` wrote, bit for bit. Raises DataError, with the path, for anything else."""
    try:
        return _read(path)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:  # RuntimeError: torch's, for other lengths
        raise DataError(
            f"{path} is not a complete rollout state as this version of megatron_a3po writes it: {error}; "
            "resume from another checkpoint"
        ) from error


def _read(path: Path) -> RolloutState:
    with safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(_METADATA)
        if written is None:
            raise ValueError(f"its metadata has no {_METADATA!r}")
        metadata = _Metadata.model_validate_json(written)
        # Copied: the file may be removed or overwritten while the groups wait in the buffer.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if found != _DTYPES:
        raise ValueError(f"tensors {found} instead of {_DTYPES}")
    trajectories = iter(decode_trajectories(EncodedTrajectories(metadata.trajectories, **tensors)))
    if sum(count for _, count in metadata.buffered) != len(metadata.trajectories):
        raise ValueError(f"{len(metadata.trajectories)} trajectories for groups {metadata.buffered}")
    return RolloutState(
        version=metadata.version,
        next_batch=metadata.next_batch,
        issued=metadata.issued,
        consumed=metadata.consumed,
        dropped=metadata.dropped,
        buffered=tuple(
            TrajectoryGroup(group_id=group_id, trajectories=tuple(next(trajectories) for _ in range(count)))
            for group_id, count in metadata.buffered
        ),
        in_flight=tuple(metadata.in_flight),
        prompts=metadata.prompts,
    )
