"""Grades of mathematical answers, each decided by hand."""

import pytest

from megatron_a3po.rewards.math_grader import find_answer, grade_by_math, grade_by_text
from megatron_a3po.rewards.scorers import ScorerSpec, make_scorer
from megatron_a3po.rewards.types import Sample, Score

RIGHT, WRONG, NO_ANSWER, TOO_LONG = "right", "wrong", "no_answer", "too_long"


def sample(response: str, answer: object) -> Sample:
    return Sample(prompt_id="p", prompt="?", response=response, answer=answer, row={}, num_tokens=1, truncated=False)


def given(right: str, *given: str) -> list[tuple[str, str]]:
    return [(right, each) for each in given]


def graded(right: object, reason: str, *responses: str) -> list[tuple[str, object, str]]:
    return [(response, right, reason) for response in responses]


EQUIVALENT = [
    # fractions and decimals
    (r"\frac{1}{2}", r"\frac12"),
    ("1/2", "0.5"),
    (r"\dfrac{3}{4}", r"\tfrac34"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    ("3.0", "3"),
    # thousands, powers, roots, symbols
    ("1000", "1,000"),
    ("1024", "2^{10}"),
    (r"\sqrt{2}", r"\sqrt2"),
    ("0", r"\sin(\pi)"),
    ("6", "3!"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{\pi}{4}", r"\pi/4"),
    ("3+4i", "4i+3"),
    # percent: as it is written, and as the fraction that it is
    *given(r"50\%", "50", "0.5"),
    ("0.5", r"50\%"),
    # units are not compared
    *given("5", r"5\text{ cm}", r"5\ \mathrm{km/h}"),
    ("90", r"90^\circ"),
    ("5", r"\$5"),
    *given("18", "18 dollars", "18 eggs", r"\$18 dollars"),
    ("1,800", "1800 square feet"),
    ("-2.5", "-2.5 miles per hour"),
    ("18", r"18\text{ eggs}"),
    # sets, intervals, tuples, matrices, equations
    *given(r"\{1,2\}", r"\{2, 1\}", "1, 2"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    ("x>2", r"(2,\infty)"),
    ("(1,2)", "(1, 2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("3", "x=3"),
    ("x=3", "3"),
    # words
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{B}", "(B)"),
    (r"\text{June 20}", "June 20"),
    ("June 20", r"\textbf{June 20}"),
]
DIFFERENT = [
    ("3", "-3"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"\frac{1}{3}", "0.333"),
    (r"2\pi", "6.28"),
    (r"50\%", "5"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    *given("(1,2)", "(2,1)", "[1,2]"),
    ("[0,1)", "(0,1]"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    ("x^2+2x+1", "(x-1)^2"),
    (r"\text{Evelyn}", "Bob"),
    # answers that try to be everything
    *given("42", "1, 2, 3, 41, 42", "42 or 43", r"\{41, 42\}", r"42 \text{ or } 43", "x", "x = x", r"\mathbb{R}"),
    *given("42", r"(-\infty, \infty)", r"[41, 43]", r"\frac{0}{0}", r"\infty", r"\pm 42", "the right answer", "True"),
    *given("42", "$41$ $42$", r"42 \ne 43", "__import__('os').getpid()"),
    ("1", r"\text{any}"),
    *given("42", ",", r"\frac"),
    # words that make another number of it
    *given("18", "18 dozen", "18 dozen per week", "18 thousand", "18 million dollars"),
    *given("3", "3 quarters", "3 tenths", "3 squared", "3 theta"),
    *given("2", "2 xy", "2 pi"),
    *given("5", "5 eggs and 3", "5 or more"),
    ("42", "not 42"),
    # where the words are a part of the answer
    ("3 hours", "3 eggs"),
    *given(r"\text{June 20}", "June 21", "20", r"\text{July 20}"),
]


@pytest.mark.parametrize(("right", "given"), EQUIVALENT)
def test_an_equivalent_answer_is_right_in_a_box(right: str, given: str) -> None:
    assert grade_by_math(sample(rf"So \(x\) is 7, and then \boxed{{{given}}}.", right)) == Score(
        value=1.0, reason=RIGHT
    )


@pytest.mark.parametrize(("right", "given"), DIFFERENT)
def test_another_answer_is_wrong_in_a_box(right: str, given: str) -> None:
    assert grade_by_math(sample(rf"The answer is {right}. \boxed{{{given}}}", right)) == Score(value=0.0, reason=WRONG)


@pytest.mark.parametrize(
    ("response", "right", "reason"),
    [
        # where the answer stands
        *graded("42", RIGHT, "We get 6 * 7.\nAnswer: 42", "**Answer:** $42$", "Hence the answer is 42."),
        *graded("42", RIGHT, "The final answer is $\\frac{84}{2}$. I hope it is correct.", "6 * 7 = 42\n#### 42"),
        *graded("42", RIGHT, "Answer: The answer is 42", "42"),
        *graded(42, RIGHT, "$42$"),
        *graded("42", RIGHT, "We get 6 * 7.\nAnswer:\n42", "**Answer:**\n$42$", "**Answer: 42**", "**Answer: 42.**"),
        *graded("42", RIGHT, "**Answer**: **42**", "The answer is **42**.", "The answer is **42** eggs."),
        *graded("18", RIGHT, "The answer is $18 dollars.", "The answer is $18$ dollars."),
        *graded("18", RIGHT, "The answer is \\(18\\) eggs."),
        *graded("42", RIGHT, "## Final answer\n\n42\n", "**Final answer**\n\n42\n"),
        *graded("42", RIGHT, "The answer is\n\\[\n42\n\\]\nas was shown.", "The answer is:\n\n$$\n\\frac{84}{2}\n$$"),
        *graded("42", RIGHT, "Answer: 42\nI hope for the right answer\nto this question."),
        *graded("42", RIGHT, "\\boxed{\\text{well, }\\boxed{42}}", "<think>\\boxed{41}</think> \\boxed{42}"),
        *graded("42", RIGHT, "first \\boxed{41}, no: \\boxed{42}"),
        # the last box counts, and nothing else
        *graded("42", WRONG, "first \\boxed{42}, no: \\boxed{41}", "\\boxed{41}\nAnswer: 42"),
        *graded("42", WRONG, "Answer: 42\nNo, the answer is\n41", "Answer:\n41\n42"),
        *graded("42", WRONG, "The answer is **42** or **43**.", "The answer is $42$ or $43$."),
        *graded("42", WRONG, "The answer is $4$ $2$ eggs.", "Answer:\n42 is not the right one"),
        *graded("42", WRONG, "**Answer: 42**, **43**", "Answer:\n42 or 43", "The answer is\n\\[\n42\n43\n\\]"),
        *graded("42", WRONG, "The answer is not 42."),
        *graded("9", WRONG, "Answer: 9**2"),
        *graded("42", WRONG, "\\boxed{1}\\boxed{2}\\boxed{42}\\boxed{3}"),
        *graded("42", NO_ANSWER, "<think>the answer is 42, \\boxed{42}</think> I do not know.\nSorry."),
        *graded("42", NO_ANSWER, "<think>the answer is 42, \\boxed{42}"),
        # no answer
        *graded("42", NO_ANSWER, "", "  \n ", "\\boxed{}", "\\boxed{ }", "It could be 42.\nOr it could not."),
        *graded("42", NO_ANSWER, "The answer:\n", "Answer: 42\nAnswer:", "**Answer:**"),
        *graded("42", NO_ANSWER, "Answer: 42\nOr is 41 the answer?", "Answer: ..."),
        *graded("42", WRONG, "The answer is what the answer is:\nwho knows."),
        # very long ones
        *graded("42", TOO_LONG, "\\boxed{" + ", ".join(map(str, range(1000))) + "}"),
        *graded("42", TOO_LONG, "\\boxed{" + "(" * 100_000 + "42" + ")" * 100_000 + "}"),
        *graded("42", RIGHT, "word " * 100_000 + "\n\\boxed{42}"),
        *graded("42", TOO_LONG, "\\boxed{" * 20_000 + "42"),
        *graded("42", WRONG, "answer" + " " * 100_000 + "\n"),
        *graded("42", TOO_LONG, "$" * 300_000),
        *graded("42", RIGHT, "answer" + " " * 100_000 + "42"),
        *graded("42", TOO_LONG, "answer" + "*" * 100_000 + "42"),
        *graded("42", NO_ANSWER, "answer\n" * 20_000 + "answer:" + "\n" * 100_000),
        *graded("1", TOO_LONG, "Answer: 1 " + "egg " * 50_000),
        *graded("42", RIGHT, "the answer is " * 20_000 + "42"),
        *graded("42", TOO_LONG, "x" * 200_000),
    ],
)
def test_where_the_answer_is_found(response: str, right: object, reason: str) -> None:
    assert grade_by_math(sample(response, right)) == Score(value=float(reason == RIGHT), reason=reason)


@pytest.mark.parametrize(
    ("response", "right", "reason"),
    [
        *graded("42", RIGHT, "\\boxed{42}", "The answer is $42$."),
        *graded(" 1/2", RIGHT, "Answer:   1/2 "),
        *graded("1/2", WRONG, "\\boxed{0.5}"),
        *graded("42", WRONG, "\\boxed{42.0}", "\\boxed{042}"),
        *graded("June 20", RIGHT, "\\boxed{\\text{June 20}}"),
        *graded("42", WRONG, "\\boxed{42 eggs}", "\\boxed{42 or 43}"),
        *graded("42", NO_ANSWER, "So it is 42,\nof course"),
    ],
)
def test_the_strict_mode_compares_characters(response: str, right: str, reason: str) -> None:
    assert grade_by_text(sample(response, right)) == Score(value=float(reason == RIGHT), reason=reason)


def test_a_number_that_cannot_be_computed_is_undecided_and_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_a3po.rewards.math_grader._DECIDE_SECONDS", 1)

    assert grade_by_math(sample("\\boxed{9^{9^{9^{9}}}}", "42")) == Score(value=0.0, reason="undecided")


@pytest.mark.parametrize("answer", [None, "", "  ", "$$"])
def test_a_prompt_without_an_answer_is_no_wrong_response(answer: object) -> None:
    with pytest.raises(ValueError, match="prompt p has no answer to compare with"):
        grade_by_math(sample("\\boxed{42}", answer))


@pytest.mark.parametrize("answer", ["\\frac{", "{{{{", "="])
def test_an_answer_of_the_dataset_that_cannot_be_read_makes_no_response_wrong(answer: str) -> None:
    with pytest.raises(ValueError, match="cannot read the dataset's answer"):
        grade_by_math(sample("\\boxed{42}", answer))


def test_the_scorers_have_these_names() -> None:
    for name, response, expected in (
        ("math", "\\boxed{0.5}", 1.0),
        ("math_exact", "\\boxed{0.5}", 0.0),
        ("math_exact", "\\boxed{1/2}", 1.0),
    ):
        (score,) = make_scorer(ScorerSpec(scorer=name))([sample(response, "1/2")])
        assert score.value == expected, (name, response)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("It is \\boxed{42}", None), ("It is \\boxed{41}.</think>\\boxed{42}", "42"), ("42", None)],
)
def test_thoughts_that_the_prompt_has_opened_do_not_count(response: str, expected: str | None) -> None:
    assert find_answer(response, "6 * 7?\nAssistant: <think>\n") == expected


def test_an_answer_keeps_what_belongs_to_it() -> None:
    assert find_answer("\\boxed{\\frac{1}{2}\\text{ of } \\{3\\}}") == "\\frac{1}{2}\\text{ of } \\{3\\}"
    assert find_answer("Answer: 3.14; or so") == "3.14"
    assert find_answer("The answer is: (a) 3") == "(a) 3"
