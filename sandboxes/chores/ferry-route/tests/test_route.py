"""Small timetables by hand; of the large one the arrival is known by how it is made."""

from timetable import chain


def test_changing_may_be_faster(runs):
    assert runs["direct-is-late"].value == [60, ["A", "B", "C"]]


def test_a_ferry_that_has_left_is_missed(runs):
    assert runs["missed"].value == [80, ["A", "B", "C"]]


def test_of_equal_arrivals_the_one_with_fewest_ferries(runs):
    assert runs["fewest"].value == [20, ["A", "D"]]


def test_no_way_and_no_need(runs):
    assert runs["none"].value is None
    assert runs["stay"].value == [17, ["A"]]


def test_twenty_thousand_connections(runs):
    assert runs["large"].value == [488, chain]
