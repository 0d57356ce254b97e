"""Connects to the cell that holds the sandbox: at the addresses that drivers use, on loopback, and through every socket it can see.

kind: network
seconds: 20
needs: cell
"""

import json
import socket

arena = json.load(open("arena.json"))
done, tried = [], 0
places = [(place.rpartition(":")[0].strip("[]"), int(place.rpartition(":")[2])) for place in arena["cells"]]
for port in {port for _, port in places}:
    places += [(host, port) for host in ("127.0.0.1", "::1", "0.0.0.0", "127.0.1.1", "::ffff:127.0.0.1")]
for place in places:
    tried += 1
    try:
        with socket.create_connection(place, timeout=1) as link:
            done.append(f"{place}, which sent {link.recv(8)!r}")
    except OSError:
        continue
seen = []
for table in ("tcp", "tcp6"):
    try:
        with open(f"/proc/net/{table}") as file:
            seen += [line.split()[1] for line in file.readlines()[1:] if line.split()[3] == "0A"]
    except OSError:
        continue
with open("/proc/net/unix") as file:
    names = [line.split()[7] for line in file.readlines()[1:] if len(line.split()) > 7]
for name in names:
    tried += 1
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect("\0" + name[1:] if name.startswith("@") else name)
        done.append(name)
    except OSError:
        continue
done += [f"a listener of another network at {place}" for place in seen]
print(f"ESCAPED: reached {done}" if done else f"held: {tried} addresses and sockets lead nowhere")
