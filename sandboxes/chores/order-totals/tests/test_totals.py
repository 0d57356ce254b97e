"""Both files, one of them never shown."""


def test_the_file_that_was_shown(runs):
    assert runs["shown"].files.json("totals.json") == {"ada": 9.0, "bob": 12.25, "cleo": 19.9}


def test_a_file_that_was_not(runs):
    assert runs["hidden"].exit == 0
    assert runs["hidden"].files.json("totals.json") == {"dora": 31.35, "emil": 10.0, "gus": 40.0}
