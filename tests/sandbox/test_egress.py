"""The host's proxy for sandboxes with an allow-list: forwarding, refusals, limits, and the handover of the listener."""

import asyncio
import contextlib
import gc
import ipaddress
import os
import socket
import threading
import time

import pytest

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import egress, limits
from agentrl.sandbox.egress import Bounds, EgressListener, requests
from agentrl.sandbox.egress.requests import is_public
from tests.waiting import until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Server:
    """A server of the host. It records what each connection sends, and answers each head with `answer` after a delay."""

    def __init__(self, answer=ANSWER, *, hang_up=True, delay_s=0.0):
        self.seen, self._answer, self._hang_up, self._delay_s = [], answer, hang_up, delay_s

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        index = len(self.seen)
        self.seen.append(b"")
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                answered = b"\r\n\r\n" in self.seen[index]
                self.seen[index] += data
                if b"\r\n\r\n" in self.seen[index] and not answered:
                    await asyncio.sleep(self._delay_s)
                    writer.write(self._answer)
                    await writer.drain()
                    if self._hang_up:
                        writer.write_eof()
        writer.close()


@contextlib.asynccontextmanager
async def proxied(folder, *network, port=0, **bounds):
    """The egress listener of a sandbox with this allow-list; a stand-in for the exec server has handed it over."""
    bounds = {"head_s": 60.0, "connect_s": 60.0, **bounds}
    listener = EgressListener("test", SandboxSpec(image="x", network=network), folder, Bounds(pause_s=0.0, **bounds))
    port_of_listener = hand_over(folder, lambda created: [created.fileno()])
    try:
        await listener.receive()
        listener.port = port_of_listener
        yield listener
    finally:
        await listener.close()


def hand_over(folder, descriptors):
    """Hands over a listener as the exec server does. Returns the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / "egress"))
        socket.send_fds(link, [b"\0"], descriptors(listener))
        return listener.getsockname()[1]


async def send(listener, data, *, end=False):
    """Returns everything that the proxy answers to `data`. `end`: closes the sending side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        async with asyncio.timeout(50):  # shorter than the idle limit
            return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


def status(answer):
    return int(answer.split(b" ")[1])


# Forwarding --------------------------------------------------------------------------------------------------------


async def test_plain_http_is_rewritten(tmp_path):
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        request = (
            f"GET http://127.0.0.1:{server.port}/a?b=c HTTP/1.1\r\nHost: elsewhere.example\r\nAccept: */*\r\n"
            "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nProxy-Authorization: secret\r\nExpect: 100-continue\r\nUpgrade: websocket\r\n\r\n"
        )
        assert await send(listener, request.encode()) == ANSWER
        expected = f"GET /a?b=c HTTP/1.1\r\naccept: */*\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n"
        assert server.seen == [expected.encode()] and not listener.proxy.refused


async def test_tunnel_forwards_both_ways_until_both_ends_close(tmp_path):
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        request = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        big = b"x" * 3_000_000 + b"\r\n\r\n"
        answer = await send(listener, request + big, end=True)
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n" + ANSWER and server.seen == [big]


async def test_body_is_forwarded_completely_and_nothing_after_it(tmp_path):
    async with Server(hang_up=False) as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        body = b"b" * 20_000
        request = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        smuggled_request = f"GET http://127.0.0.1:{server.port}/second HTTP/1.1\r\nHost: inner.example\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(request)
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        await until(lambda: server.seen[0].endswith(b"\r\n\r\n" + body))
        writer.close()
        await send(listener, request + smuggled_request)
        assert not any(b"second" in seen for seen in server.seen)


async def test_program_that_closes_or_sends_more_ends_its_connection(tmp_path):
    async with Server(hang_up=False) as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        request = f"GET http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        for extra in (b"", request):  # the server does not close its end
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(request)
            assert await reader.readexactly(len(ANSWER)) == ANSWER
            writer.write(extra) if extra else writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 50) == b""  # the idle limit would end it only after 60 s
            writer.close()
        assert [seen.count(b"GET") for seen in server.seen] == [1, 1]


async def test_server_that_answers_before_it_has_read_everything(tmp_path):
    async with Server(b"HTTP/1.1 413 Too Large\r\n\r\n") as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        request = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n".encode()
        assert status(await send(listener, request)) == 413


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT 127.0.0.1:{other} HTTP/1.1",
        "CONNECT localhost:{port} HTTP/1.1",
        "CONNECT 127.0.0.2:{port} HTTP/1.1",
        "CONNECT [::1]:{port} HTTP/1.1",
        "CONNECT [::ffff:127.0.0.2]:{port} HTTP/1.1",
        "CONNECT 169.254.169.254:80 HTTP/1.1",
        "CONNECT metadata.google.internal:80 HTTP/1.1",
        "GET http://0.0.0.0:{port}/ HTTP/1.1",
        "GET http://127.0.0.1/ HTTP/1.1",
        "GET http://example.com/?http://127.0.0.1:{port}/ HTTP/1.1",
    ],
)
async def test_unlisted_destination_is_refused_without_a_look_up(tmp_path, monkeypatch, line):
    monkeypatch.setattr(requests, "resolve", lambda *_: pytest.fail("a name that is not on the list was looked up"))
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        answer = await send(listener, (line.format(port=server.port, other=server.port ^ 1) + "\r\nHost: h\r\n\r\n").encode())
        assert status(answer) == 403 and b"allow-list" in answer
        assert server.seen == [] and listener.proxy.refused.total() == 1


MALFORMED = [
    "CONNECT user@127.0.0.1:{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT http://127.0.0.1:{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1:{port}:80 HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1:00{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.1:{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 2130706433:{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1%00.example.com:{port} HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    "CONNECT 127.0.0.1:{port} HTTP/2.0\r\n\r\n",
    "CONNECT\t127.0.0.1:{port}\tHTTP/1.1\r\nHost: h\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n",
    "GET https://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "GET http://user:pass@127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "GET http://127.0.0.1:{port}#@example.com/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "GET http://127.0.0.1:{port}\\@example.com/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nX: a\r\n folded\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nX : a\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nX: a\nY: b\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nX: a\rY: b\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nX: \0\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n",
    "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\na",
    "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\na",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\nHost: h\r\n\r\n",
    "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\n X: a\r\n\r\n",
    "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "\r\n\r\n",
    "\r\nGET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "\x16\x03\x01\x02\x00\r\n\r\n",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("raw_request", MALFORMED)
async def test_ambiguous_request_is_refused(tmp_path, raw_request):
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        assert status(await send(listener, raw_request.replace("{port}", str(server.port)).encode("latin-1"))) == 400
        assert server.seen == []


async def test_chunked_bodies_need_a_length(tmp_path):
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
        for extra in ("", "Content-Length: 5\r\n"):
            head = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n{extra}\r\n"
            assert status(await send(listener, head.encode() + b"5\r\nhello\r\n0\r\n\r\n")) == 411
        assert server.seen == []


def test_connection_header_cannot_remove_the_content_length():
    request = requests.parse_request(
        b"POST http://a.example/ HTTP/1.1\r\nHost: h\r\nConnection: content-length, host\r\nContent-Length: 3\r\n\r\n"
    )
    assert request.body == 3 and request.head == b"POST / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"


# Name resolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255"),
        *("100.100.100.200", "168.63.129.16", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fec0::1", "fd00:ec2::254"),
        *("ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::1", "2001:db8::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"])
def test_public_addresses(address):
    assert is_public(ipaddress.ip_address(address))


async def test_name_reaches_the_loopback_only_if_the_address_is_listed_too(tmp_path, monkeypatch):
    looked_up = []
    monkeypatch.setattr(requests, "resolve", lambda host, port: looked_up.append(host) or ["::ffff:127.0.0.1", "127.0.0.1"])
    async with Server() as server:
        request = f"GET http://inner.example:{server.port}/ HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        (tmp_path / "a").mkdir()
        async with proxied(tmp_path / "a", f"inner.example:{server.port}", f"127.0.0.1:{server.port ^ 1}") as listener:
            answer = await send(listener, request)
            assert status(answer) == 403 and b"no public address" in answer and server.seen == []
        (tmp_path / "b").mkdir()
        async with proxied(tmp_path / "b", f"inner.example:{server.port}", f"127.0.0.1:{server.port}") as listener:
            assert await send(listener, request) == ANSWER and f"Host: inner.example:{server.port}".encode() in server.seen[0]
    assert looked_up == ["inner.example", "inner.example"]  # once per request, so no later answer counts


async def test_machines_own_public_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "resolve", lambda *_: ["127.0.0.1"])
    monkeypatch.setattr(requests, "is_public", lambda address: True)  # as if this machine's address were public
    async with Server() as server, proxied(tmp_path, f"own.example:{server.port}") as listener:
        answer = await send(listener, f"CONNECT own.example:{server.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        assert status(answer) == 403 and b"this machine" in answer and server.seen in ([], [b""])


async def test_unknown_or_slow_name_is_an_error(tmp_path, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    (tmp_path / "a").mkdir()
    async with proxied(tmp_path / "a", "a.example:80", "127.0.0.1:1") as listener:
        monkeypatch.setattr(requests, "resolve", unknown)
        assert status(await send(listener, b"GET http://a.example/ HTTP/1.1\r\nHost: h\r\n\r\n")) == 502
        assert status(await send(listener, b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: h\r\n\r\n")) == 502
    (tmp_path / "b").mkdir()
    ended = threading.Event()
    try:
        async with proxied(tmp_path / "b", "a.example:80", connect_s=0.3) as listener:
            monkeypatch.setattr(requests, "resolve", lambda *_: ended.wait(120) and [])
            assert status(await send(listener, b"GET http://a.example/ HTTP/1.1\r\nHost: h\r\n\r\n")) == 504
    finally:
        ended.set()


# Limits -------------------------------------------------------------------------------------------------------


async def test_heads_are_limited_in_size_number_and_time(tmp_path):
    (tmp_path / "a").mkdir()
    async with proxied(tmp_path / "a", "127.0.0.1:1", head_bytes=4096) as listener:
        assert status(await send(listener, b"GET http://127.0.0.1:1/" + b"a" * 100_000)) == 431
        assert status(await send(listener, b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 101 + b"\r\n")) == 431
    (tmp_path / "b").mkdir()
    async with proxied(tmp_path / "b", "127.0.0.1:1", head_s=0.5) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        answer = asyncio.create_task(reader.read())
        async with asyncio.timeout(50):  # a limit that restarts with each byte would never end it
            while not answer.done():
                writer.write(b"a")
                await asyncio.sleep(0.05)
        assert status(answer.result()) == 408
        writer.close()


async def test_connections_beyond_the_limit_wait(tmp_path):
    async with Server() as server, proxied(tmp_path, f"127.0.0.1:{server.port}", connections=3) as listener:
        idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]  # accepted in this order
        response = asyncio.create_task(send(listener, f"GET http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\n\r\n".encode()))
        await asyncio.sleep(0.3)
        assert server.seen == [] and not response.done()
        idle[0][1].close()
        assert await response == ANSWER
        for _, writer in idle:
            writer.close()


@pytest.mark.slow
async def test_idle_and_slow_connections_end(tmp_path):
    for name in ("idle", "drips"):
        (tmp_path / name).mkdir()
    async with Server(hang_up=False) as server:
        connect = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        async with proxied(tmp_path / "idle", f"127.0.0.1:{server.port}", idle_s=0.4) as listener:
            start = time.monotonic()
            await send(listener, connect)  # the idle limit, not the total one of 900 s
            assert time.monotonic() - start > 0.3
        async with proxied(tmp_path / "drips", f"127.0.0.1:{server.port}", idle_s=2.0, total_s=3.0) as listener:
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(connect)
            start = last = time.monotonic()
            widest = 0.0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(50):
                    while True:
                        writer.write(b".")
                        await writer.drain()
                        widest, last = max(widest, time.monotonic() - last), time.monotonic()
                        await asyncio.sleep(0.05)
            assert last - start > 2.5 or widest > 1.5, "the connection was closed as idle although data was flowing"
            writer.close()


async def test_idle_limit_does_not_apply_to_a_server_listed_by_its_address(tmp_path, monkeypatch):
    """A model's server sends nothing before its answer is complete. A server that is listed by name only is not the operator's."""
    monkeypatch.setattr(requests, "resolve", lambda host, port: ["127.0.0.1"])
    async with Server(delay_s=0.6) as server:
        own = f"127.0.0.1:{server.port}"
        async with proxied(tmp_path, own, f"other.example:{server.port}", idle_s=0.2) as listener:
            head = "HTTP/1.1\r\nHost: h\r\n"
            plain = f"POST http://{{}}/ {head}Content-Length: 2\r\n\r\nhi"
            tunnel = f"CONNECT {{}} {head}\r\nGET / {head}\r\n"
            other = f"other.example:{server.port}"
            requests_sent = [template.format(address).encode() for template in (plain, tunnel) for address in (own, other)]
            answers = await asyncio.gather(*(send(listener, request) for request in requests_sent))
    assert [answer.endswith(ANSWER) for answer in answers] == [True, False, True, False]


async def test_byte_budget_covers_all_connections(tmp_path):
    big = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 60_000
    async with Server(big) as server, proxied(tmp_path, f"127.0.0.1:{server.port}", total_bytes=100_000) as listener:
        request = f"GET http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        assert await send(listener, request) == big
        assert await send(listener, request) != big
        answer = await send(listener, request)
        assert status(answer) == 403 and b"100000 bytes" in answer and len(server.seen) == 2


async def test_first_refusal_is_logged_and_the_others_are_counted(tmp_path, caplog):
    async with proxied(tmp_path, "127.0.0.1:1") as listener:
        for _ in range(5):
            await send(listener, b"CONNECT example.com:443 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert [record.getMessage() for record in caplog.records] == [
            "sandbox test: the proxy rejected a network request: example.com:443: not on the sandbox's allow-list"
        ]
    assert "the proxy rejected 5 network requests (not on the sandbox's allow-list: 5)" in caplog.messages[-1]
    assert len(caplog.messages) == 2


# The listener ---------------------------------------------------------------------------------------------------------


async def test_closing_ends_everything(tmp_path):
    def state():
        return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate() if "egress t" in thread.name)

    gc.collect()  # closes sockets that earlier tests left open
    async with Server(hang_up=False) as server:
        before = state()
        async with proxied(tmp_path, f"127.0.0.1:{server.port}") as listener:
            links = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(5)]
            for number, (_, writer) in enumerate(links):
                writer.write(f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode() if number % 2 else b"GET ")
            await until(lambda: len(server.seen) == 2)
            assert len(state()[1]) == 1
        for reader, writer in links:
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 50)
            writer.close()
        await listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port))
        await until(lambda: state() == before)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["nothing", "two", "pipe", "local", "not listening", "datagrams", "hang up"])
async def test_only_a_single_listener_is_accepted(tmp_path, kind):
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        pipe = os.pipe()
        stack.callback(lambda: [os.close(end) for end in pipe])
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(tmp_path / "local"))
        local.listen()
        tcp, udp = stack.enter_context(socket.socket()), stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        listener = EgressListener("test", SandboxSpec(image="x", network=("127.0.0.1:1",)), tmp_path)
        stack.callback(listener.discard)
        offered = {"two": [tcp, tcp], "pipe": [pipe[0]], "local": [local], "not listening": [tcp], "datagrams": [udp]}
        if kind == "hang up":
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(tmp_path / "egress"))
        else:
            hand_over(tmp_path, lambda _: [end if isinstance(end, int) else end.fileno() for end in offered.get(kind, [])])
        with pytest.raises(SandboxError, match="instead of its listener"):
            await asyncio.wait_for(listener.receive(), 50)
        await listener.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_listener_that_the_exec_server_tampers_with_blocks_nothing(tmp_path, caplog):
    """The creator keeps a copy, makes `accept` block, and accepts the host's connections; the driver continues and closes in time."""
    copies = []
    listener = EgressListener("test", SandboxSpec(image="x", network=("127.0.0.1:1",)), tmp_path)
    port = hand_over(tmp_path, lambda listener: copies.append(listener.dup()) or [listener.fileno()])
    await listener.receive()
    copies[0].setblocking(True)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)):
            copies[0].settimeout(0.01)
            with contextlib.suppress(OSError):
                copies[0].accept()
            copies[0].setblocking(True)
        await asyncio.sleep(0)
    await listener.close()
    assert "did not end" not in caplog.text
    copies[0].close()


def test_without_an_allow_list_nothing_changes(tmp_path):
    spec = SandboxSpec(image="x")
    assert "network" not in limits.server_options("test", spec) and egress.socket_mounts(tmp_path, spec) == {}


def test_loopback_bypasses_the_proxy_unless_it_is_listed():
    options = limits.server_options("test", SandboxSpec(image="x", network=("pypi.org:443",)))
    environment = options["network"]["environment"]
    assert environment["no_proxy"] == environment["NO_PROXY"] == "localhost,127.0.0.1,::1"
    assert environment["HTTPS_PROXY"] == environment["http_proxy"] == "http://127.0.0.1:3128"
    options = limits.server_options("test", SandboxSpec(image="x", network=("127.0.0.1:80",)))
    assert options["network"]["environment"]["NO_PROXY"] == "localhost,::1"
