"""Parts of the exec server that need no sandbox: its bookkeeping of output, and that it only needs a plain Python."""

import ast
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import exec_server
from agentrl.sandbox.exec_server import Output


@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(0, 100))
def test_output_keeps_head_and_tail(chunks, limit):
    output = Output(limit)
    for chunk in chunks:
        output.add(chunk)
    whole = b"".join(chunks)
    text = output.text()
    if len(whole) <= limit:
        assert text == whole and output.cut == 0
    else:
        head, tail = limit - limit // 2, limit // 2
        assert output.cut == len(whole) - limit
        assert text == whole[:head] + b"\n[... %d bytes cut ...]\n" % output.cut + whole[len(whole) - tail :]


def test_output_memory_is_bounded():
    output = Output(1000)
    for _ in range(100):
        output.add(b"x" * exec_server.CHUNK)
    assert len(output.head) + len(output.tail) <= 1000 + 5 * exec_server.CHUNK


def test_standard_library_only():
    tree = ast.parse(Path(exec_server.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"__future__"}
