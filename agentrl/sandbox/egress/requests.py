"""Turns the head of a program's HTTP request into a connection: parses it, applies the allow-list, checks the address. No byte is trusted.

h11 parses a head, but tolerates many deviations. This module refuses any head that a different parser could understand differently. Each
line must be what h11 read (no bare line ends, no folded or merged headers), there must be no `user@host`, and the body's size must be a
plain number. The proxy sends a new head, built from the parsed values, and one request per connection, so that no second request can hide
behind the first.

A name is looked up only if the allow-list covers it, and only once. The connection goes to the address that was checked, so it does not
matter if the name server answers differently the next time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

import h11

from agentrl.records.destinations import Address, Destination, address_literal, plain_host

_MAX_HEADERS = 100
_SIZE_DIGITS = 15
_ABSOLUTE = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@]+)(?::([0-9]{1,5}))?")
_HOP = {"connection", "expect", "host", "keep-alive", "te", "trailer", "upgrade", "content-length", "http2-settings"}
"""Headers that apply to only one connection, and headers that the proxy writes."""
_MAX_TRIED = 4
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MACHINE_SERVICES = frozenset({ipaddress.ip_address("168.63.129.16")})
"""A cloud's services at a public-looking address (learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16)."""

# A separate pool: a name server that does not answer must not block the driver's other threads.
_lookups = ThreadPoolExecutor(8, thread_name_prefix="egress-names")


class Refusal(Exception):
    """The proxy rejects a request. The exception contains the status and the reason that the program receives."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A parsed request from a program."""

    host: str  # in the form of `agentrl.records.destinations.plain_host`
    port: int
    head: bytes = b""  # for the server; empty for a tunnel
    body: int = 0  # size of the request's body


def parse_request(head: bytes) -> ProxyRequest:
    """Parses the head of a request, which includes the empty line at its end. Raises `Refusal` if the head is invalid or ambiguous."""
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
    """Returns the request as h11 reads it. Raises `Refusal` if a different parser could read it differently."""
    start, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(lines) > _MAX_HEADERS:
        raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_HEADERS} headers")
    reader = h11.Connection(h11.SERVER)
    try:
        reader.receive_data(head)
        request = reader.next_event()
    except h11.RemoteProtocolError:  # its message quotes the program's bytes, which must not reach a log or the per-reason counts
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


class AllowList:
    """The allow-list of one sandbox, and its name look-ups (two at a time)."""

    def __init__(self, network: Sequence[Destination]) -> None:
        self._network = tuple(network)
        self._lookup_slots = asyncio.Semaphore(2)

    def lists_address(self, host: str, port: int) -> bool:
        """Whether `host` is an address for which the list has an address entry, not only a name. A server that is listed by its address
        belongs to the author of the list."""
        address = address_literal(host)
        return address is not None and self._listed(address, port)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connects to `host`. Raises `Refusal` if the list does not cover `host`, the name has no allowed address, or none of the first
        four answers. The caller sets the deadline."""
        if not any(entry.covers(host, port) for entry in self._network):
            raise Refusal(HTTPStatus.FORBIDDEN, "not on the sandbox's allow-list")
        allowed = [address for address in await self._addresses(host, port) if self._may(address, port)]
        if not allowed:
            raise Refusal(HTTPStatus.FORBIDDEN, "the name resolves to no public address; list the address too to allow it")
        for address in allowed[:_MAX_TRIED]:
            try:
                return await self._connected(address, port)
            except OSError:
                continue
        raise Refusal(HTTPStatus.BAD_GATEWAY, "the host does not answer")

    async def _addresses(self, host: str, port: int) -> list[Address]:
        address = address_literal(host)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        async with self._lookup_slots:
            try:
                resolved = await loop.run_in_executor(_lookups, resolve, host, port)
            except (OSError, UnicodeError):
                raise Refusal(HTTPStatus.BAD_GATEWAY, "unknown host name") from None
        return [address for text in resolved if (address := address_literal(text)) is not None]

    def _may(self, address: Address, port: int) -> bool:
        return is_public(address) or self._listed(address, port)

    async def _connected(self, address: Address, port: int) -> socket.socket:
        link = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            await asyncio.get_running_loop().sock_connect(link, (str(address), port))
            reached, own = address_literal(link.getpeername()[0]), address_literal(link.getsockname()[0])
            if reached is None or not self._may(reached, port) or (reached == own and not self._listed(reached, port)):
                raise Refusal(HTTPStatus.FORBIDDEN, "the name resolves to this machine or to no public address; list the address too")
        except BaseException:
            link.close()
            raise
        return link

    def _listed(self, address: Address, port: int) -> bool:
        return any(entry.address == address and entry.port == port for entry in self._network)


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a name, in the system's order of preference. Blocking. Raises `OSError` or `UnicodeError` if there are
    none."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def is_public(address: Address) -> bool:
    """Whether `address` is on the public internet: not loopback, private, link-local (metadata), shared, multicast or reserved.

    If an IPv6 address embeds an IPv4 address (mapped, compatible, 6to4, Teredo, NAT64), the embedded address must be public too.
    """
    embedded: list[ipaddress.IPv4Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        embedded += [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)] if address in _NAT64 or int(address) >> 32 == 0 else []
        if address.is_site_local:
            return False
    if address.is_multicast or (address.is_reserved and address not in _NAT64) or address in _MACHINE_SERVICES:
        return False
    return address.is_global and all(is_public(inner) for inner in embedded if inner is not None)
