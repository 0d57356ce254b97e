"""Splits mathematical notation, in LaTeX or calculator form, into known tokens.

The language is small, and every sign in a string must belong to it. An unknown sign is not dropped: it makes the string unreadable. Signs
for unevaluated operations (integrals, sums, limits) are not in the language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

DEEPEST = 40  # maximum nesting of brackets


class Unreadable(ValueError):
    """A string contains something that is not in the language."""


class Token(NamedTuple):
    """A token of mathematical notation."""

    kind: str  # number, letter, word, command, text, sign
    text: str
    spaced: bool  # whether white space precedes the token

    @property
    def sign(self) -> str:
        """The token's sign, or its command with a backslash; empty for other kinds of tokens."""
        return self.text if self.kind == "sign" else f"\\{self.text}" if self.kind == "command" else ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = _names("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh arsinh arcosh artanh log ln lg")
GREEK = _names(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell emptyset"
)
_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le", "geq": "ge",
    "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "lvert": "|", "rvert": "|", "vert": "|", "varnothing": "emptyset",
    "cdot": "*", "times": "*", "div": "/", "ast": "*", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "lparen": "(",
    "rparen": ")", "colon": ":", "operatorname": "text", "mid": "|", "land": "and", "lor": "or",
}  # fmt: skip
_NOTHING = _names("left right bigl bigr Bigl Bigr big Big bigg Bigg displaystyle textstyle limits quad qquad , ; : ! > thinspace") | {" "}
_TEXT = _names("text textbf textit textrm textsf texttt mathrm mathbf mathit mathsf mbox hbox mathbb mathcal boldsymbol bm")
_ACCENTS = _names("vec overline hat widehat tilde widetilde overrightarrow")
_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", "\u2044": "/", "\u2215": "/",
    "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u221e": "\\infty ", "\u221a": "\\sqrt ", "\u03c0": "\\pi ",
    "\u02da": "^\\circ ", "\u00ba": "^\\circ ", "\u211d": "\\mathbb{R}",
    "\u00b0": "^\\circ ", "\u222a": "\\cup ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u00b1": "\\pm ", "\u2213": "\\mp ",
    "\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2061": "",
    "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma ", "\u03b8": "\\theta ", "\u03bb": "\\lambda ", "\u03bc": "\\mu ",
    "\u03c6": "\\phi ", "\u03c9": "\\omega ", "\u03c3": "\\sigma ",
}  # fmt: skip
_RAISED = dict(zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f", "0123456789-n", strict=True))
_SPACE = r"(?:\{,\}|\\[,;:! ]|~|[ ])"
_GROUPED = re.compile(rf"(?<![\d.^_,])([1-9]\d{{0,2}})((?:{_SPACE}\d{{3}})+)(?!\d)", re.ASCII)
_COMMAS = re.compile(r"(?<![\d.^_,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", re.ASCII)
NUMBER = re.compile(r"(\d+\.\d+|\d+|\.\d+)(?:\\overline\{(\d+)\})?(?:[eE]([+-]?\d{1,4})(?![\d.]))?", re.ASCII)
REPEATING = re.compile(r"(\d+)\.\\overline\{(\d+)\}", re.ASCII)
_ROW = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
OPEN = {"(": ")", "[": "]", "\\{": "\\}", "{": "}", "\\langle": "\\rangle", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
CLOSE = set(OPEN.values())


def plain(text: str) -> str:
    """Returns the string in standard notation: one form for each sign, and no group separators in numbers."""
    text = unicodedata.normalize("NFC", text).strip()
    text = "".join(_vulgar(letter) if unicodedata.category(letter) == "No" else letter for letter in text)
    text = re.sub("[" + "".join(_RAISED) + "]+", lambda match: "^{" + "".join(map(_RAISED.__getitem__, match[0])) + "}", text)
    text = "".join(_SIGNS.get(letter, letter) for letter in text)
    text = re.sub(r"\\([dtc]frac|left|right)(?![a-zA-Z])", lambda match: "" if match[1] in ("left", "right") else "\\frac", text)
    text = re.sub(r"\\bar(?=\s*\{\d)", r"\\overline", _ROW.sub(r"\\\\ ", text)).replace("\\%", "%").replace("^{\\circ}", "^\\circ")
    text = re.sub(r"\\overline\s*(\d)", r"\\overline{\1}", text)
    text = re.sub(r"\^\s*\{\s*\\(?:text)?degree\s*\}|\^?\s*\\(?:text)?degree(?![a-zA-Z])", r"^\\circ ", text)
    text = re.sub(r"\\(?:R|Reals|reals)(?![a-zA-Z])", r"\\mathbb{R}", text)
    text = text.replace("\\!", "").replace("**", "^").replace("<=", "\\le ").replace(">=", "\\ge ")
    text = _GROUPED.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text)  # a decimal comma
    if not re.search(r",\s|[(\[{;]", text):
        text = _COMMAS.sub(lambda match: match[0].replace(",", ""), text)
    return text.strip()


def _vulgar(letter: str) -> str:
    """Returns a fraction character, such as one half, in LaTeX."""
    above, slash, below = unicodedata.normalize("NFKC", letter).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if slash else letter


def tokenized(text: str) -> list[Token]:
    """Returns the tokens of a string. Raises `Unreadable` for an unknown sign."""
    tokens: list[Token] = []
    at, spaced = 0, False

    def add(kind: str, value: str) -> None:
        nonlocal spaced
        tokens.append(Token(kind, value, spaced))
        spaced = False

    while at < len(text):
        letter = text[at]
        if letter.isspace() or letter == "~":
            at, spaced = at + 1, True
        elif match := (REPEATING.match(text, at) or NUMBER.match(text, at)):
            add("number", match[0])
            at = match.end()
        elif letter.isalpha() and letter.isascii():
            run = re.compile(r"[A-Za-z]+").match(text, at)
            assert run is not None
            known = run[0] in FUNCTIONS or run[0] in ("sqrt", "pi", "exp", "infinity", "and", "or")
            for name in [run[0]] if known else run[0]:
                add("command" if known else "letter", {"infinity": "infty"}.get(name, name))
            at = run.end()
        elif letter == "\\":
            at, spaced = _command(text, at, tokens, spaced)
        elif letter in "+-*/^_=<>()[]{}|!,;:%$&":
            add("sign", letter)
            at += 1
        else:
            raise Unreadable(f"the sign {letter!r}")
    return tokens


def _command(text: str, at: int, tokens: list[Token], spaced: bool) -> tuple[int, bool]:
    """Adds the token of a command. Returns the index of the command's end, and whether the command was a space."""
    match = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL).match(text, at)
    if match is None:
        raise Unreadable("a backslash at its end")
    name, end = _SAME.get(match[1], match[1]), match.end()
    if name in _NOTHING:
        return end, True
    if name in _ACCENTS and (letters := re.compile(r"\s*\{\s*([A-Za-z]+)\s*\}").match(text, end)):
        tokens.append(Token("letter", f"{name} {letters[1]}", spaced))  # a variable with that name
        return letters.end(), False
    if name in _TEXT:
        inside = re.compile(r"\s*\{([^{}\\$]*)\}").match(text, end)
        if inside is None:
            raise Unreadable(f"\\{name} without text in braces")
        words = " ".join(inside[1].split())
        if match[1] == "operatorname" and words in FUNCTIONS:
            tokens.append(Token("command", words, spaced))
        elif words.lower() in ("and", "or"):
            tokens.append(Token("command", words.lower(), spaced))
        elif len(words) == 1 and words.isalpha() and words.isascii() and not (tokens and tokens[-1].kind == "number"):
            tokens.append(Token("letter", words if name != "mathbb" else f"mathbb {words}", spaced))
        elif words:
            tokens.append(Token("text", words, spaced))
        return inside.end(), spaced and not words
    if len(name) == 1 < len(match[1]) and name in "*/<>|()[]:":
        tokens.append(Token("sign", name, spaced))
    elif name in ("angle", "triangle"):
        tokens.append(Token("text", name, spaced))
    elif name in "{}$" or name in FUNCTIONS or name in GREEK or name in _COMMANDS:
        tokens.append(Token("command", name, spaced))
    else:
        raise Unreadable(f"\\{name}")
    return end, False


_COMMANDS = _names("frac sqrt binom pm mp pi infty le ge ne in cup cap setminus circ exp lfloor rfloor lceil rceil langle rangle and or")


def split(tokens: Sequence[Token], *signs: str) -> tuple[list[list[Token]], list[str]]:
    """Splits the tokens at the given signs, except inside brackets. Returns the pieces, and the signs between the pieces.

    Raises `Unreadable` if brackets do not match or are nested too deeply.
    """
    pieces: list[list[Token]] = [[]]
    between: list[str] = []
    depth = 0
    for token in tokens:
        sign = token.sign
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth < 0 or depth > DEEPEST:
            raise Unreadable("brackets that do not match, or are nested too deeply")
        if depth == 0 and sign in signs:
            between.append(sign)
            pieces.append([])
        else:
            pieces[-1].append(token)
    if depth:
        raise Unreadable("a bracket that is not closed")
    return pieces, between
