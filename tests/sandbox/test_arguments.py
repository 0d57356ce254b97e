"""Arguments of sandbox methods: each one gives a frame that the exec server accepts, or a typed error, and never ends the sandbox."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import SandboxSpec
from agentrl.sandbox import arguments, frames
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.inside import wire

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["", ".", "..", "/", "a/b", "\ud800", "\udcff", "\0", "A=B", "=", "x" * 256, "é" * 128, "/".join("d" * 64), "/".join("d" * 65), "a//b"]
)
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT, st.binary(max_size=8), st.lists(ANY_TEXT, max_size=3), st.just(10**400)
)
WORDS = st.lists(ANY_TEXT, max_size=4) | st.lists(ANYTHING, max_size=3).map(tuple) | ANYTHING
VARIABLES = st.none() | st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=3) | st.dictionaries(ANY_TEXT, ANYTHING, max_size=2) | ANYTHING
LIMITS = {"timeout_s": st.just(1.0) | ANYTHING, "output_bytes": st.just(1000) | ANYTHING}
CALLS = {
    "exec": {"argv": WORDS, "env": VARIABLES, "stdin": st.binary(max_size=4) | ANYTHING, **LIMITS},
    "python": {"code": ANYTHING, "session": ANYTHING, **LIMITS},
    "read": {"path": ANYTHING, "max_bytes": st.just(10) | ANYTHING},
    "write": {"path": ANYTHING, "data": st.binary(max_size=4) | ANYTHING},
    "write_all": {"files": st.dictionaries(ANY_TEXT, st.binary(max_size=4), max_size=3) | ANYTHING},
    "restore": {"archive": ANYTHING},
}
POSITIONAL = {
    "exec": ("argv",),
    "python": ("code",),
    "read": ("path",),
    "write": ("path", "data"),
    "write_all": ("files",),
    "restore": ("archive",),
}
"""Positional arguments of each method."""
CALL = st.sampled_from(sorted(CALLS)).flatmap(lambda name: st.tuples(st.just(name), st.fixed_dictionaries(CALLS[name])))
TYPED = (ValueError, TypeError)


def start_call(sandbox, call):
    """The coroutine of one call."""
    name, values = call
    positional = [values[key] for key in POSITIONAL[name]]
    return getattr(sandbox, name)(*positional, **{key: value for key, value in values.items() if key not in POSITIONAL[name]})


class RequestReader:
    """The first step of the exec server: reads and validates frames."""

    def __init__(self):
        host_end, self.sandbox_end = socket.socketpair()
        self.host_end = host_end
        self.requests = []

    async def channel(self):
        reader, writer = await asyncio.open_unix_connection(sock=self.host_end)
        return Channel(reader, writer, name="test")

    def take(self):
        link = wire.Link(self.sandbox_end)
        request = link.request()
        body = wire.Body(link, request["body"]).read()
        self.requests.append(request)
        return request, body


@given(CALL)
def test_any_argument_gives_a_typed_error_or_a_valid_frame(call):
    asyncio.run(check_call(call))


async def check_call(call):
    reader = RequestReader()
    channel = await reader.channel()
    sandbox = ChannelSandbox("test", SandboxSpec(image="none"), channel, None)
    task = asyncio.create_task(start_call(sandbox, call))
    try:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if task.done():
            with pytest.raises(TYPED):
                task.result()
        else:
            reader.sandbox_end.setblocking(True)
            reader.take()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await channel.close(0.0)
        reader.host_end.close()
        reader.sandbox_end.close()


@pytest.mark.parametrize("name", ["\udcff", "é", "a b", "\x01", "\n", "x" * 255, "é" * 127, "-rf", "\u202e"])
def test_every_possible_file_name_is_accepted(name):
    assert arguments.plain_path(f"{name}/{name}") == f"{name}/{name}"


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", "\udc00", "\udc7f", "x" * 256, "é" * 128])
def test_impossible_file_name_gives_a_printable_error(name):
    with pytest.raises(ValueError, match="path") as error:
        arguments.plain_path(name)
    str(error.value).encode()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("argv", "env"),
    [([], {}), ([""], {}), (["a\0"], {}), (["a"], {"": "x"}), (["a"], {"A=B": "x"}), (["a"], {"A\0": "x"}), (["a"], {"A": "\ud800"})],
)
def test_invalid_programs_are_refused(argv, env):
    with pytest.raises(ValueError, match=r"argv|env"):
        arguments.program(argv, env)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 10**400])
def test_timeout_is_positive_and_finite(value):
    with pytest.raises(ValueError, match="positive and finite"):
        arguments.limits(value, 1)


@pytest.mark.parametrize(
    "work",
    [
        lambda: arguments.plain_path(b"x"),
        lambda: arguments.program("true", None),
        lambda: arguments.program([1], None),
        lambda: arguments.program(["true"], [("A", "B")]),
        lambda: arguments.code(b"1"),
        lambda: arguments.session_name(1),
        lambda: arguments.limits("1", 1),
        lambda: arguments.limits(True, 1),
        lambda: arguments.size(1.0, "max_bytes", 10),
        lambda: arguments.content("text", "stdin"),
    ],
)
def test_an_argument_of_the_wrong_type_raises_type_error(work):
    with pytest.raises(TypeError):
        work()


def test_values_that_no_header_can_hold_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        frames.encode({"timeout_s": float("nan")})
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="deep"):
        frames.encode({"argv": nested})
