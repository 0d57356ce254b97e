"""Names of a log that the agent has not seen, three of them equally busy."""


def test_names(runs):
    assert runs["shown"].stdout == "anna\nben\ncarl\n"
    assert runs["hidden"].stdout == "zoe\nxaver\nvera\n"


def test_it_is_short_and_shell(outputs):
    text = outputs.text("busiest.sh")
    assert len(text) <= 200 and "python" not in text
