"""What a program asks the proxy for: the head of an HTTP request, read strictly. Every byte is hostile.

h11 reads it, and forgives what many servers send. Here that is refused, because two readers could understand it differently: a head
is taken only when it is, line by line, what h11 read (no bare line ends, folded or merged headers), and so are `user@host` and a body
whose end is not a plain number of bytes. What goes on to a server is written anew from what was understood, one request to a
connection, so there is nothing a second request could hide behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

import h11

from agentrl.records.destinations import plain_host

MAX_HEADERS = 100
_SIZE_DIGITS = 15
_ABSOLUTE = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@]+)(?::([0-9]{1,5}))?")
_HOP = {"connection", "expect", "host", "keep-alive", "te", "trailer", "upgrade", "content-length", "http2-settings"}
"""Headers that concern one connection only, and those that are written anew."""


class Refusal(Exception):
    """A request that is not carried out: the status and the reason that the program is told."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A request: where to (`host` as `agentrl.records.destinations.plain_host` gives it), and what is sent there first."""

    host: str
    port: int
    head: bytes = b""  # for the server; empty: a tunnel was asked for
    body: int = 0  # bytes that follow it


def parse_request(head: bytes) -> ProxyRequest:
    """The request whose head, up to and with the empty line, is `head`. Raises `Refusal`."""
    request = _read(head)
    method, target, version = (part.decode("ascii") for part in (request.method, request.target, request.http_version))
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers]
    if method == "CONNECT":
        host, port = _authority(target, None)
        if any(name in ("content-length", "transfer-encoding") for name, _ in headers):
            raise _bad("CONNECT has no body")
        return ProxyRequest(host=host, port=port)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise _bad("ask for http://host/path, or CONNECT host:port")
    host, port = _authority(absolute[1], 80)
    path = absolute[2] or "/"
    size = _body_size(headers)
    shown = f"[{host}]" if ":" in host else host
    kept = [f"{name}: {value}" for name, value in headers if not _concerns_the_hop(name, headers)]
    kept += [f"Host: {shown}" if port == 80 else f"Host: {shown}:{port}", "Connection: close"]
    kept += [] if size is None else [f"Content-Length: {size}"]
    start = f"{method} {path if path.startswith('/') else '/' + path} HTTP/{version}"
    return ProxyRequest(host=host, port=port, head="\r\n".join([start, *kept, "", ""]).encode("latin-1"), body=size or 0)


def _read(head: bytes) -> h11.Request:
    """The request as h11 reads it, where nothing else could be read in it."""
    start, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEADERS} headers")
    reader = h11.Connection(h11.SERVER)
    try:
        reader.receive_data(head)
        request = reader.next_event()
    except h11.RemoteProtocolError:  # its words hold the program's, which a log and a count of reasons should not
        raise _bad("no well-formed request of HTTP/1 (RFC 9112), which names its Host once") from None
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1"):
        raise _bad("no request of HTTP/1.0 or HTTP/1.1")
    split = ((name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines))
    if start != b"%b %b HTTP/%b" % (request.method, request.target, request.http_version) or [*split] != request.headers.raw_items():
        raise _bad("a head that could be read in two ways: bare line ends, folded or merged headers")
    return request


def _authority(text: str, default: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    host = plain_host(match[1]) if match is not None else None
    if match is None or host is None:
        raise _bad("no plain host and port")
    port = int(match[2]) if match[2] else default
    if port is None or not 1 <= port <= 65535:
        raise _bad("no port")
    return host, port


def _body_size(headers: list[tuple[str, str]]) -> int | None:
    if any(name == "transfer-encoding" for name, _ in headers):
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length here, and no Transfer-Encoding")
    size = next((value for name, value in headers if name == "content-length"), None)
    if size is not None and len(size) > _SIZE_DIGITS:
        raise _bad("a Content-Length beyond all bounds")
    return None if size is None else int(size)


def _concerns_the_hop(name: str, headers: list[tuple[str, str]]) -> bool:
    named = {word.strip().lower() for header, value in headers if header == "connection" for word in value.split(",")}
    return name in _HOP or name in named or name.startswith("proxy-")


def _bad(reason: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, reason)
