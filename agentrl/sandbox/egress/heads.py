"""What a program asks the proxy for: the head of an HTTP request, read strictly. Every byte is hostile.

Whatever two readers could understand differently is refused: bare line ends, folded or doubled headers, `user@host`, a body
whose end is not a plain number of bytes. What goes on to a server is written anew from what was understood, one request to a
connection, so there is nothing a second request could hide behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

from agentrl.destinations import plain_host

MAX_HEADERS = 100
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rf"({_TOKEN}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_HEADER = re.compile(rf"({_TOKEN}):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
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
class Wanted:
    """A request: where to (`host` as `agentrl.destinations.plain_host` gives it), and what is sent there first."""

    host: str
    port: int
    head: bytes = b""  # for the server; empty: a tunnel was asked for
    body: int = 0  # bytes that follow it


def parse(head: bytes) -> Wanted:
    """The request whose head, up to and with the empty line, is `head`. Raises `Refusal`."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    first = _LINE.fullmatch(lines[0])
    if first is None:
        raise _bad("no request line of HTTP/1")
    headers = _headers(lines[1:])
    method, target, version = first.groups()
    if method == "CONNECT":
        host, port = _authority(target, None)
        if any(name in ("content-length", "transfer-encoding") for name, _ in headers):
            raise _bad("CONNECT has no body")
        return Wanted(host=host, port=port)
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
    start = f"{method} {path if path.startswith('/') else '/' + path} {version}"
    return Wanted(host=host, port=port, head="\r\n".join([start, *kept, "", ""]).encode("latin-1"), body=size or 0)


def _headers(lines: list[str]) -> list[tuple[str, str]]:
    """(name in lower case, value) of each header."""
    if len(lines) > MAX_HEADERS:
        raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEADERS} headers")
    matches = [_HEADER.fullmatch(line) for line in lines]
    headers = [(match[1].lower(), match[2].strip(" \t")) for match in matches if match is not None]
    if len(headers) < len(lines):
        raise _bad("a malformed header")
    if sum(name == "host" for name, _ in headers) > 1:
        raise _bad("more than one Host header")
    return headers


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
    sizes = [value for name, value in headers if name == "content-length"]
    if any(name == "transfer-encoding" for name, _ in headers):
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length here, and no Transfer-Encoding")
    if len(sizes) > 1 or not all(re.fullmatch(r"[0-9]{1,15}", size) for size in sizes):
        raise _bad("no single plain Content-Length")
    return int(sizes[0]) if sizes else None


def _concerns_the_hop(name: str, headers: list[tuple[str, str]]) -> bool:
    named = {word.strip().lower() for header, value in headers if header == "connection" for word in value.split(",")}
    return name in _HOP or name in named or name.startswith("proxy-")


def _bad(reason: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, reason)
