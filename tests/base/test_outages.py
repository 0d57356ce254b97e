"""Outages are distinguished from wrong requests in exceptions of real clients, of clients that are not installed here, and in texts."""

from __future__ import annotations

import asyncio
import concurrent.futures.process
import errno
import http.client
import json
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.outages import outage_of, outage_phrase


class Answers(BaseHTTPRequestHandler):
    """Answers with the status in the path; `/hang` never answers, `/drop` disconnects, `/half` sends half of the body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/hang":
            threading.Event().wait(10.0)
        if self.path in ("/drop", "/hang"):
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        half = self.path == "/half"
        self.send_response(200 if half else int(self.path[1:]))
        self.send_header("content-length", "100" if half else "2")
        self.end_headers()
        self.wfile.write(b"no")
        self.close_connection = half

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    served.handle_error = lambda *_: None  # type: ignore[method-assign,misc,assignment]
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def unused_url() -> str:
    """A URL with a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def by_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=2.0).read()


def by_httpx(url: str) -> None:
    httpx.get(url, timeout=2.0, trust_env=False).raise_for_status()


def by_requests(url: str) -> None:
    requests.get(url, timeout=2.0, proxies={"http": ""}).raise_for_status()


def by_aiohttp(url: str) -> None:
    import aiohttp

    async def get() -> None:
        patience = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=patience, raise_for_status=True) as session, session.get(url) as response:
            await response.read()

    asyncio.run(get())


def by_openai(url: str) -> None:
    import openai

    openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=2.0, http_client=httpx.Client(trust_env=False)).get("", cast_to=object)


def raised(code: Callable[[], Any]) -> BaseException:
    try:
        code()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


WITHOUT_AIOHTTP = pytest.mark.skipif(find_spec("aiohttp") is None, reason="aiohttp is not installed")
CLIENTS = [by_urllib, by_httpx, by_requests, pytest.param(by_aiohttp, marks=WITHOUT_AIOHTTP)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", ["/500", "/502", "/503", "/504", "/429", "/401", "/drop", "/hang", "/half"])
def test_a_server_error_is_an_outage_with_every_client(client: Callable[[str], None], path: str, server: str) -> None:
    outage = outage_of(raised(lambda: client(server + path)), {"query": "the weather", "n": 3})
    assert outage is not None and outage.text.isprintable() and len(outage.text) <= 300
    assert outage.late == (path in ("/hang", "/504"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("client", [*CLIENTS, by_openai])
def test_a_server_that_is_not_there_is_an_outage(client: Callable[[str], None], unused_url: str) -> None:
    assert outage_of(raised(lambda: client(unused_url)), {"query": "the weather"}) is not None
    assert outage_of(raised(lambda: client("http://no.such.host.invalid/")), {"query": "the weather"}) is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [400, 403, 404, 405, 409, 413, 422])
def test_a_rejected_request_is_no_outage(client: Callable[[str], None], status: int, server: str) -> None:
    assert outage_of(raised(lambda: client(f"{server}/{status}"))) is None


@pytest.mark.parametrize("client", CLIENTS)
def test_an_address_in_the_arguments_is_no_outage(client: Callable[[str], None], unused_url: str, server: str) -> None:
    """Otherwise an agent could exclude any of its episodes by requesting a dead address."""
    dead = raised(lambda: client(unused_url))
    host, port = unused_url.removeprefix("http://").split(":")
    for arguments in (
        {"url": unused_url},
        {"request": f"GET {unused_url}/x HTTP/1.1"},
        {"sites": [{"link": unused_url}]},
        {"host": host, "port": int(port)},
    ):
        assert outage_of(dead, arguments) is None, arguments
    assert outage_of(dead, {"url": f"http://localhost:{port}/"}) is None, "the error has an IP address, the arguments a name"
    unknown = raised(lambda: client("http://no.such.host.invalid/"))
    assert outage_of(unknown, {"url": "http://no.such.host.invalid/"}) is None
    assert outage_of(raised(lambda: client(server + "/503")), {"url": server + "/503"}) is None
    assert outage_of(dead, {"path": "report.csv", "query": "who is http"}) is not None, "a file name is no address"


def test_a_backend_with_a_name_is_distinguished_from_an_address_in_the_arguments() -> None:
    request = httpx.Request("GET", "http://search.internal:9200/_search")
    dead = httpx.ConnectError("All connection attempts failed", request=request)
    assert outage_of(dead, {"query": "what is https://example.com about"}) is not None
    assert outage_of(dead, {"query": "x", "host": "search.internal"}) is None
    short = httpx.ConnectError("no", request=httpx.Request("GET", "http://search:9200/"))
    assert outage_of(short, {"query": "search for me"}) is not None
    assert outage_of(short, {"url": "http://search/"}) is None


def sql(code: str) -> None:
    sqlite3.connect(":memory:").execute(code)


def locked() -> None:
    name = "file:locked?mode=memory&cache=shared"
    with sqlite3.connect(name, uri=True) as connection:
        connection.execute("create table t(a)")
        connection.commit()
        connection.execute("begin exclusive")
        sqlite3.connect(name, uri=True, timeout=0).execute("insert into t values (1)")


def no_database(folder: Path) -> None:
    (folder / "bad.db").write_bytes(b"not a database, not a database" * 99)
    sqlite3.connect(folder / "bad.db").execute("select * from t")


def exits(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=5, stderr=subprocess.DEVNULL)


def broken_pool() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(os._exit, 1).result()


def closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        os.write(write, b"x")
    finally:
        os.close(write)


async def ends_early() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"half a line")
    reader.feed_eof()
    await reader.readexactly(100)


async def waits() -> None:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(5)


def test_errors_of_the_standard_library(tmp_path: Path) -> None:
    outages: dict[str, Callable[[], Any]] = {
        "a name that does not resolve": lambda: socket.getaddrinfo("no.such.host.invalid", 80),
        "a locked database": locked,
        "a file that is no database": lambda: no_database(tmp_path),
        "a database that cannot be opened": lambda: sqlite3.connect(tmp_path / "none" / "a.db"),
        "a helper that a signal ended": lambda: exits(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"),
        "a pool whose worker died": broken_pool,
        "a pipe that no process reads": closed_pipe,
        "a stream that ended": lambda: asyncio.run(ends_early()),
        "a deadline": lambda: asyncio.run(waits()),
        "a program's deadline": lambda: subprocess.run([sys.executable, "-c", "import time; time.sleep(9)"], timeout=0.2),
    }
    for case, code in outages.items():
        assert outage_of(raised(code), {"text": "a"}) is not None, case
    wrong: dict[str, Callable[[], Any]] = {
        "a table that there is not": lambda: sql("select * from nothing"),
        "a syntax error": lambda: sql("selec"),
        "a program that ends with an error": lambda: exits("raise ConnectionError('connection refused')"),
        "a file that there is not": (tmp_path / "none").read_text,
        "a folder": tmp_path.read_text,
        "an address that is none": lambda: urllib.request.urlopen("nonsense"),
        "a scheme that is none": lambda: httpx.get("gopher://x/"),
        "a host that is none": lambda: requests.get("http://"),
        "a number": lambda: int("connection refused"),
    }
    for case, code in wrong.items():
        assert outage_of(raised(code), {"text": "a"}) is None, case


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EDQUOT])
def test_a_machine_that_is_full_is_an_outage_whatever_address_was_requested(number: int) -> None:
    assert outage_of(OSError(number, os.strerror(number)), {"url": "https://example.com/large"}) is not None


def named(name: str, *bases: str, module: str = "client", **attributes: Any) -> Exception:
    """An exception of a client that is not installed here."""
    kinds: tuple[type, ...] = (Exception,)
    for base in reversed(bases):
        kinds = (type(base, kinds, {"__module__": module}),)
    error: Exception = type(name, kinds, {"__module__": module})(*attributes.pop("args", ()))
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


class Code:
    def __init__(self, name: str) -> None:
        self.name = name


OUTAGES = {
    "redis": named("ConnectionError", "RedisError", module="redis.exceptions"),
    "redis busy": named("BusyLoadingError", "ConnectionError", module="redis.exceptions"),
    "redis late": named("TimeoutError", "RedisError", module="redis.exceptions"),
    "psycopg refused": named("OperationalError", "Error", args=('connection to server at "10.0.0.9" failed: Connection refused',)),
    "psycopg shutdown": named("AdminShutdown", "OperationalError", sqlstate="57P01"),
    "psycopg2 closed": named("InterfaceError", "Error", args=("connection already closed",), pgcode=None),
    "asyncpg": named("ConnectionDoesNotExistError", "PostgresError", sqlstate="08003"),
    "too many": named("TooManyConnectionsError", "PostgresError", sqlstate="53300"),
    "pymysql": named("OperationalError", "DatabaseError", args=(2003, "Can't connect to MySQL server")),
    "mysql gone": named("OperationalError", "DatabaseError", args=(2006, "MySQL server has gone away")),
    "pymongo": named("ServerSelectionTimeoutError", "AutoReconnect", "ConnectionFailure"),
    "elastic": named("ConnectionTimeout", "TransportError"),
    "kafka": named("NoBrokersAvailable", "KafkaError"),
    "anyio": named("BrokenResourceError", module="anyio"),
    "botocore": named("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
    "google": named("HttpError", resp=type("Response", (), {"status": 500})()),
    "grpc": named("AioRpcError", code=lambda: Code("UNAVAILABLE")),
    "own": named("SearchDown", args=("the index answered: 503 Service Unavailable",)),
    "runtime": RuntimeError("HTTP 502"),
    "ssl": ssl.SSLCertVerificationError("certificate verify failed"),
    "http.client": http.client.BadStatusLine("?"),
    "mcp": RuntimeError("Connection closed"),
}
type(OUTAGES["grpc"]).details = lambda self: "no"  # type: ignore[attr-defined]
WRONG = {
    "psycopg column": named("UndefinedColumn", "ProgrammingError", sqlstate="42703"),
    "cancelled statement": named("QueryCanceled", "OperationalError", sqlstate="57014"),
    "pymysql column": named("OperationalError", "DatabaseError", args=(1054, "Unknown column")),
    "redis": named("ResponseError", "RedisError", module="redis.exceptions", args=("WRONGTYPE Operation",)),
    "botocore": named("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 404}}),
    "grpc": named("OtherRpcError", code=lambda: Code("INVALID_ARGUMENT")),
    "own": named("BadQuery", args=("column 503 is unknown",)),
    "plain": RuntimeError("error: 500 is no month"),
    "value": ValueError("503 Service Unavailable"),
    "memory": MemoryError(),
    "exit": SystemExit("connection refused"),
}
type(WRONG["grpc"]).details = lambda self: "no"  # type: ignore[attr-defined]


@pytest.mark.parametrize("client", OUTAGES)
def test_clients_that_are_not_installed(client: str) -> None:
    error = OUTAGES[client]
    assert outage_of(error, {"query": "a"}) is not None
    wrapped = [
        _from(RuntimeError("the tool failed"), error),
        _while(KeyError("x"), error),
        ExceptionGroup("g", [KeyError("x"), ExceptionGroup("h", [error])]),
        _from(ValueError("bad"), _from(RuntimeError("no"), error)),
        urllib.error.URLError(error),  # type: ignore[arg-type]
    ]
    for outer in wrapped:
        assert outage_of(outer, {"query": "a"}) is not None, outer


@pytest.mark.parametrize("client", WRONG)
def test_clients_that_are_not_installed_with_a_wrong_request(client: str) -> None:
    assert outage_of(WRONG[client], {"query": "a"}) is None
    assert outage_of(_from(RuntimeError("the tool failed"), WRONG[client]), {"query": "a"}) is None


def test_the_outermost_classified_error_decides() -> None:
    """If a client tried a second server and got a rejection from it, the request was rejected."""
    assert outage_of(_while(named("HTTPStatusError", status_code=404), ConnectionRefusedError())) is None
    assert outage_of(_while(named("HTTPStatusError", status_code=502), KeyError("x"))) is not None


def _from(outer: BaseException, cause: BaseException) -> BaseException:
    outer.__cause__ = cause
    return outer


def _while(outer: BaseException, context: BaseException) -> BaseException:
    outer.__context__ = context
    return outer


def test_phrases_in_the_arguments_do_not_count() -> None:
    assert outage_phrase("Error executing tool search: [Errno 111] Connection refused") == "Connection refused"
    echoed = "no notes hold 'Connection refused'"
    assert outage_phrase(echoed, {"query": "connection-refused"}) == "" and outage_phrase(echoed, {"query": "refused"}) != ""
    assert outage_phrase("a b", {"a": "Connection", "b": ["refused"]}) == ""
    assert outage_phrase("Connection refused", {"a": "Connection", "b": {"c": "REFUSED!"}}) == ""
    assert outage_of(RuntimeError("nothing about 'bad gateway'"), {"query": "bad gateway"}) is None


@pytest.mark.parametrize(
    "text",
    [
        "error: 503 upstream timeout",
        "Server error '500 Internal Server Error' for url 'http://127.0.0.1/x'",
        "HTTPConnectionPool(host='x', port=80): Max retries exceeded with url: /",
        "Error: connect ECONNREFUSED 127.0.0.1:5432",
        "status_code=429",
        "HTTP/1.1 504",
        "Error 502.",
        "Request timed out.",
        "timeout of 30000ms exceeded",
        "rpc error: code = DeadlineExceeded desc = context deadline exceeded",
        "dial tcp 10.0.0.1:443: i/o timeout",
        "The model is currently overloaded",
        "upstream connect error or disconnect/reset before headers",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_texts_that_report_an_outage(text: str) -> None:
    assert outage_phrase(text)


@pytest.mark.parametrize(
    "text",
    [
        "error: timed out after 30 s",
        "FileNotFoundError: 'a.csv'",
        "404 Not Found",
        "error: 500 is no month",
        "there are 503 rows",
        "currency code 504 is unknown",
        "status 404",
        "TimeoutError",
        "the connection between both is close",
        "port 502 is a number",
        "",
    ],
)
def test_texts_that_report_no_outage(text: str) -> None:
    assert outage_phrase(text) == ""


class Hostile(Exception):
    """An error whose attributes and text raise."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no text")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(), JSON), st.sampled_from([Hostile(), OSError(), OSError(None, None), Exception(), ConnectionError(10**5000)])
)
def test_no_error_and_no_arguments_make_it_raise(arguments: dict[str, Any], error: Exception) -> None:
    outage_of(error, arguments)
    looped = RuntimeError("a")
    looped.__cause__ = _from(error, looped)
    outage_of(looped, arguments)
    error.__cause__ = None


@given(st.text(), st.dictionaries(st.text(), JSON))
def test_no_text_makes_it_raise(text: str, arguments: dict[str, Any]) -> None:
    assert isinstance(outage_phrase(text, arguments), str)


REPORTED: dict[str, list[str]] = json.loads((Path(__file__).parent / "data" / "outages.json").read_text(encoding="utf-8"))
"""Client -> its texts for an outage."""


@pytest.mark.parametrize("client", REPORTED)
def test_texts_of_real_clients_and_servers(client: str) -> None:
    texts = [form for text in REPORTED[client] for form in (text, f"Error executing tool search: {text}")]
    assert [text for text in texts if not outage_phrase(text)] == []


NOUNS = ("items", "rows", "ms", "of 900", "students", "EUR", "pages", "and 404", "to 600", "- 599", "services", "users", "x 3", "is free")
LABELS = (
    *("Status", "status", "order status", "Status code", "HTTP", "http status", "Error", "error code", "response code", "code", "count"),
    *("total", "The server has", "width", "room", "error rate in", "exit status", "status of", "Response:", "errors:"),
)
NUMBERS = (429, 500, 501, 502, 503, 504, 520, 529)


@given(st.sampled_from(LABELS), st.sampled_from([" ", ": ", " = ", "="]), st.sampled_from(NUMBERS), st.sampled_from(NOUNS))
def test_numbers_that_count_something_report_no_outage(label: str, mark: str, number: int, noun: str) -> None:
    for text in (f"{label}{mark}{number} {noun}", f"a\n{label}{mark}{number} {noun}\nb", f"{number} {noun}, {label}{mark}{number} {noun}"):
        assert outage_phrase(text) == "", text


@given(st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=6), st.sampled_from(LABELS), st.sampled_from([", ", " and ", " - ", "."]))
def test_lists_of_numbers_report_no_outage(numbers: list[int], label: str, mark: str) -> None:
    assert outage_phrase(f"{label}: {mark.join(map(str, numbers))} were counted") == ""


@given(
    st.dictionaries(
        st.sampled_from(["code", "status", "id", "name", "count", "country", "items", "statusCode", "details", "title"]),
        st.sampled_from(NUMBERS) | st.sampled_from(["Honduras", "open", ""]),
    )
)
def test_fields_of_records_report_no_outage(record: dict[str, int | str]) -> None:
    assert outage_phrase(json.dumps(record)) == "" and outage_phrase(json.dumps([record, record], indent=2)) == ""


@given(st.sampled_from(NUMBERS), st.sampled_from(["room", "order status", "page", "id"]), st.sampled_from(["", "\n", ".", ")"]))
def test_numbers_at_the_end_of_a_line_report_no_outage(number: int, label: str, mark: str) -> None:
    assert outage_phrase(f"{label}: {number}{mark}") == ""


def test_a_text_of_statuses_alone_is_searched_in_linear_time() -> None:
    for text in ("status: 500 " + " " * 20_000, "status 500 " * 2000, '"code": 500, ' * 1600, "HTTP 500 - 5" * 1700):
        started = time.process_time()
        outage_phrase(text)
        assert time.process_time() - started < 1.0
