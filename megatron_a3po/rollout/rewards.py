"""What a response is worth."""

from megatron_a3po.data.prompts import Prompt


def exact_reward(prompt: Prompt, text: str) -> float:
    """1 for a right answer, 0 for anything else.

    The task's scorer gives partial credit, which does not teach, and adds it up in floats, where six sixths make
    0.9999999999999999 for a wrong answer: so only exactly 1.0, as a Python float, is right.
    """
    return float(prompt.score(text) == 1.0)
