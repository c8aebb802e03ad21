"""Check that a run can use a server as it was started."""

from megatron_a3po.config.server_requirements import Demands, problems_of_server
from megatron_a3po.fleet.protocol import ServerInfo


def unusable(url: str, info: ServerInfo, demands: Demands) -> str | None:
    """Return why the run cannot use this server, with the remedy; None if it can."""
    problem = next(problems_of_server(info.model_dump(), demands), None)
    return f"{url} {problem}" if problem is not None else None
