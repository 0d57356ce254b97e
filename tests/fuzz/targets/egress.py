"""Requests of a sandboxed program to the proxy, and the entries of an allow-list.

The proxy forwards one request, which other HTTP parsers read as the proxy did.
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
        request = requests.parse_request(head)
    except Refusal as refusal:
        must(refusal.reason.isprintable() and 400 <= refusal.status < 600, "a refusal without a printable reason")
        return
    must(
        1 <= request.port <= 65535 and destinations.plain_host(_bracketed(request.host)) == request.host,
        "a host that is not in its canonical form",
    )
    must((address := destinations.address_literal(request.host)) is None or isinstance(is_public(address), bool), "an unclassified address")
    if request.head:
        _check_other_parsers(request)


def _check_other_parsers(request: ProxyRequest) -> None:
    """A strict HTTP parser (h11) and a lenient one (`http.server`) read the same single request from what is forwarded."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * HEAD_BYTES)
    server.receive_data(request.head)
    parsed = server.next_event()
    must(isinstance(parsed, h11.Request), "no request is forwarded")
    assert isinstance(parsed, h11.Request)
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in parsed.headers]
    _check_headers(request, headers)
    if request.body == 0:
        must(type(server.next_event()) in (h11.EndOfMessage,) and server.trailing_data[0] == b"", "more than one request is forwarded")
    lenient = _Lenient(request.head)
    if not lenient.refused:  # it accepts fewer headers
        must(lenient.command == parsed.method.decode(), "an ambiguous request is forwarded")
        must(lenient.path.lstrip("/") == parsed.target.decode().lstrip("/"), "an ambiguous request is forwarded")
        must(lenient.rfile.read() == b"", "more than one request is forwarded")
        _check_headers(request, [(name.lower(), value) for name, value in lenient.headers.items()])


def _check_headers(request: ProxyRequest, headers: list[tuple[str, str]]) -> None:
    by_name = dict(headers)
    single = [name for name, _ in headers if name in ("host", "connection", "content-length")]
    must(len(single) == len(set(single)), "a header is forwarded twice")
    host = _bracketed(request.host)
    must(by_name.get("host") in (host, f"{host}:{request.port}"), "another host is forwarded")
    must(by_name.get("connection") == "close", "a second request could follow")
    must("transfer-encoding" not in by_name and int(by_name.get("content-length", "0")) == request.body, "a body of another length")


class _Lenient(BaseHTTPRequestHandler):
    """The standard library's server, used only to parse a request head."""

    def __init__(self, head: bytes) -> None:
        self.rfile, self.wfile = io.BytesIO(head), io.BytesIO()
        self.raw_requestline = self.rfile.readline(65537)
        self.client_address, self.requestline, self.request_version = ("", 0), "", ""
        self.refused = not self.parse_request()

    def log_message(self, *_: object) -> None: ...


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _entry(text: str) -> None:
    try:
        entry = destinations.parse_destination(text)
    except ValueError:
        return
    host = f"x.{entry.host}" if entry.below else entry.host
    must(entry.covers(host, entry.port) and not entry.covers(host, entry.port % 65535 + 1), "an entry that does not cover exactly its port")
    must(not entry.below or not entry.covers(entry.host, entry.port), "a wildcard that covers the domain itself")
    reparsed = destinations.parse_destination(f"{'*.' if entry.below else ''}{_bracketed(entry.host)}:{entry.port}")
    must(reparsed == entry, "an entry that changes when it is formatted and parsed")
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
    return [*(join("head", text) for text in requests), *(join("entry", text) for text in entries)]


target = Target(
    name="egress",
    about="requests of a program to the proxy; entries of an allow-list",
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
