"""Writes the module and nothing else."""

MODULE = """PARTS = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
         (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def to_roman(number):
    if not isinstance(number, int) or not 1 <= number <= 3999:
        raise ValueError(number)
    text = ""
    for value, letters in PARTS:
        text += letters * (number // value)
        number %= value
    return text


SPELLED = {to_roman(number): number for number in range(1, 4000)}


def from_roman(text):
    if text not in SPELLED:
        raise ValueError(text)
    return SPELLED[text]
"""

with open("roman.py", "w") as file:
    file.write(MODULE)
