"""Grades of mathematical answers, each decided by hand."""

import pytest

from megatron_a3po.rewards.math_grader import find_answer, grade_by_math, grade_by_text
from megatron_a3po.rewards.scorers import ScorerSpec, make_scorer
from megatron_a3po.rewards.types import Sample, Score

RIGHT, WRONG, NO_ANSWER, TOO_LONG = "right", "wrong", "no_answer", "too_long"


def sample(response: str, answer: object) -> Sample:
    return Sample(prompt_id="p", prompt="?", response=response, answer=answer, row={}, num_tokens=1, truncated=False)


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
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    # units are not compared
    ("5", r"5\text{ cm}"),
    ("5", r"5\ \mathrm{km/h}"),
    ("90", r"90^\circ"),
    ("5", r"\$5"),
    ("18", "18 dollars"),
    ("18", "18 eggs"),
    ("18", r"\$18 dollars"),
    ("1,800", "1800 square feet"),
    ("-2.5", "-2.5 miles per hour"),
    ("18", r"18\text{ eggs}"),
    # sets, intervals, tuples, matrices, equations
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"\{1,2\}", "1, 2"),
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
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "(0,1]"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    ("x^2+2x+1", "(x-1)^2"),
    (r"\text{Evelyn}", "Bob"),
    # answers that try to be everything
    ("42", "1, 2, 3, 41, 42"),
    ("42", "42 or 43"),
    ("42", r"\{41, 42\}"),
    ("42", r"42 \text{ or } 43"),
    ("42", "x"),
    ("42", "x = x"),
    ("42", r"\mathbb{R}"),
    ("42", r"(-\infty, \infty)"),
    ("42", r"[41, 43]"),
    ("42", r"\frac{0}{0}"),
    ("42", r"\infty"),
    ("42", r"\pm 42"),
    ("42", "the right answer"),
    ("42", "True"),
    ("42", "$41$ $42$"),
    ("42", r"42 \ne 43"),
    ("42", "__import__('os').getpid()"),
    ("1", r"\text{any}"),
    ("42", ","),
    ("42", r"\frac"),
    # words that make another number of it
    ("18", "18 dozen"),
    ("18", "18 dozen per week"),
    ("18", "18 thousand"),
    ("18", "18 million dollars"),
    ("3", "3 quarters"),
    ("3", "3 tenths"),
    ("3", "3 squared"),
    ("3", "3 theta"),
    ("2", "2 xy"),
    ("2", "2 pi"),
    ("5", "5 eggs and 3"),
    ("5", "5 or more"),
    ("42", "not 42"),
    # where the words are a part of the answer
    ("3 hours", "3 eggs"),
    (r"\text{June 20}", "June 21"),
    (r"\text{June 20}", "20"),
    (r"\text{June 20}", r"\text{July 20}"),
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
        ("We get 6 * 7.\nAnswer: 42", "42", RIGHT),
        ("**Answer:** $42$", "42", RIGHT),
        ("Hence the answer is 42.", "42", RIGHT),
        ("The final answer is $\\frac{84}{2}$. I hope it is correct.", "42", RIGHT),
        ("6 * 7 = 42\n#### 42", "42", RIGHT),
        ("Answer: The answer is 42", "42", RIGHT),
        ("42", "42", RIGHT),
        ("$42$", 42, RIGHT),
        ("We get 6 * 7.\nAnswer:\n42", "42", RIGHT),
        ("**Answer:**\n$42$", "42", RIGHT),
        ("**Answer: 42**", "42", RIGHT),
        ("**Answer: 42.**", "42", RIGHT),
        ("**Answer**: **42**", "42", RIGHT),
        ("The answer is **42**.", "42", RIGHT),
        ("The answer is **42** eggs.", "42", RIGHT),
        ("The answer is $18 dollars.", "18", RIGHT),
        ("The answer is $18$ dollars.", "18", RIGHT),
        ("The answer is \\(18\\) eggs.", "18", RIGHT),
        ("## Final answer\n\n42\n", "42", RIGHT),
        ("**Final answer**\n\n42\n", "42", RIGHT),
        ("The answer is\n\\[\n42\n\\]\nas was shown.", "42", RIGHT),
        ("The answer is:\n\n$$\n\\frac{84}{2}\n$$", "42", RIGHT),
        ("Answer: 42\nI hope for the right answer\nto this question.", "42", RIGHT),
        ("\\boxed{\\text{well, }\\boxed{42}}", "42", RIGHT),
        ("<think>\\boxed{41}</think> \\boxed{42}", "42", RIGHT),
        ("first \\boxed{41}, no: \\boxed{42}", "42", RIGHT),
        # the last box counts, and nothing else
        ("first \\boxed{42}, no: \\boxed{41}", "42", WRONG),
        ("\\boxed{41}\nAnswer: 42", "42", WRONG),
        ("Answer: 42\nNo, the answer is\n41", "42", WRONG),
        ("Answer:\n41\n42", "42", WRONG),
        ("The answer is **42** or **43**.", "42", WRONG),
        ("The answer is $42$ or $43$.", "42", WRONG),
        ("The answer is $4$ $2$ eggs.", "42", WRONG),
        ("Answer:\n42 is not the right one", "42", WRONG),
        ("**Answer: 42**, **43**", "42", WRONG),
        ("Answer:\n42 or 43", "42", WRONG),
        ("The answer is\n\\[\n42\n43\n\\]", "42", WRONG),
        ("The answer is not 42.", "42", WRONG),
        ("Answer: 9**2", "9", WRONG),
        ("\\boxed{1}\\boxed{2}\\boxed{42}\\boxed{3}", "42", WRONG),
        ("<think>the answer is 42, \\boxed{42}</think> I do not know.\nSorry.", "42", NO_ANSWER),
        ("<think>the answer is 42, \\boxed{42}", "42", NO_ANSWER),
        # no answer
        ("", "42", NO_ANSWER),
        ("  \n ", "42", NO_ANSWER),
        ("\\boxed{}", "42", NO_ANSWER),
        ("\\boxed{ }", "42", NO_ANSWER),
        ("It could be 42.\nOr it could not.", "42", NO_ANSWER),
        ("The answer:\n", "42", NO_ANSWER),
        ("Answer: 42\nAnswer:", "42", NO_ANSWER),
        ("**Answer:**", "42", NO_ANSWER),
        ("Answer: 42\nOr is 41 the answer?", "42", NO_ANSWER),
        ("Answer: ...", "42", NO_ANSWER),
        ("The answer is what the answer is:\nwho knows.", "42", WRONG),
        # very long ones
        ("\\boxed{" + ", ".join(map(str, range(1000))) + "}", "42", TOO_LONG),
        ("\\boxed{" + "(" * 100_000 + "42" + ")" * 100_000 + "}", "42", TOO_LONG),
        ("word " * 100_000 + "\n\\boxed{42}", "42", RIGHT),
        ("\\boxed{" * 20_000 + "42", "42", TOO_LONG),
        ("answer" + " " * 100_000 + "\n", "42", WRONG),
        ("$" * 300_000, "42", TOO_LONG),
        ("answer" + " " * 100_000 + "42", "42", RIGHT),
        ("answer" + "*" * 100_000 + "42", "42", TOO_LONG),
        ("answer\n" * 20_000 + "answer:" + "\n" * 100_000, "42", NO_ANSWER),
        ("Answer: 1 " + "egg " * 50_000, "1", TOO_LONG),
        ("the answer is " * 20_000 + "42", "42", RIGHT),
        ("x" * 200_000, "42", TOO_LONG),
    ],
)
def test_where_the_answer_is_found(response: str, right: object, reason: str) -> None:
    assert grade_by_math(sample(response, right)) == Score(value=float(reason == RIGHT), reason=reason)


@pytest.mark.parametrize(
    ("response", "right", "reason"),
    [
        ("\\boxed{42}", "42", RIGHT),
        ("The answer is $42$.", "42", RIGHT),
        ("Answer:   1/2 ", " 1/2", RIGHT),
        ("\\boxed{0.5}", "1/2", WRONG),
        ("\\boxed{42.0}", "42", WRONG),
        ("\\boxed{042}", "42", WRONG),
        ("\\boxed{\\text{June 20}}", "June 20", RIGHT),
        ("\\boxed{42 eggs}", "42", WRONG),
        ("\\boxed{42 or 43}", "42", WRONG),
        ("So it is 42,\nof course", "42", NO_ANSWER),
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
