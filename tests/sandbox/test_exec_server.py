"""Parts of the exec server that need no sandbox: the limits on output, and the joining of its modules."""

import ast
import collections
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import server_code
from agentrl.sandbox.inside import program
from agentrl.sandbox.inside.program import Output

OLDEST = (3, 9)
PARTS = {name: ast.parse((server_code.FOLDER / f"{name}.py").read_text()) for name in server_code.MODULES}


def internal_imports(nodes):
    return [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith("agentrl.sandbox.inside.")]


@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(0, 100))
def test_output_keeps_head_and_tail(chunks, limit):
    output = Output(limit)
    for chunk in chunks:
        output.add(chunk)
    written = b"".join(chunks)
    text = output.text()
    if len(written) <= limit:
        assert text == written and output.cut == 0
    else:
        head, tail = limit - limit // 2, limit // 2
        assert output.cut == len(written) - limit
        assert text == written[:head] + b"\n[... %d bytes cut ...]\n" % output.cut + written[len(written) - tail :]


def test_output_memory_is_bounded():
    output = Output(1000)
    for _ in range(100):
        output.add(b"x" * program.CHUNK)
    assert len(output.head) + len(output.tail) <= 1000 + 5 * program.CHUNK


# The joined file ----------------------------------------------------------------------------------------------------


def test_joined_file_needs_only_the_standard_library():
    tree = ast.parse(server_code.source(), feature_version=OLDEST)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"__future__"}
    compile(tree, "exec_server.py", "exec", dont_inherit=True)


def test_every_module_is_joined_and_in_order():
    assert set(PARTS) == {path.stem for path in server_code.FOLDER.glob("*.py")} - {"__init__"}
    order = list(PARTS)
    for name, tree in PARTS.items():
        for node in internal_imports(tree.body):
            assert order.index(node.module.rpartition(".")[2]) < order.index(name)
    assert order[-1] == "server"


@pytest.mark.parametrize("name", PARTS)
def test_modules_import_without_renaming(name):
    """Joining removes these imports, so they may neither rename anything nor import modules."""
    for node in ast.walk(PARTS[name]):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("agentrl") for alias in node.names)
    for node in internal_imports(ast.walk(PARTS[name])):
        assert all(alias.asname is None and alias.name != "*" for alias in node.names)


def test_no_two_modules_define_the_same_name():
    defined = collections.Counter(name for tree in PARTS.values() for name in set(defined_names(tree)))
    assert {name for name, times in defined.items() if times > 1} == {"TYPE_CHECKING"}


def defined_names(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        elif isinstance(node, ast.If):
            yield from defined_names(node)
