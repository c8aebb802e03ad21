"""Whether all servers hold the same weights."""

from megatron_a3po.errors import PublishError
from megatron_a3po.weights.receivers import WeightReceivers


def compare_servers(receivers: WeightReceivers, version: int) -> None:
    """A 200 does not prove that a server loaded what it received; equal checksums on all servers are evidence.

    Raises PublishError, which names servers and tensors that differ.
    """
    if len(receivers.urls) < 2:
        return
    first_of_size: dict[int, tuple[str, list[dict[str, str]]]] = {}
    for url, ranks in zip(receivers.urls, receivers.checksums(), strict=True):
        # Servers of another tensor-parallel size hold other shards.
        first_url, first_ranks = first_of_size.setdefault(len(ranks), (url, ranks))
        differing = {
            name
            for first, other in zip(first_ranks, ranks, strict=True)
            for name in first.keys() | other.keys()
            if first.get(name) != other.get(name)
        }
        if differing:
            raise PublishError(
                f"version {version}: {url} and {first_url} hold different weights in {len(differing)} tensors, "
                f"such as {', '.join(sorted(differing)[:3])}"
            )
