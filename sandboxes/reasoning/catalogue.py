"""Available and excluded datasets of the package, with reasons.

`docs/generate_reasoning_table.py` verifies that the gold answer scores 1 and nothing else does, that a problem is the same in every
process, and that a scorer survives any answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.errors import UserError
from sandboxes.reasoning.mixture import Source
from sandboxes.reasoning.notation import says_the_same

EVALUATES = "the scorer evaluates the answer with sympy's parse_expr, which no alphabet makes safe and fast"
OTHERWISE = "problems of a seed differ between processes (the order of a set)"
UNPROVEN = "problems have no answer, so nothing proves that they can be solved"

LEFT_OUT: Mapping[str, str] = {
    "boxnet": UNPROVEN,
    "circuit_logic": "one answer, 0 or 1, is right in more than half of the problems",
    "codeio": OTHERWISE,
    "coin_flip": "the scorer's tolerance is 0.0001 and most probabilities are that small, so 0 is nearly always right",
    "composite": "a mixture of datasets; use tasks.options.datasets",
    "course_schedule": "one answer, True or False, is right in more than half of the problems",
    "game_of_life_halting": "the scorer gives full marks for any answer, or only for an empty one",
    "graph_color": UNPROVEN,
    "intermediate_integration": EVALUATES,
    "isomorphic_strings": OTHERWISE,
    "knight_swap": "generating a problem takes more than a second, during which every episode waits",
    "list_functions": OTHERWISE,
    "polynomial_multiplication": EVALUATES,
    "propositional_logic": UNPROVEN,
    "puzzle24": "the scorer accepts any four numbers that make 24, so one answer is always right",
    "ransom_note": OTHERWISE,
    "rubiks_cube": UNPROVEN,
    "rush_hour": UNPROVEN,
    "self_reference": "one answer, 2, is right in about half of the problems",
    "simple_integration": EVALUATES,
    "syllogism": "one answer, Yes, is right in three quarters of the problems",
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
"""What an answer to these may be made of; anything else is wrong, and their scorers do not see it. Some of them evaluate it as Python:
what is left names nothing, calls nothing and raises to no power. Some fail at what is no number or no list, or take nan for right. The
others have several right answers, and read the moves or numbers in an answer and nothing else of it."""

SEVERAL = frozenset(
    {
        *("complex_arithmetic", "countdown", "cryptarithm", "fraction_simplification", "jugs", "kakurasu", "n_queens"),
        *("palindrome_generation", "quantum_lock", "shortest_path", "sokoban", "tower_of_hanoi"),
    }
)
"""Datasets with several right answers, or several ways to write one. An answer to another one must be the truth (`notation`)."""

WRONG_KEYS: Mapping[tuple[str, str], tuple[object, str]] = {
    ("basic_arithmetic", "allow_parentheses"): (False, "its answers are then worked out from left to right: 10 - 7 * 0 is 0"),
}
"""Values of keys with which a dataset's answers are wrong, and how."""


def admit(source: Source) -> None:
    """Raises `UserError` for a dataset that is left out, or one that a key makes wrong."""
    if reason := LEFT_OUT.get(source.name):
        raise UserError(f"reasoning-gym's {source.name} is left out: {reason}", fix="choose another; agentrl check proves what is chosen")
    for key, value in source.keys.items():
        wrong, how = WRONG_KEYS.get((source.name, key), (None, ""))
        if how and value == wrong:
            raise UserError(f"reasoning-gym's {source.name}({key}={value}) is left out: {how}", fix=f"leave {key} out")


def exact(name: str, answer: str, truth: str) -> bool:
    """Whether an answer with full marks from a scorer is the truth and nothing else. If there are several truths, its alphabet decides."""
    return name in SEVERAL or says_the_same(name, answer, truth)


def speaks(name: str, answer: str) -> bool:
    """Whether an answer is in its dataset's language; any is where none is given."""
    language = LANGUAGES.get(name)
    return language is None or language.fullmatch(answer) is not None
