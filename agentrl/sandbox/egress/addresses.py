"""From a requested host and port to a connection: is it on the list, what does it resolve to, is that a public address?

A name is looked up only when the list covers it, and only once. The connection goes to an address that was checked, not to the
name, so a name server that answers differently the next time changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from agentrl.records.destinations import Address, Destination, address_literal
from agentrl.sandbox.egress.heads import Refusal

MAX_TRIED = 4
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MACHINE_SERVICES = frozenset({ipaddress.ip_address("168.63.129.16")})
"""A cloud's services at a public-looking address (learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16)."""

# A separate pool: a name server that does not answer must not hold up the driver's other threads.
_lookups = ThreadPoolExecutor(8, thread_name_prefix="egress-names")


class AllowList:
    """The allow-list of one sandbox, and its name look-ups (two at a time)."""

    def __init__(self, network: Sequence[Destination]) -> None:
        self._network = tuple(network)
        self._lookup_slots = asyncio.Semaphore(2)

    def lists_address(self, host: str, port: int) -> bool:
        """Whether `host` is an address, and on the list as such: a server that whoever made the list runs."""
        address = address_literal(host)
        return address is not None and self._listed(address, port)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connects to `host`. Raises `Refusal`; the caller sets the deadline."""
        if not any(entry.covers(host, port) for entry in self._network):
            raise Refusal(HTTPStatus.FORBIDDEN, "not on the sandbox's allow-list")
        allowed = [address for address in await self._addresses(host, port) if self._may(address, port)]
        if not allowed:
            raise Refusal(HTTPStatus.FORBIDDEN, "the name resolves to no public address; list the address too to allow it")
        for address in allowed[:MAX_TRIED]:
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
                raise Refusal(HTTPStatus.BAD_GATEWAY, "the name is not known") from None
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
    """Addresses of a name, in the system's order of preference. Blocking."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def is_public(address: Address) -> bool:
    """Whether `address` is on the public internet: not loopback, private, link-local (metadata), shared, multicast or reserved.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, Teredo, NAT64) must carry a public one.
    """
    inner: list[ipaddress.IPv4Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        inner += [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)] if address in _NAT64 or int(address) >> 32 == 0 else []
        if address.is_site_local:
            return False
    if address.is_multicast or (address.is_reserved and address not in _NAT64) or address in _MACHINE_SERVICES:
        return False
    return address.is_global and all(is_public(part) for part in inner if part is not None)
