"""The network allow-list of a sandbox: parses `host:port` entries, and decides which names and addresses they cover.

- `pypi.org:443` covers one name.
- `*.pythonhosted.org:443` covers every name below `pythonhosted.org`, but not `pythonhosted.org`.
- `93.184.215.14:80` covers one address; an IPv6 address is written in brackets, as in `[2606:2800::1]:80`.

Only an address entry can allow an address that is not public, such as the host's loopback address or an address in a private network. A
name that resolves to such an address is blocked unless the address is also listed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_ENTRIES = 64
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label that old resolvers interpret as part of an address


@dataclass(frozen=True, slots=True)
class Destination:
    """An entry of an allow-list: a port with a name, all names below a name (`below`), or an address.

    >>> parse_destination("*.example.org:443")
    Destination(host='example.org', port=443, below=True, address=None)
    """

    host: str
    port: int
    below: bool = False
    address: Address | None = None

    def covers(self, host: str, port: int) -> bool:
        """Whether this entry covers `host`, as returned by `plain_host`, and `port`."""
        return port == self.port and (host.endswith("." + self.host) if self.below else host == self.host)


def parse_destination(entry: str) -> Destination:
    """Parses one entry. Raises `ValueError` if the entry is invalid; the message contains the problem and the correct form."""
    where, colon, digits = entry.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= 65535:
        raise ValueError(f"{entry!r} does not end in a port; write host:port, such as pypi.org:443")
    below = where.startswith("*.")
    host = plain_host(where.removeprefix("*."))
    if host is None:
        raise ValueError(f"{entry!r} has no host; write name:port, *.domain:port, 192.0.2.1:port or [2001:db8::1]:port")
    address = address_literal(host)
    if below and (address is not None or "." not in host):
        raise ValueError(f"{entry!r} is too broad; use a star only before a domain, such as *.example.org:443")
    if host.rpartition(".")[2] == "localhost":
        raise ValueError(f"{entry!r} is a name of the loopback; to allow the loopback of the host, write 127.0.0.1:{digits}")
    if address is not None and (address.is_unspecified or address.is_multicast):
        raise ValueError(f"{entry!r} is not the address of one machine")
    return Destination(host=host, port=int(digits), below=below, address=address)


def parse_destinations(entries: Iterable[str]) -> tuple[Destination, ...]:
    """Parses an allow-list. Raises `ValueError` if an entry is invalid, or if there are more than `MAX_ENTRIES` entries."""
    destinations = tuple(parse_destination(entry) for entry in entries)
    if len(destinations) > MAX_ENTRIES:
        raise ValueError(f"{len(destinations)} entries; at most {MAX_ENTRIES} are allowed")
    return destinations


def plain_host(text: str) -> str | None:
    """Returns the canonical form of a host: a lower-case name, or an address as `ipaddress` prints it; None if `text` is neither a name nor
    an address.

    International names must be in their ASCII form (`xn--...`), and IPv6 addresses must be in brackets.
    """
    if text.startswith("[") and text.endswith("]"):
        inner = address_literal(text[1:-1])
        return str(inner) if inner is not None and ":" in text else None
    name = text.lower()
    if not text.isascii() or len(name) > 253 or not _NAME.fullmatch(name):
        return None
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        address = address_literal(name)
        return str(address) if address is not None else None
    return name


def address_literal(host: str) -> Address | None:
    """Returns the address that `host` denotes; None if `host` is a name or an IPv6 address with a zone. An IPv4-mapped IPv6 address becomes
    an IPv4 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return None if address.scope_id else address.ipv4_mapped or address
