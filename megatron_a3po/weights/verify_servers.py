"""Check that all servers hold the same weights under the label of the published version."""

from collections import Counter
from collections.abc import Mapping

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet


def check_servers(fleet: Fleet, version: int) -> None:
    """Compare the servers' version labels and checksums: a status of 200 does not prove that a server loaded anything.

    Puts servers that hold anything else into quarantine, and raises PublishError. If servers hold different weights,
    the majority is right; without a majority, none is.
    """
    wrong = {
        url: f"{url} holds weight version {label} after the publication of {version}"
        for url, label in fleet.versions().items()
        if label != str(version)
    }
    _reject(fleet, wrong)
    if len(fleet.urls) > 1:
        _compare(fleet, version)


def _compare(fleet: Fleet, version: int) -> None:
    # Servers with different tensor-parallel sizes hold different shards, which cannot be compared.
    by_size: dict[int, dict[str, list[dict[str, str]]]] = {}
    for url, ranks in fleet.checksums().items():
        by_size.setdefault(len(ranks), {})[url] = ranks
    wrong: dict[str, str] = {}
    for servers in by_size.values():
        right = _held_by_most(servers)
        reference = next((url for url in servers if servers[url] == right), next(iter(servers)))
        for url, ranks in servers.items():
            if right is None or ranks != right:
                other = reference if url != reference else next(u for u in servers if servers[u] != ranks)
                wrong[url] = (
                    f"version {version}: {url} and {other} hold different weights {_difference(ranks, servers[other])}"
                )
    _reject(fleet, wrong)


def _held_by_most(servers: Mapping[str, list[dict[str, str]]]) -> list[dict[str, str]] | None:
    """Return the checksums that most servers hold; None when two different ones are equally frequent."""
    counts = Counter({url: sum(ranks == other for other in servers.values()) for url, ranks in servers.items()})
    (url, most), *_ = counts.most_common()
    tied = any(count == most and servers[other] != servers[url] for other, count in counts.items())
    return None if tied else servers[url]


def _difference(ranks: list[dict[str, str]], others: list[dict[str, str]]) -> str:
    names = sorted(
        {
            name
            for one, other in zip(ranks, others, strict=True)
            for name in one.keys() | other.keys()
            if one.get(name) != other.get(name)
        }
    )
    return f"in {len(names)} tensors, such as {', '.join(names[:3])}"


def _reject(fleet: Fleet, wrong: Mapping[str, str]) -> None:
    if wrong:
        fleet.reject(wrong)
        raise PublishError("; ".join(wrong.values()))
