"""From a scorer's result to the reward that is trained on."""

from dataclasses import dataclass

from megatron_a3po.rewards.types import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """Penalties for what a right answer does not need."""

    max_new_tokens: int
    format_penalty: float = 0.0
    length_penalty: float = 0.0

    def reward(self, score: Score, num_tokens: int) -> float:
        format_penalty = 0.0 if score.has_format else self.format_penalty
        return score.value - format_penalty - self.length_penalty * num_tokens / self.max_new_tokens
