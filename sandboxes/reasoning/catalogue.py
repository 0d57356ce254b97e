"""The datasets of reasoning-gym that are excluded, with the reasons, and the alphabets to which answers are restricted.

`docs/generate_reasoning_table.py` measures whether only the gold answer scores 1, whether a problem is the same in every process, and
whether a scorer accepts any input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.errors import UserError
from sandboxes.reasoning.mixture import Source
from sandboxes.reasoning.notation import says_the_same

EVALUATES = "its scorer evaluates the answer as a program (sympy's parse_expr); restricting its characters cannot make this safe and fast"
OTHERWISE = "its problems differ between processes for the same seed, because they depend on the order of a set"
UNPROVEN = "its problems have no answer, so there is no proof that they can be solved"

LEFT_OUT: Mapping[str, str] = {
    "boxnet": UNPROVEN,
    "circuit_logic": "one answer, 0 or 1, is correct in more than half of the problems",
    "codeio": OTHERWISE,
    "coin_flip": "its scorer has a tolerance of 0.0001, and most of its probabilities are that small, so 0 is nearly always correct",
    "composite": "it is a mixture of other datasets, which tasks.family.options.datasets provides",
    "course_schedule": "one answer, True or False, is correct in more than half of its problems",
    "game_of_life_halting": "its scorer gives full marks for any answer, or only for the empty one",
    "graph_color": UNPROVEN,
    "intermediate_integration": EVALUATES,
    "isomorphic_strings": OTHERWISE,
    "knight_swap": "generating a problem takes more than a second, which delays every episode",
    "list_functions": OTHERWISE,
    "polynomial_multiplication": EVALUATES,
    "propositional_logic": UNPROVEN,
    "puzzle24": "its scorer accepts any four numbers that make 24, so one answer is correct in all of its problems",
    "ransom_note": OTHERWISE,
    "rubiks_cube": UNPROVEN,
    "rush_hour": UNPROVEN,
    "self_reference": "one answer, 2, is correct in about half of the problems",
    "simple_integration": EVALUATES,
    "syllogism": "one answer, Yes, is correct in three quarters of the problems",
    "word_ladder": OTHERWISE,
}

_JUGS = r'"(?:(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z])"'
_HANOI = r"Move disk [1-9] from Peg [1-9] to Peg [1-9]"
_CELL = r"[A-Z]\s*=\s*[0-9]"
LANGUAGES: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": re.compile(r"[0-9 \n\[\],]*"),
    "complex_arithmetic": re.compile(r"[-+0-9.ij ()]*"),
    "countdown": re.compile(r"(?!.*\*\s*\*)[0-9+\-*/() ]*", re.DOTALL),
    "cryptarithm": re.compile(rf"(?!.*([A-Z])\s*=.*\1\s*=){_CELL}(?:\s*,\s*{_CELL})*", re.DOTALL),
    "fraction_simplification": re.compile(r"\$?(?:\\[dt]?frac\{[0-9]+\}\{[0-9]+\}|[0-9]+\s*/\s*[0-9]+)\$?"),
    "game_of_life": re.compile(r"[01 ,\n\[\]]*"),
    "jugs": re.compile(rf"\[\s*{_JUGS}(?:\s*,\s*{_JUGS})*\s*\]"),
    "kakurasu": re.compile(r"[01](?:\s+[01])*"),
    "n_queens": re.compile(r"[Q_ \n]*"),
    "number_sorting": re.compile(r"[-+0-9.,'\"\[\] \n]*"),
    "palindrome_generation": re.compile(r"[A-Za-z]+"),
    "prime_factorization": re.compile(r"\s*[0-9]+(?:\s*\u00d7\s*[0-9]+)*\s*"),
    "quantum_lock": re.compile(r"[A-C](?:\s*(?:\u2192|->)\s*[A-C])*"),
    "shortest_path": re.compile(r"infeasible|(?:up|down|left|right)(?:\s+(?:up|down|left|right))*"),
    "sokoban": re.compile(r"[UDLR](?:\s*[UDLR])*"),
    "spiral_matrix": re.compile(r"[0-9 \-\n]*"),
    "string_insertion": re.compile(r"[A-E]*"),
    "tower_of_hanoi": re.compile(rf"{_HANOI}(?:\s*\n\s*{_HANOI})*"),
}
"""Alphabets of answers. Any other answer is wrong, and the scorer does not see it. Some of these scorers evaluate the answer as Python, so
the alphabet excludes names, calls and powers. Some scorers fail on non-numbers or non-lists, or accept nan. The other datasets have several
correct answers, and their scorers read only the moves or numbers in an answer.
"""

SEVERAL = frozenset(
    {
        *("complex_arithmetic", "countdown", "cryptarithm", "fraction_simplification", "jugs", "kakurasu", "n_queens"),
        *("palindrome_generation", "quantum_lock", "shortest_path", "sokoban", "tower_of_hanoi"),
    }
)
"""Datasets with several correct answers or notations. For other datasets, the answer must be the truth (`notation`)."""

WRONG_KEYS: Mapping[tuple[str, str], tuple[object, str]] = {
    ("basic_arithmetic", "allow_parentheses"): (False, "it then computes its answers from left to right, so that 10 - 7 * 0 is 0"),
}
"""Values of configuration keys with which a dataset's answers are wrong, and the reasons."""


def admit(source: Source) -> None:
    """Raises `UserError` if a dataset is excluded or is configured with a value in `WRONG_KEYS`."""
    if reason := LEFT_OUT.get(source.name):
        raise UserError(f"reasoning-gym's {source.name} is excluded: {reason}", fix="use a different dataset; agentrl check validates it")
    for key, value in source.keys.items():
        wrong, how = WRONG_KEYS.get((source.name, key), (None, ""))
        if how and value == wrong:
            raise UserError(f"reasoning-gym's {source.name}({key}={value}) is excluded: {how}", fix=f"remove {key}")


def exact(name: str, answer: str, truth: str) -> bool:
    """Whether an answer with full marks contains only the truth.

    Always true for datasets with several correct answers, whose alphabet rules out additional text.
    """
    return name in SEVERAL or says_the_same(name, answer, truth)


def speaks(name: str, answer: str) -> bool:
    """Whether an answer fits its dataset's alphabet. True if the dataset has no alphabet."""
    language = LANGUAGES.get(name)
    return language is None or language.fullmatch(answer) is not None
