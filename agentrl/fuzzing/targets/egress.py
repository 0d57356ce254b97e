"""What a program in a sandbox asks the proxy for, and the entries of an allow-list.

What goes on to a server is one request, and another reader of HTTP understands it as the proxy did.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h11

from agentrl import destinations
from agentrl.fuzzing import mutators
from agentrl.fuzzing.mutators import join, split
from agentrl.fuzzing.target import Check, Target, must
from agentrl.sandbox.egress import heads
from agentrl.sandbox.egress.addresses import public
from agentrl.sandbox.egress.heads import Refusal, Wanted

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
    """The proxy hands over a head that ends with the first empty line."""
    end = body.find(b"\r\n\r\n")
    head = (body[:end] if end >= 0 else body)[: HEAD_BYTES - 4] + b"\r\n\r\n"
    try:
        wanted = heads.parse(head)
    except Refusal as refusal:
        must(refusal.reason.isprintable() and 400 <= refusal.status < 600, "a refusal that cannot be told")
        return
    must(1 <= wanted.port <= 65535 and destinations.plain_host(_shown(wanted.host)) == wanted.host, "a host that is not in its one form")
    must((address := destinations.literal(wanted.host)) is None or isinstance(public(address), bool), "an address that cannot be judged")
    if wanted.head:
        _understood(wanted)


def _understood(wanted: Wanted) -> None:
    """Another reader of HTTP (h11) finds the same one request in what is sent on."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * HEAD_BYTES)
    server.receive_data(wanted.head)
    try:
        request = server.next_event()
    except h11.RemoteProtocolError as error:
        # stricter than we are about a few bytes in values: such a server refuses the request, which forges none
        must("illegal header" in str(error) or "illegal request line" in str(error), f"a server cannot read what is sent on: {error}")
        return
    must(isinstance(request, h11.Request), "no request is sent on")
    assert isinstance(request, h11.Request)
    named = {name: value for name, value in request.headers}
    host = _shown(wanted.host)
    must(named.get(b"host", b"").decode("latin-1") in (host, f"{host}:{wanted.port}"), "the server is told of another host")
    must(named.get(b"connection") == b"close", "a second request could follow")
    must(b"transfer-encoding" not in named and int(named.get(b"content-length", b"0")) == wanted.body, "a body of another length")
    if wanted.body == 0:
        must(type(server.next_event()) in (h11.EndOfMessage,) and server.trailing_data[0] == b"", "more than one request is sent on")


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _entry(text: str) -> None:
    try:
        found = destinations.parse(text)
    except ValueError:
        return
    host = f"x.{found.host}" if found.below else found.host
    must(found.covers(host, found.port) and not found.covers(host, found.port % 65535 + 1), "an entry that does not mean its own port")
    must(not found.below or not found.covers(found.host, found.port), "a star that stands for the name itself")
    again = destinations.parse(f"{'*.' if found.below else ''}{_shown(found.host)}:{found.port}")
    must(again == found, "an entry that means another one when it is written plainly")
    if found.address is None:
        must(destinations.literal(found.host) is None, "a name that is an address")


def seeds() -> Sequence[bytes]:
    requests = [
        b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\nProxy-Connection: keep-alive\r\n\r\n",
        b"GET http://example.org/a?b=c HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nConnection: x\r\nX: y\r\n\r\n",
        b"POST http://example.org:8080 HTTP/1.0\r\nContent-Length: 12\r\nContent-Type: text/plain\r\n\r\n",
        b"GET http://[2606:2800::1]:80/ HTTP/1.1\r\nHost: [2606:2800::1]\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n",
        b"GET http://user@host/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
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
