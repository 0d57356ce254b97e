"""Decides which errors report an outage: a failure of a server, a network or a machine, as opposed to a wrong request.

`outage_of` decides for exceptions, `outage_phrase` for strings. Tools, MCP servers, verifiers and the triage of traces all use these two
functions. Third-party exceptions are recognised by attributes and names, so no client library is imported. docs/tools.md states the rule.
"""

from __future__ import annotations

import errno
import re
import socket
import sqlite3
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentrl.base.error_text import error_chain
from agentrl.base.user_code import describe_error, error_text

_LONGEST_CHAIN = 64  # examined exceptions, including causes and members of groups
_MAX_TEXT = 20_000  # characters of a string that are searched
_MAX_VALUES = 10_000  # values in the arguments of a call that are searched

_NOT_THE_SERVER = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError, NotImplementedError),
    *(MemoryError, NameError, SyntaxError, ImportError),
)
"""Built-in exceptions that code raises for a wrong value. Their names and messages are not searched, but their causes are."""

_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EROFS, errno.ESTALE),
    *(errno.ENODEV, errno.ENXIO, errno.EREMOTEIO),
}
_NETWORK = {
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EADDRNOTAVAIL),
    *(errno.ENOBUFS, errno.ESHUTDOWN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.EPROTO, errno.ECOMM, errno.ENOLINK),
}
_SQLITE = {5, 6, 10, 11, 13, 14, 15, 26}  # busy, locked, I/O error, corrupt, full, cannot open, locking protocol, not a database
_MYSQL = {1040, 1042, 1043, 1053, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1205, 2002, 2003, 2005, 2006, 2012, 2013, 2055}
_SQLSTATE = re.compile(r"08|53|57P|58|XX")  # connection, resources, shutdown, system error, internal error (PostgreSQL, appendix A)
_GRPC = {
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "UNKNOWN",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "CANCELLED",
    "DATA_LOSS",
    "UNAUTHENTICATED",
}

_WRONG_NAME = re.compile(
    r"UnsupportedProtocol|LocalProtocol|Invalid(?:UR[IL]|Schema|Header|Proxy|Argument|Request|Param|Input)|MissingSchema"
    r"|Location(?:Parse|Value)|TooManyRedirects|CookieConflict|Validation"
)
_NAME = re.compile(
    r"Connect(?:ion|or|Timeout|Error|ivity)|Disconnect|Network|Unavailable|Unreachable|Transport(?:Error|Exception)|ProtocolError"
    r"|(?:Read|Write|Close)Error|ServerError|ServerSelection|AutoReconnect|NoBrokers|Broken(?:ProcessPool|ThreadPool|Executor|Resource)"
    r"|BadStatusLine|IncompleteRead|ChunkedEncoding|PayloadError|ProxyError|SSLError|MaxRetry|NameResolution|RateLimit|TooManyRequests"
    r"|Overloaded|BusyLoading|ClusterDown|EndOfStream|ClosedResource"
)
_LATE_NAME = re.compile(r"Time(?:d)?_?[Oo]ut")

_STATUS = r"(?:429|50[0-4]|52\d)"
_ENDS = (
    r"(?=['\"]?(?:\s{0,9}(?:$|[\n\])}>|])|[.,;:](?!\s?\d)|\s{1,9}(?:\(|-(?!\s?\d)|\w{1,20}=)|\s(?:for|from|at) (?:ur[il]|https?:|/)"
    r"|\s(?:internal server|bad gateway|service (?:temporarily )?unavailable|gateway time|server error\b|too many requests"
    r"|origin (?:is|dns)|web server (?:is|returned))))"
)
"""What follows the status in an error report. In "Status: 500 items", the number counts something."""
_WITH_STATUS = (
    r"(?:\bhttps?(?:/[\d.]{1,4})?(?: error| status(?: code)?| code)?|\b(?:http|response|upstream|error)_status(?:_?code)?"
    r"|\bstatus[ _]?code|\b(?:error|response)[ _]code"
    r"|(?:^|[\n:;(]\s?|\b(?:failed,?|with|return(?:s|ed)?|got|server|unexpected|the) )status)[ :=(]{1,4}['\"]?"
)
_SAYS = re.compile(
    r"connection (?:was |has been |is |already |unexpectedly ){0,2}(?:refused|reset|aborted|closed|lost|dropped|timed out|error)"
    r"|connection(?: attempts?)? failed|connect call failed|(?:failed|unable) to (?:connect|establish)"
    r"|(?:can ?not|can't|could not|couldn't) connect"
    r"|econn(?:refused|reset|aborted)|etimedout|\benotfound\b|ehostunreach|eai_again"
    r"|server (?:has )?(?:disconnected|closed the connection|gone away|is down)|remote end closed|peer closed connection|broken pipe"
    r"|socket hang up|response payload is not completed|terminating connection due to|clusterdown|is loading the dataset in memory"
    r"|database system is (?:starting up|shutting down|in recovery)|not yet accepting connections"
    r"|no route to host|(?:network|host) is (?:unreachable|down)|name or service not known|temporary failure in name resolution"
    r"|nodename nor servname|getaddrinfo failed|could not resolve host|no address associated with hostname"
    r"|(?:service|server|backend|upstream|database|temporarily) (?:is )?(?:temporarily |currently )?unavailable"
    r"|bad gateway|gateway time-?out|internal server error|too many requests|rate[ -]?limit(?:ed| exceeded| reached| ?error)"
    r"|upstream (?:\w{1,20} ){0,2}(?:time-?out|timed out|error|reset|failure)"
    r"|(?:server|service|model|engine)(?: is)?(?: currently)? overloaded|overloaded_error"
    rf"|{_WITH_STATUS}{_STATUS}\b{_ENDS}|\berror[ :]{{1,2}}{_STATUS}\b{_ENDS}"
    rf"|\b{_STATUS}(?:, message='| server error(?=\s?[:(]|\s{{0,9}}$))|\bstatuscode\.(?:{'|'.join(sorted(_GRPC))})\b"
    r"|max retries exceeded|deadline[_ ]?exceeded|i/o timeout|timeout of \d{1,9} ?ms exceeded"
    r"|timeout (?:reading|writing) (?:from|to) socket|timed out while waiting for (?:a )?response"
    r"|(?:read|connect|connection|request|socket|gateway|upstream|server|network|pool|handshake) (?:operation )?time(?:d out|-?out)\b"
    r"|no space left on device|disk quota exceeded|too many open files|too many (?:clients|connections)|database is locked|disk i/o error"
    r"|remaining connection slots are reserved"
    r"|certificate (?:verify failed|has expired)|ssl handshake|tls handshake|unexpected_eof_while_reading",
    re.IGNORECASE,
)
_FIELD = re.compile(rf"\"(?:code|status|status_?code|http_?status)\"\s{{0,4}}:\s{{0,4}}\"?{_STATUS}\b(?!\.\d)", re.IGNORECASE)
_ERROR_FIELD = re.compile(r"\"(?:errors?|exception|message)\"\s{0,4}:", re.IGNORECASE)
"""In JSON, a status reports an error only if it is next to a field that describes the error."""
_NEAR = 300  # maximum characters between the two
_WORD = re.compile(r"[a-z0-9]+")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,20}://", re.IGNORECASE)
_HOST_PORT = re.compile(
    r"[\w.-]{1,253}:\d{1,5}(?:/.*)?|\[[0-9a-f:]{2,45}\](?::\d{1,5})?|localhost|(?:\d{1,3}\.){3}\d{1,3}", re.IGNORECASE | re.DOTALL
)
_HOST_NAME = re.compile(r"(?:[\w-]{1,63}\.){0,20}[\w-]{1,63}\.?")
_NUMERIC = re.compile(r"localhost|[\d.]+|[0-9a-f:]*:[0-9a-f:.]*", re.IGNORECASE)
_ADDRESS_KEY = re.compile(
    r"(?:^|_)(?:ur[il]s?|hosts?|host_?name|servers?|address|addr|domain|endpoint|ip|website|link|proxy)$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """An outage, described in one printable line.

    `late`: whether there was no response in time, or a program was killed. A request that is too large can also cause a timeout or a kill.
    """

    text: str
    late: bool = False


def outage_of(error: BaseException, arguments: Mapping[str, Any] | None = None, *, model_text: Sequence[Any] = ()) -> Outage | None:
    """Returns the outage that an exception reports; None if it reports none, or if the request or the code was wrong.

    The causes and contexts of the exception and the members of exception groups are searched too. The result depends on the first of them
    that identifies the server or the request as the cause. An exception identifies the cause by an HTTP status, a database error code, or a
    type of the standard library. The HTTP statuses 401, 408, 429 and 5xx are the server's fault; other statuses are the request's fault. An
    outage at an address in `arguments` is the request's fault, because the request chose the address. If the exception contains no host
    name, this applies to every outage of a server if `arguments` contains any address.

    Args:
        arguments: the arguments of the call, which come from a model.
        model_text: strings or nested mappings that a model wrote. The text of the error may repeat these strings, so phrases in them do not
            report an outage.
    """
    arguments = arguments or {}
    for cause in islice(_chain(error), _LONGEST_CHAIN):
        verdict = _verdict(cause, [arguments, *model_text])
        if verdict is None:
            continue
        if verdict == "request" or (verdict != "machine" and _chose_address(cause, arguments)):
            return None
        return Outage(text=describe_error(cause), late=verdict == "late")
    return None


def outage_phrase(text: str, arguments: Mapping[str, Any] | Sequence[Any] | None = None) -> str:
    """Returns the phrase in which a string reports an outage; "" if there is none.

    A phrase does not count if all its words are in `arguments`, because a tool may repeat its arguments. Only the first 20,000 characters
    are searched.
    """
    own = set(_WORD.findall(" ".join(_texts(arguments)).lower())) if arguments else set()
    for report in _reports(text[:_MAX_TEXT]):
        if not own or not set(_WORD.findall(report.lower())) <= own:
            return report
    return ""


def _reports(text: str) -> Iterator[str]:
    """Yields the phrases of a string that report outages."""
    for match in _SAYS.finditer(text):
        yield match[0]
    for match in _FIELD.finditer(text):
        if _ERROR_FIELD.search(text, max(0, match.start() - _NEAR), match.end() + _NEAR):
            yield match[0]


def is_outage_name(error_type: str) -> bool:
    """Whether an exception's type name, or an HTTP status in its place, reports an outage; examples are `httpx.ConnectTimeout` and
    `503`."""
    name = error_type.strip().rpartition(".")[2]
    if name.isdigit():
        return name in ("401", "408", "429") or (len(name) == 3 and name.startswith("5"))
    if not re.fullmatch(r"\w{1,200}", name) or _WRONG_NAME.search(name):
        return False
    return name == "gaierror" or (_NAME.search(name) or _LATE_NAME.search(name)) is not None


def has_address(arguments: Mapping[str, Any]) -> bool:
    """Whether any of the arguments is an address, such as a URL or a host."""
    return any(_is_address(key, text) for key, text in islice(_named(arguments), _MAX_VALUES))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors from `error_chain`, and those that some libraries store in other attributes."""
    for cause in error_chain(error):
        yield cause
        for name in ("reason", "orig"):
            if isinstance(inner := _attribute(cause, name), BaseException):
                yield inner


def _verdict(error: BaseException, own: Sequence[Any]) -> str | None:
    """Returns the cause that an error shows (`request`, `server`, `machine`, or `late` for a timeout); None if it shows no cause."""
    if not isinstance(error, Exception) or isinstance(error, BaseExceptionGroup):
        return None
    if isinstance(error, ssl.SSLError):  # checked first, because one SSLError is a ValueError
        return "server"
    if isinstance(error, _NOT_THE_SERVER):
        return None
    for decide in (_by_status, _by_type, _by_database, _by_name):
        if (verdict := decide(error)) is not None:
            return verdict
    return "server" if outage_phrase(error_text(error), own) else None


def _by_status(error: Exception) -> str | None:
    """Returns the verdict that follows from the HTTP or gRPC status in a client's exception."""
    response = _attribute(error, "response")
    holders: list[tuple[Any, str]] = [(response, "status_code"), (response, "status"), (error, "status_code"), (error, "status")]
    holders += [(error, "code"), (error, "http_status"), (_attribute(error, "resp"), "status")]
    if isinstance(response, Mapping) and isinstance(about := response.get("ResponseMetadata"), Mapping):  # botocore
        holders.append((type("_", (), {"status": about.get("HTTPStatusCode")}), "status"))
    for holder, name in holders:
        value = _attribute(holder, name)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return "late" if value in (408, 504) else "server" if value >= 500 or value in (401, 429) else "request"
    code = _attribute(error, "code")
    if callable(code) and hasattr(type(error), "details"):
        name = _attribute(_called(code), "name")
        return ("late" if name == "DEADLINE_EXCEEDED" else "server" if name in _GRPC else "request") if isinstance(name, str) else None
    return None


def _by_type(error: Exception) -> str | None:
    """Returns the verdict that follows from an exception type of the standard library."""
    if isinstance(error, subprocess.CalledProcessError):
        return "late" if error.returncode < 0 else "request"  # a signal killed the program, or it exited itself
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return "late"
    if isinstance(error, ConnectionError | socket.gaierror | socket.herror | EOFError):
        return "server"
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError | IsADirectoryError | NotADirectoryError):
        return "request"
    if isinstance(error, OSError) and isinstance(error.errno, int) and error.errno > 0 and error.strerror is not None:
        return "machine" if error.errno in _MACHINE else "server" if error.errno in _NETWORK else "request"
    return None


def _by_database(error: Exception) -> str | None:
    """Returns the verdict that follows from an error code of SQLite, PostgreSQL or MySQL."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(code, int):
            return "server" if code & 0xFF in _SQLITE else "request"
        return "server" if re.search(r"locked|disk I/O|unable to open|malformed|disk is full", error_text(error)) else "request"
    for name in ("sqlstate", "pgcode"):
        state = _attribute(error, name)
        if isinstance(state, str) and re.fullmatch(r"[0-9A-Z]{5}", state):
            return "server" if _SQLSTATE.match(state) else "request"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"OperationalError", "InterfaceError", "InternalError"} and error.args and isinstance(error.args[0], int):
        return "server" if error.args[0] in _MYSQL else "request"
    return None


def _by_name(error: Exception) -> str | None:
    """Returns the verdict that follows from the names of the error's type and of its base classes, except built-in types."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ != "builtins"]
    if any(map(_WRONG_NAME.search, names)):
        return "request"
    if any(map(_LATE_NAME.search, names)):
        return "late"
    return "server" if any(map(_NAME.search, names)) else None


def _chose_address(error: BaseException, arguments: Mapping[str, Any]) -> bool:
    """Whether the address that failed is one of the arguments. If the error contains no address, or only a numeric address, any argument
    that is an address counts."""
    hosts = {host.lower() for host in _hosts(error) if host}
    texts = [text.lower() for text in _texts(arguments)]
    if any(_holds(text, host) for host in hosts for text in texts):
        return True
    if any(not _NUMERIC.fullmatch(host) for host in hosts):
        return False
    return has_address(arguments)


def _holds(text: str, host: str) -> bool:
    """Whether a string contains a host. A host that is a single word, such as "search", must appear in the form of an address."""
    if "." in host or ":" in host:
        return re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", text) is not None
    return text.strip() == host or re.search(rf"(?://|@){re.escape(host)}(?![\w-])|(?<![\w.-]){re.escape(host)}:\d", text) is not None


def _is_address(key: str, text: str) -> bool:
    word = text.strip()
    if _URL.search(text[:_MAX_TEXT]) or _HOST_PORT.fullmatch(word):
        return True
    return _ADDRESS_KEY.search(key) is not None and _HOST_NAME.fullmatch(word) is not None


def _hosts(error: BaseException) -> Iterator[str]:
    """Yields the hosts that a client connected to, as its exception reports them."""
    for path in ("host", "request.url", "request_info.url", "url", "pool.host", "filename"):
        value: Any = error
        for name in path.split("."):
            value = _attribute(value, name)
        if isinstance(value, str) and (
            match := re.match(
                r"(?:[a-z][a-z0-9+.-]{1,20}://)?(?:[^/@\s]*@)?(\[[^\]]+\]|(?:[0-9a-f]{0,4}:){2,7}[0-9a-f.]*|[^/:?#\s]+)", value, re.I
            )
        ):
            if path == "host" or "://" in value or path == "pool.host":
                yield match[1].strip("[]")
        elif isinstance(host := _attribute(value, "host"), str):  # the value is a URL object
            yield host
    for pattern in (r"Connect call failed \('([^']{1,255})'", r"host='([^']{1,255})'", r"https?://([^/:'\"\s]{1,255})"):
        yield from re.findall(pattern, error_text(error))[:4]


def _named(value: Any, key: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """Yields every string in the arguments, as a pair with the name of its argument or field."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping) and depth:
        for name, item in value.items():
            yield from _named(item, str(name)[:80], depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for item in value:
            yield from _named(item, key, depth - 1)


def _texts(value: Any) -> Iterator[str]:
    return (text[:_MAX_TEXT] for _, text in islice(_named(value), _MAX_VALUES))


def _attribute(holder: Any, name: str) -> Any:
    """Returns an attribute; None if it does not exist or raises, because the attributes of a third-party object may raise anything."""
    if holder is None:
        return None
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def _called(code: Callable[[], Any]) -> Any:
    try:
        return code()
    except Exception:
        return None
