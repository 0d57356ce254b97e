"""Strict parsing of the HTTP request heads that programs send to the proxy. Every byte is hostile.

h11 parses a head, and tolerates what many servers send. Anything that another parser could understand differently is refused here: a
head must be, line by line, what h11 read (no bare line ends, no folded or merged headers), without `user@host`, and with a body whose
size is a plain number. The proxy sends a new head, built from the parsed values, and one request per connection, so that no second
request can hide behind the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

import h11

from agentrl.records.destinations import plain_host

_MAX_HEADERS = 100
_SIZE_DIGITS = 15
_ABSOLUTE = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@]+)(?::([0-9]{1,5}))?")
_HOP = {"connection", "expect", "host", "keep-alive", "te", "trailer", "upgrade", "content-length", "http2-settings"}
"""Headers that apply to one connection only, and those that the proxy writes itself."""


class Refusal(Exception):
    """A request that the proxy refuses, with the status and the reason for the program."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A parsed request of a program."""

    host: str  # in the form of `agentrl.records.destinations.plain_host`
    port: int
    head: bytes = b""  # for the server; empty for a tunnel
    body: int = 0  # size of the request's body


def parse_request(head: bytes) -> ProxyRequest:
    """The request with this head, which ends with the empty line. Raises `Refusal`."""
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
        raise _bad("the request must be for http://host/path, or CONNECT host:port")
    host, port = _authority(absolute[1], 80)
    path = absolute[2] or "/"
    size = _body_size(headers)
    listed = {item.strip().lower() for name, value in headers if name == "connection" for item in value.split(",")}
    lines = [f"{name}: {value}" for name, value in headers if not (name in _HOP | listed or name.startswith("proxy-"))]
    name = f"[{host}]" if ":" in host else host
    lines += [f"Host: {name}" if port == 80 else f"Host: {name}:{port}", "Connection: close"]
    lines += [] if size is None else [f"Content-Length: {size}"]
    start = f"{method} {path if path.startswith('/') else '/' + path} HTTP/{version}"
    return ProxyRequest(host=host, port=port, head="\r\n".join([start, *lines, "", ""]).encode("latin-1"), body=size or 0)


def _read(head: bytes) -> h11.Request:
    """The request as h11 reads it, if it has no other reading."""
    start, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(lines) > _MAX_HEADERS:
        raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_HEADERS} headers")
    reader = h11.Connection(h11.SERVER)
    try:
        reader.receive_data(head)
        request = reader.next_event()
    except h11.RemoteProtocolError:  # its message quotes the program, which must not reach a log or a count of reasons
        raise _bad("not a well-formed HTTP/1 request (RFC 9112) with one Host") from None
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1"):
        raise _bad("not a request of HTTP/1.0 or HTTP/1.1")
    fields = [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
    if start != b"%b %b HTTP/%b" % (request.method, request.target, request.http_version) or fields != request.headers.raw_items():
        raise _bad("an ambiguous head: bare line ends, folded or merged headers")
    return request


def _authority(text: str, default: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    host = plain_host(match[1]) if match is not None else None
    if match is None or host is None:
        raise _bad("not a plain host and port")
    port = int(match[2]) if match[2] else default
    if port is None or not 1 <= port <= 65535:
        raise _bad("no port")
    return host, port


def _body_size(headers: list[tuple[str, str]]) -> int | None:
    if any(name == "transfer-encoding" for name, _ in headers):
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length here, and no Transfer-Encoding")
    size = next((value for name, value in headers if name == "content-length"), None)
    if size is not None and len(size) > _SIZE_DIGITS:
        raise _bad("the Content-Length is too large")
    return None if size is None else int(size)


def _bad(reason: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, reason)
