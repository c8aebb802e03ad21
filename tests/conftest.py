"""What holds for all tests: deadlines that fit the machine."""

import os

import pytest

from tests.support import deadlines


def pytest_configure(config: pytest.Config) -> None:
    # Before workers of xdist start, which inherit it.
    deadlines.measure()


def pytest_report_header(config: pytest.Config) -> str:
    return f"deadlines: {os.environ[deadlines.VARIABLE]} times those of two quiet cores"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(deadlines.scaled(seconds)), append=False)
