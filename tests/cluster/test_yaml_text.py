from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.cluster.yaml_text import to_yaml
from tests.strategies import examples

pytestmark = pytest.mark.slow

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(" \n:-#|>'\"ab", max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False, width=32) | TEXT
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)


@settings(max_examples=examples(150))
@given(st.lists(st.dictionaries(TEXT, DATA, min_size=1, max_size=3), min_size=1, max_size=3), st.lists(TEXT, max_size=2))
@example(
    [{"a": "x: y\n---\nkind: Secret", "yes": "no", "b": ["1e3", "null", "~", "", " x", "x\n", "x\ny\n", "x\n\n y\n"]}], ["# a\n---\nb: 1"]
)
@example([{"a": [{"b": [[], {}, [[1]]]}, {"c": {"d": None}}]}], [])
def test_a_parser_reads_the_same_documents(documents: list[dict[str, Any]], comments: list[str]) -> None:
    assert list(yaml.safe_load_all(to_yaml(documents, comments=comments))) == documents
