"""Build the publisher of a policy from the configuration."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_a3po.config import RunConfig
from megatron_a3po.config.model_folder import has_megatron_weights
from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.hf.folder import HfFolder
from megatron_a3po.parallel.agreement import on_rank_zero
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Plan
from megatron_a3po.weights.publisher import Transport, WeightPublisher
from megatron_a3po.weights.served_precision import ServedModel, fp8_rule, served_quantization
from megatron_a3po.weights.transports.delta.folder import described_by
from megatron_a3po.weights.transports.delta.transport import DeltaTransport
from megatron_a3po.weights.transports.disk import DiskTransport, FileSettings
from megatron_a3po.weights.transports.group import GroupTransport

_PACKED = re.compile(r"_(blocks|scales)$")


def build_publisher(
    config: RunConfig,
    chunks: Sequence[torch.nn.Module],
    groups: Any,
    fleet: Fleet | None,
    gloo_group: dist.ProcessGroup,
    *,
    timer: PhaseTimer,
) -> WeightPublisher:
    """Build the publisher with the configured transport. Collective.

    chunks: this rank's part of the policy. groups: Megatron's. fleet: the servers, on rank 0. gloo_group: a gloo group
    of all ranks, in which they may wait for long. Raises PublishError on every rank when the servers or the ranks hold
    something that cannot be published.
    """
    # Imported late: Megatron reads at its import which device and modules exist, and build_actor prepares these.
    from megatron_a3po.weights.gather import WeightCollector

    names, quantization = on_rank_zero(lambda: _names_and_quantization(config, fleet), gloo_group, PublishError)
    collector = WeightCollector(
        chunks,
        groups,
        config.model,
        gloo_group,
        bucket_bytes=config.publish.bucket_bytes,
        expected_names=names,
        is_fp8=fp8_rule(quantization),
        timer=timer,
    )
    publish = config.publish
    disk = _through_files(config, collector.plan, fleet, quantization)
    if publish.transport == "disk":
        return WeightPublisher(collector, disk, fleet, gloo_group, timer=timer)
    update_groups = GroupTransport(
        collector.plan,
        fleet,
        gloo_group,
        # The same after a restart, so that the run finds the groups that it has left at the servers.
        run_id=hashlib.sha256(str(config.run_dir.resolve()).encode()).hexdigest()[:12],
        backend="gloo" if config.device == "cpu" else "nccl",
        timeout_seconds=publish.timeout_seconds,
    )
    fallback = disk if publish.fallback else None
    return WeightPublisher(collector, update_groups, fleet, gloo_group, timer=timer, fallback=fallback)


def _names_and_quantization(
    config: RunConfig, fleet: Fleet | None
) -> tuple[list[str] | None, Mapping[str, Any] | None]:
    """Return, on rank 0, the tensors of the model's own files (None: it has none) and the `quantization_config` that
    the servers follow (None: they hold no FP8)."""
    if fleet is None:
        return None, None
    names = None
    if not has_megatron_weights(config.model):
        folder = HfFolder.open(config.model)
        names = published_names(folder.names(), folder.config)
    return names, served_quantization(_served_models(config, fleet))


def _folder(config: RunConfig) -> Path:
    return config.publish.folder or config.run_dir / "published"


def _served_models(config: RunConfig, fleet: Fleet) -> list[ServedModel]:
    """Return what every server says about its model, with the folder under the path that is visible here."""
    return [
        (url, str(described_by(Path(model), _folder(config), config.publish.delta_folder)), quantization)
        for url, model, quantization in fleet.served_models
    ]


def _through_files(
    config: RunConfig, plan: Plan, fleet: Fleet | None, quantization: Mapping[str, Any] | None
) -> Transport:
    publish = config.publish
    settings = FileSettings(
        folder=_folder(config),
        model=config.model,
        quantization_config=quantization,
        pause_first=publish.transport != "disk",
        timeout_seconds=publish.timeout_seconds,
    )
    if publish.delta_folder is None:
        return DiskTransport(plan, fleet, settings)
    followed = config.rollout.servers != "local"
    return DeltaTransport(plan, fleet, settings, local=publish.delta_folder, followed=followed)


def published_names(names: Sequence[str], described: Mapping[str, Any]) -> list[str]:
    """Return those tensor names of a model's files that belong to the policy; MXFP4 blocks under their weight's name.

    described: config.json. Layers for multi-token prediction do not belong to the policy; their numbers follow those of
    the other layers.
    """
    num_layers = int(described["num_hidden_layers"])
    found: dict[str, None] = {}
    for name in names:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= num_layers
        if not beyond and not name.startswith("mtp.") and not name.endswith(".rotary_emb.inv_freq"):
            found[_PACKED.sub("", name)] = None
    return list(found)
