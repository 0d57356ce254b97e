"""Mathematics: further notations of one value, and similar ones of other values: functions, real numbers, names with numbers, degrees."""

from __future__ import annotations

import pytest

from tests.rewards.test_mathematics import equal

HONEST = [
    ("371", "#### 371"),
    ("371", "The answer is 371."),
    ("90^\\circ", "90\\degree"),
    ("90\\degree", "90"),
    ("90^\\circ", "90^{\\degree}"),
    ("90^\\circ", "90\u00ba"),
    ("90^\\circ", "90\\text{ degrees}"),
    ("\\frac{90\\degree}{2}", "\\frac{90\\degree}{2}"),
    ("(-\\infty,\\infty)", "\\mathbb{R}"),
    ("(-\\infty,\\infty)", "x \\in \\mathbb{R}"),
    ("(-\\infty,\\infty)", "\u211d"),
    ("(-\\infty,\\infty)", "\\R"),
    ("(-\\infty,\\infty)", "\\text{all real numbers}"),
    ("\\mathbb{R}", "(-\\infty, \\infty)"),
    ("\\mathbb{R}\\setminus\\{1\\}", "(-\\infty,1)\\cup(1,\\infty)"),
    ("(-\\infty,1)\\cup(1,2)\\cup(2,\\infty)", "\\mathbb{R}\\setminus\\{2, 1\\}"),
    ("(-\\infty,1)\\cup(1,\\infty)", "x \\ne 1"),
    ("x \\ne 1", "x \\neq 1"),
    ("\\text{June 20}", "\\text{June 20}"),
    ("\\text{June 20}", "June 20"),
    ("\\text{June 20}", "20 June"),
    ("\\text{June 20}", "June 20th"),
    ("\\text{June 20}", "jun. 20"),
    ("\\text{20 June 2010}", "June 20, 2010"),
    ("\\text{Room 5}", "Room 5"),
    ("\\text{5 cm}", "5 cm"),
    ("5\\text{ apples}", "\\text{5 apples}"),
    ("f(x)=x", "f(x)=x"),
    ("f(x)=x", "f(y)=y"),
    ("f(x)=x", "y=x"),
    ("f(x)=x", "x"),
    ("f(x)=x^2+1", "f(t)=1+t^2"),
    ("f(x)=c", "f(x)=c"),
    ("f(x)=5", "f(y)=5"),
    ("f(2)=5", "5"),
    ("f^{-1}(x)=x-1", "x-1"),
    ("f^{-1}(x)=x-1", "f^{-1}(t)=t-1"),
    ("1024", "1024"),
    ("2^{10}", "2^{10}"),
    ("2^{10}", "1024"),
]
WRONG = {
    "functions": [
        ("f(x)=x", "f(y)=x"),
        ("f(x)=x", "f(x)=y"),
        ("f(x)=x", "g(x)=x"),
        ("f(x)=x", "x=y"),
        ("f(x)=x", "x=x"),
        ("f(x)=x", "y"),
        ("f(x)=x", "f(x)=-x"),
        ("f(x)=x+y", "f(y)=y+y"),
        ("f(x)=x+y", "f(y)=2y"),
        ("x^2", "f(y)=x^2"),
        ("x^2", "f(y)=y^2"),
        ("f(2)=5", "f(3)=5"),
        ("f(2)=5", "f(x)=5"),
        ("f(x)=5", "f(2)=5"),
        ("f(x)=5", "x=5"),
        ("f^{-1}(x)=x-1", "f(x)=x-1"),
        ("f^{-1}(x)=x-1", "f^{-1}(y)=x-1"),
        ("f(x)=c", "f(x)=d"),
        ("y=x^2", "f(y)=x^2"),
        ("y=x^2", "f(y)=y^2"),
    ],
    "all real numbers": [
        ("(-\\infty,\\infty)", "R"),
        ("(-\\infty,\\infty)", "\\mathbb{Q}"),
        ("(-\\infty,\\infty)", "\\mathbb{C}"),
        ("(-\\infty,\\infty)", "\\infty"),
        ("(-\\infty,\\infty)", "[0,\\infty)"),
        ("(-\\infty,\\infty)", "\\mathbb{R}\\setminus\\{0\\}"),
        ("\\mathbb{R}\\setminus\\{1\\}", "\\mathbb{R}"),
        ("\\mathbb{R}\\setminus\\{1\\}", "\\mathbb{R}\\setminus\\{2\\}"),
        ("\\mathbb{R}\\setminus\\{1\\}", "(-\\infty,1)\\cup(2,\\infty)"),
        ("\\mathbb{R}\\setminus\\{1\\}", "(-\\infty,1]\\cup(1,\\infty)"),
        ("x \\ne 1", "x = 1"),
        ("x \\ne 1", "y \\ne 1"),
        ("x \\ne 1", "1"),
        ("\\text{all real numbers}", "\\text{real}"),
    ],
    "names with numbers": [
        ("\\text{June 20}", "20"),
        ("\\text{June 20}", "June"),
        ("\\text{June 20}", "June 21"),
        ("\\text{June 20}", "July 20"),
        ("\\text{June 20}", "June 2"),
        ("\\text{June 20}", "20 June 2010"),
        ("\\text{Room 5}", "5"),
        ("\\text{Room 5}", "Room 6"),
        ("\\text{Room 5}", "Broom 5"),
        ("5", "Room 5"),
        ("5", "\\text{June 5}"),
        ("\\text{5 cm}", "5 m"),
        ("\\text{5 apples}", "6"),
        ("5", "ab 5"),
        ("5", "the answer is not 5"),
    ],
    "degrees": [
        ("90^\\circ", "9\\degree"),
        ("90^\\circ", "90^\\circ\\circ"),
        ("90", "90\\degree"),
        ("90^\\circ", "\\frac{\\pi}{2}\\degree"),
    ],
}


@pytest.mark.parametrize(("truth", "answer"), HONEST)
def test_another_notation_of_the_value_is_right(truth: str, answer: str) -> None:
    assert equal(truth, answer)


@pytest.mark.parametrize(("truth", "answer"), [pair for pairs in WRONG.values() for pair in pairs])
def test_similar_notation_of_another_value_is_wrong(truth: str, answer: str) -> None:
    assert not equal(truth, answer)


def test_a_power_is_a_number_where_unevaluated_forms_are_allowed() -> None:
    assert not equal("1024", "2^{10}") and equal("1024", "2^{10}", unevaluated=True)
    assert not equal("1024", "2^{9}", unevaluated=True)
