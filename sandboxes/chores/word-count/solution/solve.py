"""Writes the program and nothing else."""

PROGRAM = """import argparse, re, sys
from collections import Counter

def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number

parser = argparse.ArgumentParser()
parser.add_argument("--top", type=positive, default=10)
parser.add_argument("--min", type=positive, default=1)
options = parser.parse_args()
words = Counter(word for word in re.findall(r"[^\\W\\d_]+", sys.stdin.read().lower()) if len(word) >= options.min)
for word, count in sorted(words.items(), key=lambda item: (-item[1], item[0]))[: options.top]:
    print(count, word)
"""

with open("words.py", "w") as file:
    file.write(PROGRAM)
