"""What is wrong with a configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with one key, and what to do."""

    key: str
    value: Any
    problem: str
    remedy: str
    also: tuple[str, ...] = ()
    """The other keys whose values make this one wrong."""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")

    def follows_from(self, wrong: set[str]) -> bool:
        """Whether a key of this mistake, or the section of one, is among those that were wrong already."""
        return any(f"{key}.".startswith(f"{other}.") for key in (self.key, *self.also) for other in wrong)
