"""Sample from servers as they are, without publishing to them."""

import asyncio
from pathlib import Path

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import ModelInfo, is_unfinished, label_request, labelled_version, version_label


async def adopt_weights(pool: ServerPool, model: Path) -> str:
    """Take the servers' weights for this run's, and return what they are.

    That is the published version, or else the model's folder, from which the servers were started. Only for servers
    that no other run publishes to. Raises RolloutError where they do not hold the same version, or
    hold none and were started from another folder.
    """
    members = pool.membership.members
    infos = await asyncio.gather(*(server.client.model_info() for server in members))
    for server, info in zip(members, infos, strict=True):
        if (problem := _why_no_model(info)) is not None:
            raise RolloutError(f"{server.url} {problem}")
    labels = [info.weight_version for info in infos]
    if len(set(labels)) > 1:
        found = ", ".join(f"{server.url}: {label}" for server, label in zip(members, labels, strict=True))
        raise RolloutError(f"the servers do not hold the same weights ({found}); name those that do in rollout.servers")
    version = labelled_version(labels[0]) or 0
    if version == 0:
        # What a training run starts from is version 0 as well, and so is what an earlier evaluation has adopted.
        for server in members:
            _check_folder(server, model)

    async def label(server: Server) -> None:
        await pool.post(server, "/update_weight_version", label_request(version_label(version, pool.run)))

    await asyncio.gather(*map(label, members))
    pool.membership.confirm(version)
    return f"version {labels[0]}" if version > 0 else str(model)


def _check_folder(server: Server, model: Path) -> None:
    """Raise RolloutError where the server was not started from the model's folder."""
    served = server.info.model_path if server.info is not None else ""
    if Path(served).resolve() != model.resolve():
        raise RolloutError(
            f"{server.url} serves what it was started with, {served!r}, and no trained version; but model = "
            f"{str(model)!r} is to be evaluated, which is {str(model.resolve())!r}: start the servers with that model "
            f"(tools/launch_rollout_servers.py --config ... model={model}), or evaluate model={served}"
        )


def _why_no_model(info: ModelInfo) -> str | None:
    if is_unfinished(info.weight_version):
        return (
            f"holds parts of a version only (its label is {info.weight_version!r}): a run ended while it published; "
            "restart the server, or let a training run publish to it"
        )
    if labelled_version(info.weight_version) is None and info.load_format == "dummy":
        return (
            "holds random weights: it was started without any (--load-format dummy), and nobody has published to it; "
            "let a training run publish to it, or start it from a Hugging Face folder"
        )
    return None
