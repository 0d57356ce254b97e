"""Rows from a database that the agent has never seen."""


def test_rows(runs):
    assert runs["hidden"].value == [["Tove", 280], ["Sven", 260], ["Pia", 180]]


def test_it_is_one_select(outputs):
    text = outputs.text("query.sql").strip().rstrip(";")
    assert text.lower().startswith(("select", "with")) and ";" not in text
