"""The names in docs/metrics.md."""

import re
from collections.abc import Iterable, Mapping

from tests.support.pages import PAGES

_FIRST_COLUMN = re.findall(r"^\| (`.*?`) \|", PAGES["docs/metrics.md"], re.MULTILINE)
DOCUMENTED = [name for cell in _FIRST_COLUMN for name in re.findall(r"`([^`]+)`", cell)]
"""Capital letters stand for what differs from run to run."""


def undocumented(rows: Iterable[Mapping[str, object]]) -> set[str]:
    patterns = [re.compile(re.sub("[A-Z]+", ".+", name)) for name in DOCUMENTED]
    names = {name for row in rows for name in row}
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}
