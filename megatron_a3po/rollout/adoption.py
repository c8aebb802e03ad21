"""Sampling from servers as they are, without publishing to them."""

import asyncio

from megatron_a3po.errors import RolloutError
from megatron_a3po.rollout.pool import ServerPool
from megatron_a3po.rollout.protocol import labelled_version, version_label
from megatron_a3po.rollout.server_states import Server


async def adopt_weights(pool: ServerPool) -> int:
    """Take the servers' weights, whoever published them or none, as this run's. Returns their version; 0 if nobody did.

    Only for servers that no other run publishes to. Raises RolloutError where they do not hold the same version.
    """
    members = pool.states.members
    labels = await asyncio.gather(*(server.client.weight_version() for server in members))
    if len(set(labels)) > 1 or labels[0] is None:
        found = ", ".join(f"{server.url}: {label}" for server, label in zip(members, labels, strict=True))
        raise RolloutError(f"the servers do not hold the same weights ({found}); name those that do in rollout.servers")
    version = labelled_version(labels[0]) or 0

    async def label(server: Server) -> None:
        body = {"new_version": version_label(version, pool.run), "abort_all_requests": False}
        await pool.post(server, "/update_weight_version", body)

    await asyncio.gather(*map(label, members))
    pool.states.confirm(version)
    return version
