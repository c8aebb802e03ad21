"""What holds for all tests: deadlines that fit the machine, and who may run beside whom."""

import os
from collections.abc import Generator

import pytest

from tests.support import deadlines

_SHARED_SERVER = "server_url"


def pytest_configure(config: pytest.Config) -> None:
    # Before workers of xdist start, which inherit it.
    deadlines.measure()


def pytest_report_header(config: pytest.Config) -> str:
    return f"deadlines: {os.environ[deadlines.VARIABLE]} times those of two quiet cores"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    # Around all other plugins, since xdist reads the groups before any hook that is not.
    for item in items:
        _scale_timeout(config, item)
        _group(item)
    return (yield)


def _scale_timeout(config: pytest.Config, item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker is not None else config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(deadlines.scaled(seconds)), append=False)


def _group(item: pytest.Item) -> None:
    """Tests that share a server, or what their file has made, run in one worker of xdist (`--dist loadgroup`)."""
    shares_server = _SHARED_SERVER in getattr(item, "fixturenames", ())
    item.add_marker(pytest.mark.xdist_group(_SHARED_SERVER if shares_server else item.nodeid.split("::")[0]))
