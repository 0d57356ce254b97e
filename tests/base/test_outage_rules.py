"""The rules for outages, at their bounds: statuses, database codes, type names, and how much of a large error is searched."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
from typing import Any

import pytest

from agentrl.base.outages import Outage, has_address, is_outage_name, outage_of, outage_phrase
from tests.base.test_outages import Code, named

REFUSED = "connection refused"


def classify(error: BaseException) -> str:
    """Returns the class of an error: `late` or `server` for an outage, else `request`."""
    report = outage_of(error, {"query": "a"})
    return "request" if report is None else "late" if report.late else "server"


def expected_class(status: object) -> str:
    return "late" if status in (408, 504) else "server" if status in (401, 429) or status in range(500, 600) else "request"


def test_the_status_takes_precedence_over_the_text() -> None:
    decisions = {status: classify(named("Failed", args=(REFUSED,), status_code=status)) for status in range(400, 600)}
    assert decisions == {status: expected_class(status) for status in range(400, 600)}


@pytest.mark.parametrize("status", [399, 600, True, "404"])
def test_without_a_failure_status_the_text_decides(status: object) -> None:
    assert classify(named("Failed", args=(REFUSED,), status_code=status)) == "server"
    assert classify(named("Failed", args=("no",), status_code=status)) == "request"


@pytest.mark.parametrize("path", ["response.status_code", "response.status", "status_code", "status", "code", "http_status", "resp.status"])
def test_the_status_is_read_from_each_attribute_that_clients_use(path: str) -> None:
    holder, _, name = path.rpartition(".")
    for status, expected in ((503, "server"), (404, "request")):
        attributes = {holder: type("Response", (), {name: status})()} if holder else {name: status}
        assert classify(named("Failed", args=(REFUSED,), **attributes)) == expected
    assert classify(named("Failed", args=(REFUSED,), response={"ResponseMetadata": {"HTTPStatusCode": 404}})) == "request"
    assert classify(named("Failed", args=(REFUSED,), response={"ResponseMetadata": 404})) == "server", "without a status the text decides"


def rpc(code: Any, *, details: bool = True) -> BaseException:
    error = named("RpcFailed", args=(REFUSED,), code=code)
    if details:
        type(error).details = lambda self: "no"  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DEADLINE_EXCEEDED", "late"),
        *((name, "server") for name in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED")),
        *((name, "server") for name in ("DATA_LOSS", "UNAUTHENTICATED")),
        *((name, "request") for name in ("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "OUT_OF_RANGE", "UNIMPLEMENTED")),
    ],
)
def test_the_codes_of_grpc(name: str, expected: str) -> None:
    assert classify(rpc(lambda: Code(name))) == expected


def test_with_a_code_that_is_not_from_grpc_the_text_decides() -> None:
    assert classify(rpc(lambda: Code("NOT_FOUND"), details=False)) == "server"
    assert classify(rpc(lambda: 5)) == "server" and classify(rpc("NOT_FOUND")) == "server"


SQLITE = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOTADB),
}


@pytest.mark.parametrize("code", range(1, 32))
def test_the_codes_of_sqlite(code: int) -> None:
    expected = "server" if code in SQLITE else "request"
    for extended in (code, code | 1 << 8, code | 17 << 8):
        error = sqlite3.OperationalError(REFUSED)
        error.sqlite_errorcode = extended
        assert classify(error) == expected


def test_sqlite_errors_without_a_code_are_classified_by_text() -> None:
    for text in ("database is locked", "disk I/O error", "unable to open database file", "database disk image is malformed"):
        assert classify(sqlite3.OperationalError(text)) == "server"
    assert classify(sqlite3.OperationalError("database or disk is full")) == "server"
    assert classify(sqlite3.OperationalError(f"no such column: {REFUSED}")) == "request"


MYSQL = {
    1040: "ER_CON_COUNT_ERROR",
    1042: "ER_BAD_HOST_ERROR",
    1043: "ER_HANDSHAKE_ERROR",
    1053: "ER_SERVER_SHUTDOWN",
    1129: "ER_HOST_IS_BLOCKED",
    1152: "ER_ABORTING_CONNECTION",
    1158: "ER_NET_READ_ERROR",
    1159: "ER_NET_READ_INTERRUPTED",
    1160: "ER_NET_ERROR_ON_WRITE",
    1161: "ER_NET_WRITE_INTERRUPTED",
    1203: "ER_TOO_MANY_USER_CONNECTIONS",
    1205: "ER_LOCK_WAIT_TIMEOUT",
    2002: "CR_CONNECTION_ERROR",
    2003: "CR_CONN_HOST_ERROR",
    2005: "CR_UNKNOWN_HOST",
    2006: "CR_SERVER_GONE_ERROR",
    2012: "CR_SERVER_HANDSHAKE_ERR",
    2013: "CR_SERVER_LOST",
    2055: "CR_SERVER_LOST_EXTENDED",
}


@pytest.mark.parametrize("kind", ["OperationalError", "InterfaceError", "InternalError"])
def test_the_codes_of_mysql(kind: str) -> None:
    for code in (*range(1000, 1300), *range(2000, 2100)):
        assert classify(named(kind, args=(code, REFUSED))) == ("server" if code in MYSQL else "request"), code


def test_numbers_in_other_errors_are_not_mysql_codes() -> None:
    assert classify(named("ProgrammingError", args=(1054, REFUSED))) == "server", "the text decides"
    assert classify(named("OperationalError", args=(REFUSED, 1054))) == "server"
    assert classify(named("OperationalError")) == "request"


@pytest.mark.parametrize("name", ["sqlstate", "pgcode"])
def test_the_states_of_sql(name: str) -> None:
    for state in ("08006", "53300", "57P01", "58030", "XX000"):
        assert classify(named("Failed", **{name: state})) == "server"
    for state in ("42703", "57014", "0A000"):
        assert classify(named("Failed", args=(REFUSED,), **{name: state})) == "request"
    for other in ("0800", "08 06", 8006, None):
        attributes: dict[str, Any] = {name: other}
        assert classify(named("Failed", args=("no",), **attributes)) == "request"
        assert classify(named("Failed", args=(REFUSED,), **attributes)) == "server"


@pytest.mark.parametrize(("returncode", "expected"), [(-9, "late"), (0, "request"), (1, "request")])
def test_programs_are_classified_by_exit_code(returncode: int, expected: str) -> None:
    assert classify(subprocess.CalledProcessError(returncode, REFUSED)) == expected


def test_numbers_of_the_operating_system() -> None:
    class ClientError(OSError):
        """Python does not select a subclass of it by the number."""

    assert classify(OSError(errno.EIO, "x")) == "server" and classify(OSError(errno.ENETUNREACH, "x")) == "server"
    assert classify(OSError(errno.EINVAL, REFUSED)) == "request" and classify(ClientError(errno.EPERM, REFUSED)) == "request"
    assert classify(OSError(0, REFUSED)) == "server" and classify(OSError(REFUSED)) == "server", "the text decides"
    without_text = OSError(REFUSED)
    without_text.errno = errno.EINVAL
    assert classify(without_text) == "server"


def test_with_an_address_in_the_arguments_only_machine_errors_are_outages() -> None:
    arguments = {"url": "https://example.com/large"}
    assert outage_of(OSError(errno.ENOSPC, "x"), arguments) is not None and outage_of(OSError(errno.ENETUNREACH, "x"), arguments) is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("ConnectTimeout", "Failed"), "late"),
        (("Failed", "ConnectTimeout"), "late"),
        (("Failed", "ConnectError"), "server"),
        (("ConnectError", "Failed"), "server"),
        (("InvalidURL", "ConnectError"), "request"),
        (("ConnectError", "InvalidURL"), "request"),
        (("Failed", "Wrong"), "request"),
    ],
)
def test_the_names_of_a_type_and_its_bases(names: tuple[str, ...], expected: str) -> None:
    assert classify(named(*names)) == expected


def test_the_names_of_built_in_types_decide_nothing() -> None:
    assert classify(type("ConnectError", (Exception,), {"__module__": "builtins"})("no")) == "request"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("httpx.ConnectTimeout", " 503 ", "500", "599", "401", "408", "429", "TimeoutError", "socket.gaierror")),
        *((name, True) for name in ("ConnectionError", "openai.RateLimitError", "x" * 185 + "ConnectionError")),
        *((name, False) for name in ("404", "400", "5", "50", "5000", "409", "ValueError", "httpx.InvalidURL", "LocalProtocolError")),
        *((name, False) for name in ("", "Connection Error", "x" * 186 + "ConnectionError", "gaierrors", "connect-timeout: Timeout")),
    ],
)
def test_the_name_of_a_type_in_a_trace(name: str, expected: bool) -> None:
    assert is_outage_name(name) is expected


def test_the_texts_of_groups_and_exits_are_ignored() -> None:
    assert classify(ExceptionGroup(REFUSED, [KeyError("x")])) == "request"
    assert classify(BaseExceptionGroup(REFUSED, [SystemExit(REFUSED)])) == "request"


@pytest.mark.parametrize("name", ["reason", "orig"])
def test_errors_in_attributes_of_errors_are_classified(name: str) -> None:
    for inner, expected in ((ConnectionRefusedError(), "server"), (REFUSED, "request")):
        attributes: dict[str, Any] = {name: inner}
        assert classify(named("Failed", **attributes)) == expected


def chain_of(length: int) -> BaseException:
    error: BaseException = ConnectionRefusedError()
    for _ in range(length - 1):
        outer = RuntimeError("no")
        outer.__cause__ = error
        error = outer
    return error


def test_at_most_64_errors_of_a_chain_are_searched() -> None:
    assert classify(chain_of(64)) == "server" and classify(chain_of(65)) == "request"


def test_20_000_characters_of_a_text_are_searched() -> None:
    pad = 20_000 - len(REFUSED)
    assert outage_phrase(" " * pad + REFUSED) == REFUSED and outage_phrase(" " * (pad + 1) + REFUSED) == ""


def test_10_000_values_of_the_arguments_are_searched() -> None:
    for before, expected in ((9_999, True), (10_000, False)):
        assert has_address({"a": ["x"] * before + ["http://example.com/"]}) is expected


def test_a_status_in_json_counts_within_300_characters_of_an_error_field() -> None:
    for distance, expected in ((0, True), (300, True), (301, False)):
        pad = " " * (distance - len('"error":'))
        assert bool(outage_phrase(f'{{{" " * 500}"error":{pad}"code": 503}}')) is expected, distance
        assert bool(outage_phrase(f'{{"code": 503{pad}"error":{" " * 500}}}')) is expected, distance
    assert outage_phrase('"error": 1, "code": 503') == '"code": 503'


def test_phrases_from_the_arguments_are_skipped() -> None:
    text = f"{REFUSED}, then bad gateway"
    assert outage_phrase(text, {"query": REFUSED}) == "bad gateway" and outage_phrase(text, {"query": "x"}) == REFUSED
    assert outage_phrase(text) == REFUSED and outage_phrase(text, {"query": f"bad gateway {REFUSED}"}) == ""


def test_an_outage_is_not_late_by_default() -> None:
    assert not Outage(text="x").late


class ClientObject:
    """A client's object with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def address_from_arguments(arguments: dict[str, Any], text: str = "no", **attributes: Any) -> bool:
    """Returns whether a failed connection is no outage because the arguments contain its address."""
    return outage_of(named("ConnectError", args=(text,), **attributes), arguments) is None


@pytest.mark.parametrize(
    ("host", "text", "expected"),
    [
        ("search.internal", "see Search.internal now", True),
        ("search.internal", "see mysearch.internal now", False),
        ("search.internal", "see search.internals", False),
        ("search.internal", "x", False),
        ("fe80::1", "connect to fe80::1 now", True),
        ("::1", "http://[::1]:80/", True),
        ("fe80::1", "connect to fe80::12", False),
        ("search", " search ", True),
        ("search", "search for me", False),
        ("search", "http://search/x", True),
        ("search", "me@search", True),
        ("search", "at search:9200", True),
        ("search", "research:9200", False),
    ],
)
def test_a_host_in_the_arguments(host: str, text: str, expected: bool) -> None:
    assert address_from_arguments({"query": text}, host=host) is expected


@pytest.mark.parametrize(
    "attributes",
    [
        {"host": "db.internal"},
        {"pool": ClientObject(host="db.internal")},
        {"url": "http://db.internal:80/x"},
        {"filename": "http://me@db.internal/"},
        {"request": ClientObject(url="https://db.internal")},
        {"request": ClientObject(url=ClientObject(host="db.internal"))},
        {"request_info": ClientObject(url=ClientObject(host="db.internal"))},
        {"text": "Connect call failed ('db.internal', 80)"},
        {"text": "HTTPConnectionPool(host='db.internal', port=80)"},
        {"text": "no answer from https://db.internal/x"},
        {"text": " ".join(f"http://h{number}/" for number in range(3)) + " http://db.internal/"},
    ],
)
def test_the_host_is_read_from_each_attribute_that_clients_use(attributes: dict[str, Any]) -> None:
    assert address_from_arguments({"query": "at db.internal"}, **attributes) and not address_from_arguments({"query": "x"}, **attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"filename": "db.internal"},
        {"url": "db.internal"},
        {"url": 5},
        {"text": " ".join(f"http://h{number}/" for number in range(4)) + " http://db.internal/"},
    ],
)
def test_values_that_are_not_a_host(attributes: dict[str, Any]) -> None:
    assert not address_from_arguments({"query": "at db.internal"}, **attributes)


def test_any_address_counts_if_the_error_has_only_numbers() -> None:
    arguments = {"url": "http://example.com/"}
    for host in ("10.0.0.1", "localhost", "fe80::1"):
        assert address_from_arguments(arguments, host=host)
    assert address_from_arguments(arguments) and not address_from_arguments({"query": "x"}) and not address_from_arguments({})
    assert not address_from_arguments(arguments, host="db.internal"), "the tool's own server"
    assert not address_from_arguments(arguments, text="Connect call failed ('10.0.0.1', 80)", host="db.internal")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"host": "db"}, True),
        ({"host": "two words"}, False),
        ({"query": "db"}, False),
        ({"query": "db:80"}, True),
        ({"query": "db:80/" + "x" * 5000}, True),
        ({"host": "a." * 150 + " x"}, False),
        ({"n": 3, "query": "at https://example.com"}, True),
        ({"x" * 76 + "_url": "db"}, True),
        ({"x" * 77 + "_url": "db"}, False),
    ],
)
def test_which_arguments_are_addresses(arguments: dict[str, Any], expected: bool) -> None:
    assert has_address(arguments) is expected


def test_arguments_are_searched_8_levels_deep() -> None:
    for levels, expected in ((8, True), (9, False)):
        nested: Any = "http://example.com/"
        listed: Any = nested
        for _ in range(levels):
            nested = {"a": nested}
        for _ in range(levels - 1):
            listed = [listed]
        assert has_address(nested) is expected and has_address({"a": listed}) is expected, levels
