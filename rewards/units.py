"""Units of measurement: the value of a string such as "km/h" or "kg m^2/s^2" in SI base units, and its dimension.

A small table is used instead of a package, because an agent writes the string, and its possible meanings must be few and known. Values are
exact by definition (SI brochure, 9th edition, 2019; international yard and pound agreement, 1959). For the electronvolt, the value is
CODATA's exact value from 2018. There are two differences from the SI. An angle is a dimension, so 1 rad/s is not 1 Hz. Bytes have no
prefixes below one, so dB is not a decibyte.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction
from functools import cache
from typing import NamedTuple

BASE = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "B", "$", "EUR", "GBP")  # angles, bytes and currencies count as dimensions
LONGEST = 64  # maximum number of characters in a unit
LARGEST_POWER = 12

_PREFIXES = {
    "": 1.0,
    "p": 1e-12,
    "n": 1e-9,
    "u": 1e-6,
    "\u00b5": 1e-6,  # micro sign
    "\u03bc": 1e-6,  # Greek mu
    "m": 1e-3,
    "c": 1e-2,
    "d": 1e-1,
    "h": 1e2,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# name: (factor, product of base units). The units in the first table can have the prefixes above.
_PREFIXED = {
    "m": (1.0, "m"),
    "g": (1e-3, "kg"),
    "s": (1.0, "s"),
    "A": (1.0, "A"),
    "K": (1.0, "K"),
    "mol": (1.0, "mol"),
    "cd": (1.0, "cd"),
    "Hz": (1.0, "s^-1"),
    "N": (1.0, "kg m s^-2"),
    "Pa": (1.0, "kg m^-1 s^-2"),
    "J": (1.0, "kg m^2 s^-2"),
    "W": (1.0, "kg m^2 s^-3"),
    "C": (1.0, "A s"),
    "V": (1.0, "kg m^2 s^-3 A^-1"),
    "F": (1.0, "kg^-1 m^-2 s^4 A^2"),
    "ohm": (1.0, "kg m^2 s^-3 A^-2"),
    "\u03a9": (1.0, "kg m^2 s^-3 A^-2"),  # Greek omega
    "T": (1.0, "kg s^-2 A^-1"),
    "L": (1e-3, "m^3"),
    "l": (1e-3, "m^3"),
    "eV": (1.602176634e-19, "kg m^2 s^-2"),
    "Wh": (3600.0, "kg m^2 s^-2"),
    "cal": (4.184, "kg m^2 s^-2"),
    "bar": (1e5, "kg m^-1 s^-2"),
    "B": (1.0, "B"),
    "bit": (0.125, "B"),
}
_WHOLE = {
    "min": (60.0, "s"),
    "h": (3600.0, "s"),
    "hour": (3600.0, "s"),
    "d": (86400.0, "s"),
    "day": (86400.0, "s"),
    "week": (604800.0, "s"),
    "\u00c5": (1e-10, "m"),  # angstrom
    "in": (0.0254, "m"),
    "inch": (0.0254, "m"),
    "ft": (0.3048, "m"),
    "yd": (0.9144, "m"),
    "mi": (1609.344, "m"),
    "mph": (0.44704, "m s^-1"),
    "ha": (1e4, "m^2"),
    "t": (1e3, "kg"),
    "lb": (0.45359237, "kg"),
    "oz": (0.028349523125, "kg"),
    "atm": (101325.0, "kg m^-1 s^-2"),
    "rad": (1.0, "rad"),
    "deg": (math.pi / 180, "rad"),
    "\u00b0": (math.pi / 180, "rad"),
    "%": (0.01, ""),
    "ppm": (1e-6, ""),
    "$": (1.0, "$"),
    "USD": (1.0, "$"),
    "\u20ac": (1.0, "EUR"),
    "EUR": (1.0, "EUR"),
    "\u00a3": (1.0, "GBP"),
    "GBP": (1.0, "GBP"),
}
_WORDS = {
    "meter": "m",
    "metre": "m",
    "gram": "g",
    "second": "s",
    "minute": "min",
    "liter": "L",
    "litre": "L",
    "joule": "J",
    "watt": "W",
    "newton": "N",
    "volt": "V",
    "ampere": "A",
    "kelvin": "K",
    "mole": "mol",
    "byte": "B",
    "mile": "mi",
    "foot": "ft",
    "pound": "lb",
    "dollar": "$",
    "euro": "EUR",
    "percent": "%",
    "degree": "deg",
    "radian": "rad",
    "ohms": "ohm",
    "angstrom": "\u00c5",
}
_SCALES = {"nano": "n", "micro": "u", "milli": "m", "centi": "c", "kilo": "k", "mega": "M", "giga": "G", "tera": "T"}
_SCALED = {"meter": "m", "metre": "m", "gram": "g", "second": "s", "liter": "L", "litre": "L", "joule": "J", "watt": "W", "newton": "N"}
_SCALED |= {"volt": "V", "ampere": "A", "mole": "mol", "pascal": "Pa", "byte": "B"}
_WORDS |= {
    f"{scale}{word}": f"{prefix}{sign}"
    for scale, prefix in _SCALES.items()
    for word, sign in _SCALED.items()
    if not (word == "byte" and scale in ("nano", "micro", "milli", "centi"))  # bytes have no prefixes below one
}
_WORDS |= {"pascal": "Pa", "hertz": "Hz", "kilohertz": "kHz", "megahertz": "MHz", "gigahertz": "GHz", "yard": "yd", "ounce": "oz"}
_WORDS |= {"hr": "h", "sec": "s", "kilocalorie": "kcal", "calorie": "cal", "electronvolt": "eV"}
_PLURALS = {"mins": "min", "lbs": "lb", "feet": "ft", "inches": "in"} | {f"{word}s": unit for word, unit in _WORDS.items()}
_PLURALS |= {f"{name}s": name for name in ("hour", "day", "week", "bit")}
_POWERS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_RAISED = re.compile("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+)")
_WORDED = (  # powers and quotients in words
    (re.compile(r"\b(?:square|sq)\.? +([^\W\d_]+)|\b([^\W\d_]+) +squared\b"), r"\1\2^2"),
    (re.compile(r"\b(?:cubic|cu)\.? +([^\W\d_]+)|\b([^\W\d_]+) +cubed\b"), r"\1\2^3"),
    (re.compile(r" +per +"), "/"),
)
_FACTOR = re.compile(r"([^\W\d_]+|[%$\u00b0\u20ac\u00a3])(?:\^|\*\*)?(-?[0-9]{1,2})?")
_SIGNS = str.maketrans({"\u00b7": "*", "\u22c5": "*", "\u00d7": "*", "\u2044": "/", "\u2215": "/", "\u2212": "-"})
_LARGEST = Fraction(10) ** 300


class Unit(NamedTuple):
    """A unit that equals `factor` in SI base units. `powers` contains the exponents of the units in `BASE`."""

    factor: Fraction
    powers: tuple[int, ...]


ONE = Unit(Fraction(1), (0,) * len(BASE))


def unit(text: str) -> Unit | None:
    """Returns the unit that a string names; "" means a plain number. Allows products (space, `*` or `.`), one `/` or `per`, and whole
    exponents, also in words (`square feet`, `meters cubed`).

    Both code points of a sign that has two in Unicode (ohm and omega, kelvin and K, angstrom) are accepted. None means that the unit is
    unknown or that its value is outside the range of a float.
    """
    if len(text) > LONGEST:
        return None
    parsed = _quotient(unicodedata.normalize("NFC", text).translate(_SIGNS))
    return parsed if parsed is not None and 1 / _LARGEST < parsed.factor < _LARGEST else None


def _quotient(text: str) -> Unit | None:
    text = _RAISED.sub(lambda match: "^" + match[1].translate(_POWERS), text.strip())
    for pattern, plain in _WORDED:
        text = pattern.sub(plain, text)
    above, slash, below = text.partition("/")
    if not text:
        return ONE
    if "/" in below or (slash and not below.strip()):
        return None
    over = ONE if above.strip() in ("", "1") and slash else _product(above)
    under = _product(below.strip().removeprefix("(").removesuffix(")")) if slash else ONE
    return None if over is None or under is None else _times(over, under, -1)


def _product(text: str) -> Unit | None:
    product = ONE
    for piece in re.split(r"[*.\s]+", text.replace("**", "^").strip()):
        match = _FACTOR.fullmatch(piece)
        factor = _parse_name(match[1]) if match else None
        if match is None or factor is None or abs(power := int(match[2] or 1)) > LARGEST_POWER:
            return None
        product = _times(product, factor, power)
    return product


def _parse_name(name: str) -> Unit | None:
    name = _WORDS.get(name, _PLURALS.get(name, name))
    if name in _WHOLE:
        return _base_unit(*_WHOLE[name])
    for prefix, scale in (*_PREFIXES.items(), *_BINARY.items()):
        rest = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if rest in _PREFIXED and (scale >= 1 if rest in ("B", "bit") else prefix not in _BINARY):
            factor, base = _PREFIXED[rest]
            base_unit = _base_unit(factor, base)
            return Unit(base_unit.factor * Fraction(repr(scale)), base_unit.powers)
    return None


@cache
def _base_unit(factor: float, base: str) -> Unit:
    powers = dict.fromkeys(BASE, 0)
    for piece in base.split():
        name, _, power = piece.partition("^")
        powers[name] += int(power or 1)
    return Unit(Fraction(repr(factor)), tuple(powers.values()))


def _times(left: Unit, right: Unit, power: int) -> Unit:
    return Unit(left.factor * right.factor**power, tuple(a + power * b for a, b in zip(left.powers, right.powers, strict=True)))
