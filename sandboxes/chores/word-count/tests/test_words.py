"""Counts by another way than a solution would take."""

from pathlib import Path

TEXT = (Path(__file__).parent / "text.txt").read_text()


def counted(shortest=1):
    words = "".join(c if c.isalpha() else " " for c in TEXT.lower()).split()
    found = {word: words.count(word) for word in words if len(word) >= shortest}
    return [f"{count} {word}" for word, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))]


def test_ten_words_without_an_option(runs):
    assert runs["plain"].stdout.splitlines() == counted()[:10]


def test_options(runs):
    assert runs["top"].stdout.splitlines() == counted()[:3]
    assert runs["long"].stdout.splitlines() == counted(5)[:4]


def test_no_words_and_no_number(runs):
    assert (runs["nothing"].stdout, runs["nothing"].exit) == ("", 0)
    assert (runs["zero"].stdout, runs["zero"].exit) == ("", 2)
