"""Mistakes in a configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong key, with its value, the problem and the remedy."""

    key: str
    value: Any
    problem: str
    remedy: str
    also: tuple[str, ...] = ()
    """Other keys whose values make this one wrong."""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")

    def follows_from(self, wrong: set[str]) -> bool:
        """Return whether `wrong` holds a key of this mistake or the section of one."""
        return any(f"{key}.".startswith(f"{other}.") for key in (self.key, *self.also) for other in wrong)
