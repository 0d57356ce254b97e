"""What Python's own library calls."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import glob
import http.server
import mmap
import multiprocessing
import multiprocessing.shared_memory
import os
import pty
import resource
import select
import shelve
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import tarfile
import tempfile
import threading
import urllib.request
import zipfile


def square(x):
    return x * x


async def talk():
    async def answer(reader, writer):
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    writer.close()
    server.close()
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await process.communicate(b"in"))[0] == b"in"
    assert await asyncio.to_thread(square, 3) == 9


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(square, range(5))) == 30
    asyncio.run(talk())
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    shared.buf[0] = 1
    shared.close()
    shared.unlink()
    with tempfile.TemporaryDirectory() as top:
        os.chdir(top)
        base = sqlite3.connect("base.db")
        base.execute("pragma journal_mode=wal")
        base.execute("create table t (x)")
        base.executemany("insert into t values (?)", [(n,) for n in range(1000)])
        base.commit()
        base.execute("vacuum")
        base.close()
        os.makedirs("tree/deep")
        with open("tree/deep/file", "w") as file:
            file.write("text")
        os.symlink("deep", "tree/link")
        os.link("tree/deep/file", "tree/hard")
        shutil.copytree("tree", "copy", symlinks=True)
        shutil.copy2("tree/deep/file", "two")
        shutil.move("two", "three")
        with tarfile.open("tree.tar.gz", "w:gz") as tar:
            tar.add("tree")
        with tarfile.open("tree.tar.gz") as tar:
            tar.extractall("out")
        with zipfile.ZipFile("z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write("three")
        with open("mapped", "w+b") as file:
            file.truncate(8192)
            area = mmap.mmap(file.fileno(), 8192)
            area[0] = 1
            area.flush()
            area.close()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, 10000)
        os.utime("mapped")
        os.chmod("mapped", 0o600)
        os.mkfifo("pipe")
        os.statvfs(".")
        os.sync()
        with shelve.open("shelf") as shelf:
            shelf["a"] = 1
        list(os.scandir("."))
        glob.glob("**", recursive=True)
    os.chdir("/usr")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert opener.open(f"http://127.0.0.1:{server.server_port}/", timeout=10).status in (200, 404)
    server.shutdown()
    with socket.socket(socket.AF_INET6) as six:
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    with socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        udp.bind(("127.0.0.1", 0))
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", 80)
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [0])
    socket.recv_fds(theirs, 1, 1)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()
    poll = select.epoll()
    poll.register(ours)
    poll.poll(0)
    signal.sigtimedwait([signal.SIGUSR1], 0.01)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(1)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.getrandom(8)
    ctypes.CDLL(None).getpid()
    os.memfd_create("x")
    os.eventfd(1)
    os.pidfd_open(os.getpid())
    ssl.create_default_context()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("stty", ["stty", "-a"])
    os.read(terminal, 100)
    os.waitpid(pid, 0)
    assert subprocess.run("echo a | tr a b", shell=True, capture_output=True, text=True).stdout == "b\n"
    print("fine")
