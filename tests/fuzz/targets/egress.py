"""What a program in a sandbox asks the proxy for, and the entries of an allow-list.

What goes on to a server is one request, and another reader of HTTP understands it as the proxy did.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import h11

from agentrl.records import destinations
from agentrl.sandbox.egress import requests
from agentrl.sandbox.egress.requests import ProxyRequest, Refusal, is_public
from tests.fuzz import mutators
from tests.fuzz.mutators import join, split
from tests.fuzz.target import Check, Target, must

HEAD_BYTES = 16384


def prepare(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        label, body = split(data)
        if label == "head":
            _head(body)
        elif label == "entry":
            _entry(body.decode("utf-8", "replace"))

    return check


def _head(body: bytes) -> None:
    """The proxy passes on a head that ends with the first empty line."""
    end = body.find(b"\r\n\r\n")
    head = (body[:end] if end >= 0 else body)[: HEAD_BYTES - 4] + b"\r\n\r\n"
    try:
        wanted = requests.parse_request(head)
    except Refusal as refusal:
        must(refusal.reason.isprintable() and 400 <= refusal.status < 600, "a refusal that cannot be told")
        return
    must(1 <= wanted.port <= 65535 and destinations.plain_host(_shown(wanted.host)) == wanted.host, "a host that is not in its one form")
    must(
        (address := destinations.address_literal(wanted.host)) is None or isinstance(is_public(address), bool),
        "an address that cannot be judged",
    )
    if wanted.head:
        _understood(wanted)


def _understood(wanted: ProxyRequest) -> None:
    """Two readers of HTTP, a strict one (h11) and a lenient one (`http.server`), find the same one request in what is sent on."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * HEAD_BYTES)
    server.receive_data(wanted.head)
    request = server.next_event()
    must(isinstance(request, h11.Request), "no request is sent on")
    assert isinstance(request, h11.Request)
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers]
    _sent_on(wanted, headers)
    if wanted.body == 0:
        must(type(server.next_event()) in (h11.EndOfMessage,) and server.trailing_data[0] == b"", "more than one request is sent on")
    lenient = _Lenient(wanted.head)
    if not lenient.refused:  # it takes fewer headers
        must(lenient.command == request.method.decode(), "a request of two meanings is sent on")
        must(lenient.path.lstrip("/") == request.target.decode().lstrip("/"), "a request of two meanings is sent on")
        must(lenient.rfile.read() == b"", "more than one request is sent on")
        _sent_on(wanted, [(name.lower(), value) for name, value in lenient.headers.items()])


def _sent_on(wanted: ProxyRequest, headers: list[tuple[str, str]]) -> None:
    named = dict(headers)
    once = [name for name, _ in headers if name in ("host", "connection", "content-length")]
    must(len(once) == len(set(once)), "a header is sent on twice")
    host = _shown(wanted.host)
    must(named.get("host") in (host, f"{host}:{wanted.port}"), "the server is told of another host")
    must(named.get("connection") == "close", "a second request could follow")
    must("transfer-encoding" not in named and int(named.get("content-length", "0")) == wanted.body, "a body of another length")


class _Lenient(BaseHTTPRequestHandler):
    """The standard library's server, as far as it reads a head; it answers nothing."""

    def __init__(self, head: bytes) -> None:
        self.rfile, self.wfile = io.BytesIO(head), io.BytesIO()
        self.raw_requestline = self.rfile.readline(65537)
        self.client_address, self.requestline, self.request_version = ("", 0), "", ""
        self.refused = not self.parse_request()

    def log_message(self, *_: object) -> None: ...


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _entry(text: str) -> None:
    try:
        entry = destinations.parse_destination(text)
    except ValueError:
        return
    host = f"x.{entry.host}" if entry.below else entry.host
    must(entry.covers(host, entry.port) and not entry.covers(host, entry.port % 65535 + 1), "an entry that does not mean its own port")
    must(not entry.below or not entry.covers(entry.host, entry.port), "a star that stands for the name itself")
    again = destinations.parse_destination(f"{'*.' if entry.below else ''}{_shown(entry.host)}:{entry.port}")
    must(again == entry, "an entry that means another one when it is written plainly")
    if entry.address is None:
        must(destinations.address_literal(entry.host) is None, "a name that is an address")


def seeds() -> Sequence[bytes]:
    requests = [
        b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\nProxy-Connection: keep-alive\r\n\r\n",
        b"GET http://example.org/a?b=c HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nConnection: x\r\nX: y\r\n\r\n",
        b"POST http://example.org:8080 HTTP/1.0\r\nContent-Length: 12\r\nContent-Type: text/plain\r\n\r\n",
        b"GET http://[2606:2800::1]:80/ HTTP/1.1\r\nHost: [2606:2800::1]\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET http://user@host/ HTTP/1.1\r\nHost: host\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    ]
    entries = [
        b"pypi.org:443",
        b"*.example.org:443",
        b"93.184.215.14:80",
        b"[2606:2800::1]:80",
        b"[::ffff:127.0.0.1]:1",
        b"0x7f.1:80",
        b"xn--bcher-kva.de:65535",
    ]
    return [*(join("head", one) for one in requests), *(join("entry", one) for one in entries)]


target = Target(
    name="egress",
    about="what a program asks the proxy for; entries of an allow-list",
    prepare=prepare,
    seeds=seeds,
    brief=70_000,
    mutate=mutators.labelled({"head": mutators.head_lines, "entry": None}),
    words=(
        *(
            b"Host: ",
            b"Content-Length: ",
            b"Transfer-Encoding: chunked",
            b"Connection: ",
            b"http://",
            b"CONNECT ",
            b" HTTP/1.1",
            b" HTTP/1.0",
        ),
        *(
            b"\r\n",
            b"\r",
            b"\n",
            b"\t",
            b"\0",
            b"\x85",
            b"\xa0",
            b"@",
            b"#",
            b"%00",
            b"[::1]",
            b"::ffff:7f00:1",
            b"127.1",
            b"2130706433",
            b"64:ff9b::",
        ),
    ),
)
