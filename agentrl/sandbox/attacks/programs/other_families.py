"""Makes sockets of every family and type: the hypervisor's, packets, netlink, kernel cryptography, bluetooth.

kind: network
seconds: 10
"""

import socket

done = []
for family in range(46):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        continue
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind, 0).close()
            done.append(f"{family}/{kind.name}")
        except OSError:
            continue
for family in (socket.AF_INET, socket.AF_INET6):
    for protocol in (1, 58, 132, 136, 255):
        try:
            socket.socket(family, socket.SOCK_RAW, protocol).close()
            done.append(f"raw {protocol}")
        except OSError:
            continue
print(f"ESCAPED: families {done}" if done else "held: local, IPv4 and IPv6 only")
