"""Grade answers to mathematical questions."""

import logging
import re
from collections.abc import Callable
from typing import Any

from megatron_a3po.rewards.types import Sample, Score

RIGHT, WRONG, NO_ANSWER, TOO_LONG, UNDECIDED = "right", "wrong", "no_answer", "too_long", "undecided"
_MAX_ANSWER_CHARACTERS = 500
"""A longer answer tries to match whatever the right one is."""
_MAX_STRIPPED_CHARACTERS = 10_000
"""A longer text is not an answer, whatever delimiters stand around it."""
_DECIDE_SECONDS = 5
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
# Possessive (`*+`), without backtracking, so that the time is linear in the text's length.
_ANSWER_WORD = re.compile(r"(?:\banswer\b|####)(?P<marks>(?:\*++(?=[\s:=]|\Z)|\s{1,4}is\b|[\s:=])*+)", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"[.;!]\s")
_END_OF_BOLD = re.compile(r"\*\*([.\s]*)\Z")
_DISPLAYS = {"$$": "$$", r"\[": r"\]"}
_PUNCTUATION = ".,:;!?*_`\"'$"
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WORD = r"[A-Za-z]{4,}"
_COUNTED = re.compile(
    rf"([-+]?\d[\d,]*(?:\.\d+)?)\s+(?!(?:dozens?|score|gross|hundreds?|thousands?|[mb]illions?|trillions?|half"
    r"|halves|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|squared|square\Z|cubed|sqrt"
    r"|factorial|below|minus|negative|alpha|beta|gamma|delta|epsilon|theta|kappa|lambda|sigma|omega)\b)"
    rf"(?:(?:square|cubic)\s+)?{_WORD}(?:\s+per\s+{_WORD})?",
    re.IGNORECASE,
)
"""A number and one word for what it counts, which is neither a factor nor a power. A shorter word may be a product of
variables; math-verify knows short units."""
_DELIMITER = re.compile(r"\\?\$|\\[()]")
_MAX_BOXES = 5
"""How many boxes are read, from the end: a response may have thousands that are not closed."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))


def grade_by_math(sample: Sample) -> Score:
    """Return 1 if math-verify finds the response's answer equal to the dataset's.

    Units and what a number counts ("18 eggs") are not compared. A percentage is right as a number and as a fraction. A
    decimal number needs six right digits. An answer that math-verify cannot decide within 5 s is not right.
    """
    return _grade(sample, _is_equivalent)


def grade_by_text(sample: Sample) -> Score:
    """Return 1 if the answers are equal character for character, apart from spaces and `\\text{}` around them."""
    return _grade(sample, lambda right, given: False)


def find_answer(response: str, prompt: str = "") -> str | None:
    """Return a response's answer without mathematical delimiters, or None if it gives none.

    The answer is the last box. Without a box it is what follows the last "answer" or "####", on the same line or, after
    a colon or the like, on the next line that is not empty. Otherwise it is the whole response, if that is one line.
    Thoughts up to `</think>` do not count. If thoughts were opened, by the response or the end of the prompt, and never
    closed, there is no answer.
    """
    _, end, response = response.rpartition(_END_OF_THOUGHT)
    if not end and (_THOUGHT in response or prompt.rstrip().endswith(_THOUGHT)):
        return None
    for match in list(_BOX.finditer(response))[: -_MAX_BOXES - 1 : -1]:
        if (content := _up_to_brace(response, match.end())) is not None:
            return _strip(content) or None
    words = [match for match in _ANSWER_WORD.finditer(response) if not _is_mention(match)]
    if words:
        return _in_text(response[words[-1].end() :])
    lines = response.strip().splitlines()
    return (_strip(lines[0]) or None) if len(lines) == 1 else None


def _is_mention(match: re.Match[str]) -> bool:
    """Check that the word ends its line and does not announce the answer on the next one."""
    text, marks = match.string, match["marks"]
    if marks.strip() or ("\n" not in marks and match.end() < len(text)):
        return False
    is_heading = text.startswith("#", text.rfind("\n", 0, match.start()) + 1)
    return not is_heading


def _in_text(text: str) -> str | None:
    """Return the answer that `text` begins with."""
    line, _, rest = text.partition("\n")
    if closing := _DISPLAYS.get(line.strip()):
        line = rest.partition(closing)[0]
    else:
        line = _END_OF_SENTENCE.split(line, maxsplit=1)[0]
    if line.startswith("**"):
        line = line[2:].replace("**", "", 1)
    elif line.count("**") == 1:
        line = _END_OF_BOLD.sub(r"\1", line)
    return answer if (answer := _strip(line)).strip(_PUNCTUATION) else None


def _grade(sample: Sample, is_equivalent: Callable[[str, str], bool | None]) -> Score:
    right = _strip(str(sample.answer))
    if sample.answer is None or not right:
        raise ValueError(f"prompt {sample.prompt_id} has no answer to compare with; check data.columns")
    given = find_answer(sample.response, sample.prompt)
    if given is None:
        return Score(value=0.0, reason=NO_ANSWER)
    if _without_text(given) == _without_text(right):
        return Score(value=1.0, reason=RIGHT)
    if len(given) > max(_MAX_ANSWER_CHARACTERS, 2 * len(right)):
        return Score(value=0.0, reason=TOO_LONG)
    verdict = is_equivalent(right, given)
    if verdict is None:
        return Score(value=0.0, reason=UNDECIDED)
    return Score(value=float(verdict), reason=RIGHT if verdict else WRONG)


def _is_equivalent(right: str, given: str) -> bool | None:
    """Compare by math-verify; None if it gives up."""
    counted = _COUNTED.fullmatch(_DELIMITER.sub("", given))
    if counted and not any(character.isalpha() for character in right):
        given = counted[1]
    # Imported here: sympy takes about a second, and most reward functions do without it.
    from math_verify import verify
    from math_verify.errors import TimeoutException

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        expected = _parse(right)
        if not expected:
            # Counted as a wrong response, this would silently give 0 to every response.
            raise ValueError(
                f"math-verify cannot read the dataset's answer {right!r:.100}; use reward.scorer = math_exact"
            )
        try:
            return bool(verify(expected, _parse(given), timeout_seconds=_DECIDE_SECONDS, raise_on_error=True))
        except MemoryError:
            raise
        except Exception:  # the policy may write anything, and sympy raises anything for it
            return False
    except TimeoutException:
        return None


def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # As one expression, because math-verify otherwise searches a text for anything that could be the answer.
    return list(
        parse(
            f"${answer.replace(r'\$', '').replace('$', '')}$",
            [LatexExtractionConfig(boxed_match_priority=-1)],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=_DECIDE_SECONDS,
            raise_on_error=True,
        )
    )


def _up_to_brace(text: str, start: int) -> str | None:
    """Return what stands in the braces that were opened before `start`; None if they are not closed."""
    depth = 1
    for position in range(start, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:position]
    return None


def _strip(answer: str) -> str:
    before = None
    while answer != before and len(answer) <= _MAX_STRIPPED_CHARACTERS:
        before = answer
        answer = answer.strip().removesuffix(".").strip()
        for opening, closing in _MATH_DELIMITERS:
            if len(answer) >= len(opening) + len(closing) and answer.startswith(opening) and answer.endswith(closing):
                answer = answer[len(opening) : -len(closing)]
    return answer


def _without_text(answer: str) -> str:
    match = _TEXT.fullmatch(answer)
    return match[1].strip() if match else answer
