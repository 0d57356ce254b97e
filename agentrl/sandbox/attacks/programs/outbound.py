"""Reaches out: TCP, UDP, ICMP, name servers, the metadata address, broadcast, both address families, no proxy asked.

kind: network
seconds: 15
"""

import socket

done = []
for address in (
    ("1.1.1.1", 443),
    ("8.8.8.8", 53),
    ("169.254.169.254", 80),
    ("10.0.0.1", 80),
    ("192.168.1.1", 80),
    ("172.17.0.1", 2375),
    ("2606:4700::1111", 443),
):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as link:
                link.settimeout(1)
                link.connect(address)
                link.send(b"x")
            done.append(f"{address} {kind.name}")
        except OSError:
            continue
for family, kind, protocol in (
    (socket.AF_INET, socket.SOCK_RAW, 1),
    (socket.AF_INET, socket.SOCK_DGRAM, 1),
    (socket.AF_INET6, socket.SOCK_RAW, 58),
):
    try:
        with socket.socket(family, kind, protocol) as link:
            link.sendto(b"\x08\x00\xf7\xff\x00\x00\x00\x00", ("1.1.1.1" if family == socket.AF_INET else "2606:4700::1111", 0))
        done.append(f"ICMP {kind.name}")
    except OSError:
        continue
try:
    done.append(str(socket.getaddrinfo("example.com", 80)))
except OSError:
    pass
with open("/proc/net/dev") as file:
    devices = [line.split(":")[0].strip() for line in file if ":" in line]
with open("/proc/net/route") as file:
    routes = len(file.readlines()) - 1
usable = [
    name
    for name in devices
    if name not in ("lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0", "dummy0")
]
if routes > 0 or usable:
    done.append(f"devices {usable}, {routes} routes")
print(f"ESCAPED: {done}" if done else "held: nothing answers, no route")
