"""What the docstrings promise. The numbers are worked out here, by other means."""

import statistics


def test_median(runs):
    assert runs["even"].value == statistics.median([7, 1, 4, 10])
    assert runs["odd"].value == 5
    assert runs["untouched"].stdout == "[3, 1, 2]\n"


def test_mode(runs):
    assert runs["mode"].value == "pear"


def test_moving_average(runs):
    assert runs["average"].value == [5, 14 / 3, 5]
    assert runs["short"].value == []
