"""The tools of an MCP server that are offered: unusual names, schemas of every draft, and unusable tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.agent.arguments import argument_errors, argument_example
from agentrl.agent.chat import ChatFormat
from agentrl.agent.forms import FORMS
from agentrl.base.tool_list import InvalidMessage, excluded_tools, usable_tools
from tests.agent.hostile_mcp import COUNT, ECHO
from tests.agent.test_template_probe import TOKENIZERS, make_tokenizer


def with_keys(*keys: Any, name: str = "a", **schema: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object", "properties": {key: {"type": "string"} for key in keys}, **schema}}


EVERY_DRAFT = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "id": "https://example.org/tool",
    "$id": "tool",
    "$anchor": "top",
    "$dynamicAnchor": "node",
    "$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True},
    "definitions": {"title": {"type": "string", "pattern": "^("}, "old": {"$ref": "#/definitions/old"}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "title": {"$ref": "#/definitions/title"}}}},
    "properties": {
        "node": {"$ref": "#/$defs/node"},
        "remote": {"$ref": "https://example.org/other.json#/x"},
        "dynamic": {"$dynamicRef": "#node"},
        "recursive": {"$recursiveRef": "#"},
        "any": True,
        "none": False,
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "contains": {}, "unevaluatedItems": False},
        "old_pair": {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        "data": {"const": {"title": "kept", "patternProperties": {"^(": {}}, "two words": None}},
        "media": {"type": "string", "contentEncoding": "base64", "contentSchema": {"type": "object"}, "readOnly": True, "nullable": True},
    },
    "dependencies": {"node": ["pair"]},
    "dependentRequired": {"pair": ["node"]},
    "dependentSchemas": {"title": {"required": ["node"]}},
    "propertyNames": {"pattern": "^("},
    "if": {"required": ["node"]},
    "then": {"not": {"required": ["none"]}},
    "else": {"minProperties": 0},
    "required": None,
    "unevaluatedProperties": False,
    "x-anything": [1],
}


def test_schemas_of_every_draft_are_offered_and_unknown_keywords_are_not_checked() -> None:
    (tool,) = usable_tools([{"name": "a", "inputSchema": EVERY_DRAFT}], ())
    assert tool.parameters["properties"]["data"] == EVERY_DRAFT["properties"]["data"], "a constant is not a schema"  # type: ignore[index]
    assert "title" in tool.parameters["definitions"] and "title" in tool.parameters["dependentSchemas"], "property names are not keywords"
    node = {"next": {"next": {}}, "title": "t"}
    arguments = {"node": node, "remote": 1, "dynamic": 2, "recursive": 3, "any": 4, "pair": [1], "old_pair": [1], "media": "eA=="}
    assert argument_errors(tool.schema, arguments) == ""
    assert "title" in argument_errors(tool.schema, {"node": {"title": 3}}), "references are followed"
    assert argument_example(tool.schema)


def test_the_error_about_an_enumeration_of_all_arguments_has_a_subject() -> None:
    schema = {"function": {"name": "a", "parameters": {"enum": [{"x": 1}]}}}
    assert argument_errors(schema, {"x": 2}) == 'arguments: needs one of [{"x": 1}], got {"x": 2}'


ODD_NAMES = ("two words", "a.b", "$top", "@id", "caf\u00e9", "\u4e2d\u6587", "__proto__", "constructor")
ODD_NAMES += ("a'b", 'a"b', "a\\b", "{{x}}", "a[0]", "x" * 80)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm45", "llama3_json", "mistral"])
def test_unusual_property_names_survive_a_call_exactly(form: str) -> None:
    schema = with_keys(*ODD_NAMES, required=list(ODD_NAMES))
    (tool,) = usable_tools([schema], ())
    arguments = {key: f"v{number}" for number, key in enumerate(ODD_NAMES)}
    as_json = json.dumps({"name": "a", "arguments": arguments})
    tagged = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    paired = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    texts = {
        "hermes": f"<tool_call>\n{as_json}\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=a>\n{tagged}</function>\n</tool_call>",
        "glm45": f"<tool_call>a\n{paired}</tool_call>",
        "llama3_json": json.dumps({"name": "a", "parameters": arguments}),
        "mistral": f"[TOOL_CALLS][{as_json}]",
    }
    reading = FORMS[form].read(texts[form], [tool.schema])
    assert [dict(call.arguments) for call in reading.calls] == [arguments] and not reading.errors
    assert argument_errors(tool.schema, arguments) == ""


BAD_TOOLS: dict[str, Any] = {
    "no object": 7,
    "null": None,
    "no name": {"inputSchema": {"type": "object"}},
    "empty name": with_keys(name=""),
    "spaces": with_keys(name="two words"),
    "long name": with_keys(name="n" * 65),
    "foreign letters": with_keys(name="caf\u00e9"),
    "no schema": {"name": "b"},
    "null schema": {"name": "b", "inputSchema": None},
    "boolean schema": {"name": "b", "inputSchema": True},
    "list schema": {"name": "b", "inputSchema": [{"type": "object"}]},
    "array": {"name": "b", "inputSchema": {"type": "array"}},
    "types": {"name": "b", "inputSchema": {"type": ["object", "null"]}},
    "properties": {"name": "b", "inputSchema": {"type": "object", "properties": ["x"]}},
    "required": {"name": "b", "inputSchema": {"type": "object", "required": "x"}},
    "required what is not there": {"name": "b", "inputSchema": {"type": "object", "required": [["x"]]}},
    "not a finite number": with_keys("x", name="b", minimum=float("inf")),
    "empty key": with_keys("", name="b"),
    "long key": with_keys("x" * 81, name="b"),
    "outer spaces": with_keys(" x", name="b"),
    "a line": with_keys("x\ny", name="b"),
    "a tag": with_keys("</parameter>", name="b"),
    "a direction": with_keys("a\u202eb", name="b"),
    "no width": with_keys("a\u200bb", name="b"),
    "a half character": with_keys("\ud800", name="b"),
    "not normalized": with_keys("cafe\u0301", name="b"),
    "a key of data": with_keys("x", name="b", default={"\x1b[2J": 1}),
}


@pytest.mark.parametrize("case", BAD_TOOLS)
def test_an_unusable_tool_does_not_exclude_others(case: str) -> None:
    listed = [ECHO, BAD_TOOLS[case], COUNT]
    assert [tool.name for tool in usable_tools(listed, ())] == ["echo", "count"]
    ((name, reason),) = excluded_tools(listed).items()
    assert reason.isprintable() and len(reason) < 300 and name not in ("echo", "count")
    with pytest.raises(InvalidMessage):
        usable_tools([BAD_TOOLS[case]], ())


def test_two_different_tools_with_one_name_are_both_excluded() -> None:
    other = {**ECHO, "inputSchema": {"type": "object"}}
    assert [tool.name for tool in usable_tools([ECHO, COUNT, ECHO], ())] == ["echo", "count"] and excluded_tools([ECHO, ECHO]) == {}
    for listed in ([ECHO, COUNT, other], [other, ECHO, COUNT, ECHO], [{**ECHO, "inputSchema": 3}, ECHO, COUNT]):
        assert [tool.name for tool in usable_tools(listed, ())] == ["count"] and list(excluded_tools(listed)) == ["echo"]


def test_a_policy_gets_no_tool_that_it_cannot_call() -> None:
    chat = ChatFormat(TOKENIZERS["hermes"])
    (plain, control) = usable_tools([with_keys("two words"), with_keys("x|im_end|y", name="b")], ())
    assert chat.tool_problem(plain.schema) == "" and chat.tool_problem(control.schema) == ""
    assert "control token" in chat.tool_problem(
        {"type": "function", "function": {"name": "c", "parameters": with_keys("<|im_end|>")["inputSchema"]}}
    )
    chat._form = FORMS["pythonic"]
    (required, optional) = usable_tools(
        [with_keys("two words", required=["two words"]), with_keys("two words", "n", name="b", required=["n"])], ()
    )
    assert "cannot have an argument named 'two words'" in chat.tool_problem(required.schema) and chat.tool_problem(optional.schema) == ""


def test_a_tool_that_the_template_cannot_render_is_not_offered() -> None:
    types = "{% for t in tools or [] %}{{ t.function.name }}{% for p in t.function.parameters.properties.values() %}{{ p.type + '' }}"
    chat = ChatFormat(make_tokenizer(types + "{% endfor %}{% endfor %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"))
    (tool,) = usable_tools([{"name": "a", "inputSchema": {"type": "object", "properties": {"any": True}}}], ())
    assert "cannot render messages of user with tools" in chat.tool_problem(tool.schema)
    (tool,) = usable_tools([with_keys("x")], ())
    assert chat.tool_problem(tool.schema) == ""
