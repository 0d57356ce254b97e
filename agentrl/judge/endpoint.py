"""Client of an OpenAI-compatible chat endpoint. Replies are bounded.

A query to a busy or failed server is retried for up to `patience_s` seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from agentrl.base import secrets
from agentrl.base.backoff import PROBE_S, TRANSIENT, Clock, SystemClock, backoff_s, requested_wait_s
from agentrl.base.liveness import AnswerLiveness
from agentrl.base.user_code import describe_error, printable
from agentrl.base.web import bounded_body, validate_url
from agentrl.errors import JudgeError, PromptRefusedError, UserError
from agentrl.judge.servers import ServedUrl, ServerStarting
from agentrl.records.fields import text as encodable

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_Structured = Literal["auto", "always", "never"]
_EXCERPT = 300  # maximum number of characters of an error response that are quoted in messages
_LONGEST_KEY = 8192
_SHORTEST_HIDDEN = 16  # shorter header values may be ordinary text and are not redacted in responses
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
CHARS_PER_TOKEN = 3  # estimate used if the server does not report token counts; it is low, so that tokens are overestimated
CUT_OFF = "the answer was cut off at its maximum length"
_MOST_TOKENS = 1 << 31  # a larger count in a response is not credible
_OWN_S = 1.0  # seconds between requests to one of this run's own servers while it starts
_SCHEMA_REFUSED = (400, 404, 415, 422, 501)
_PROMPT_REFUSED = (400, 413, 422)
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_OWN_HEADERS = ("accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "transfer-encoding")
_OVERLOADED = re.compile(r"rate.?limit|overload|too.many|unavailable|time[ds]?.?out|server.?error|internal", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per million tokens, in one currency: `Prices(prompt=0.4, completion=1.6)`."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.prompt < math.inf and 0 <= self.completion < math.inf):
            raise UserError(f"prices must be at least 0, got {self.prompt} and {self.completion}", fix="set prices per million tokens")

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the price of a reply with these token counts."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An endpoint's reply and its token counts.

    `problem` is the reason why `text` cannot be a verdict; empty if `text` may be a verdict.
    """

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = True  # False means that the token counts are estimated from the number of characters
    tries: int = 1
    separate_reasoning: bool = False  # whether the server returned the model's reasoning separately

    @property
    def is_content(self) -> bool:
        """Whether `text` is the content of the model's message, possibly cut off at the token limit."""
        return self.problem in ("", CUT_OFF)


@dataclass(slots=True)
class _Wire:
    """The connections of one event loop, and the end of the current pause."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    resume_at: float = 0.0  # end of the pause, in the clock's monotonic time
    refused: int = 0  # number of consecutive rounds of rejected requests
    probe: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the query that probes a server that is down

    @property
    def down(self) -> bool:
        """Whether the newest requests failed, so that only one query at a time sends a request."""
        return self.refused > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Endpoint:
    """The address and settings of a judge model: `Endpoint(url="http://127.0.0.1:8000/v1", model="qwen3-8b")`.

    Judges that share an `Endpoint` object share its connections, and wait together while the server is down. Raises `UserError` if a
    setting is invalid.
    """

    url: str | Callable[[], str]  # without /chat/completions; a function (used for the run's own servers) is called before each request
    model: str
    key_env: str = ""  # environment variable with the API key, read before each request; empty means no key
    revision: str = ""  # distinguishes different weights under the same model name; part of the judge's identity
    temperature: float | None = 0.0  # None means the server's default
    max_tokens: int = 1024
    tokens_name: str = "max_tokens"  # request key that limits the reply's length; some servers call it max_completion_tokens
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # additional keys of the request, such as {"reasoning_effort": "low"}
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers, each by reference: {"api-key": "env:THEIR_KEY"}
    structured: _Structured = "auto"  # whether to send a JSON schema; auto sends it until the server rejects it
    timeout_s: float = 120.0  # deadline of one request
    patience_s: float = 1800.0  # deadline of one query, including all its requests and waits
    max_bytes: int = 1 << 20  # maximum size of one response body
    concurrency: int = 16
    prices: Prices = field(default_factory=Prices)
    clock: Clock = field(default_factory=SystemClock, repr=False)
    _wires: WeakKeyDictionary[asyncio.AbstractEventLoop, _Wire] = field(default_factory=WeakKeyDictionary, init=False, repr=False)
    _takes_no_schema: list[str] = field(default_factory=list, init=False, repr=False)
    _live: AnswerLiveness = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.url, str):
            validate_url(self.url)
        if error := next(secrets.literal_secret_errors(dict(self.options), "Endpoint.options"), ""):
            raise UserError(error, fix="set Endpoint.key_env to the environment variable that contains the key")
        for name, reference in self.headers.items():
            if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS or not secrets.is_reference(reference):
                raise UserError(
                    f"Endpoint.headers: {printable(name, 80)!r} must be an additional header with a reference as its value",
                    fix='write {"api-key": "env:THEIR_KEY"}, or "file:/run/secrets/key" as the value; for a bearer token, use key_env',
                )
        if self.structured not in get_args(_Structured):
            raise UserError(f"Endpoint.structured is {self.structured!r}", fix=f"use one of {', '.join(get_args(_Structured))}")
        if not self.model:
            raise UserError("a judge's endpoint needs a model name", fix='write Endpoint(url=..., model="...")')
        for name in ("timeout_s", "patience_s", "max_bytes", "concurrency", "max_tokens"):
            if not getattr(self, name) > 0:
                raise UserError(f"Endpoint.{name} must be positive, got {getattr(self, name)}", fix="use a larger number")
        fix = "check the endpoint; its requests are retried on new connections until patience_s has passed"
        object.__setattr__(self, "_live", AnswerLiveness(self._where(), fix=fix, first_s=self.timeout_s, clock=self.clock.monotonic))

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine the replies, without the address.

        If this run starts the server, includes the hash of the weights.
        """
        weights = {"weights": self.url.weights} if isinstance(self.url, ServedUrl) else {}
        names = ("model", "revision", "temperature", "max_tokens", "seed", "structured")
        return weights | {name: getattr(self, name) for name in names} | {"options": dict(self.options)}

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, schema: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None
    ) -> Reply:
        """Returns the model's reply, even if the reply is unreadable.

        `more` contains additional keys of this request, which override `options`. The following failures are retried, after the wait that
        the server requests, if any: status 408, 425, 429 or 5xx, an error with one of these statuses in the body of a response with status
        200, a failed connection, a timeout, and a truncated response. While the server is down, all queries to the endpoint wait, and then
        one query probes the server. If a requested wait exceeds the time that is left to a query, this query fails. The other queries wait
        at most `PROBE_S` seconds if the requested wait exceeds `patience_s`.

        Raises:
            JudgeError: there was no usable response within `patience_s` seconds, the server rejects or redirects the request, or the API
                key or a header has no valid value. The error is a `PromptRefusedError` for status 400, 413 or 422.
        """
        with nullcontext() if isinstance(self.url, ServedUrl) else self._live.question():  # the run's own servers are monitored elsewhere
            schema = None if self.structured == "never" or self._takes_no_schema else schema
            until = self.clock.monotonic() + self.patience_s
            return await self._answer(_PendingQuery(messages=messages, more=more or {}, schema=schema, until=until))

    async def _answer(self, query: _PendingQuery) -> Reply:
        wire = self._wire()
        while True:
            left = query.until - self.clock.monotonic()
            pause = wire.resume_at - self.clock.monotonic()
            if left <= 0 or pause >= left:
                raise self._overdue(query)
            reply = None
            if pause > 0:
                await self.clock.sleep(pause)
            elif not wire.down:
                reply = await self._try(wire, query)
            elif await _acquired(wire.probe, left):
                try:
                    # no other query has probed the server in the meantime
                    if wire.down and query.until > self.clock.monotonic() >= wire.resume_at:
                        reply = await self._try(wire, query, probing=True)
                finally:
                    wire.probe.release()
            if reply is not None:
                return reply

    async def _try(self, wire: _Wire, query: _PendingQuery, *, probing: bool = False) -> Reply | None:
        """Sends one request. Returns None if the request must be retried. Raises `JudgeError` under the same conditions as `ask`.

        If `probing` is true, the request is sent even if the server is down.
        """
        left = query.until - self.clock.monotonic()
        async with wire.slots:
            if wire.down and not probing:  # the server went down while this query waited for its slot
                return None
            query.tries += 1
            rejections, started = wire.refused, self.clock.monotonic()
            result = await self._send(wire, query, limit_s=min(self.timeout_s, left))
        if isinstance(result, _Later) and not result.without_schema:
            query.why = result.why
            self._pause(wire, query.tries, result, first=rejections == wire.refused)
            if (result.wait_s or 0.0) >= left:
                raise self._overdue(query)
            return None
        self._live.answered(self.clock.monotonic() - started)
        if isinstance(result, _Later):
            query.schema, query.refused = None, result.why
            return None
        if query.refused and not self._takes_no_schema:
            self._takes_no_schema.append(query.refused)
            log.warning("%s rejects JSON schemas (%s); its answers are parsed without one", self._where(), query.refused)
        if wire.down:
            wire.refused = 0
            log.warning("%s answers again", self._where())
        return replace(result, tries=query.tries)

    def _overdue(self, query: _PendingQuery) -> JudgeError:
        return JudgeError(f"{self._where()} did not respond within {self.patience_s:g} s{query.why and ': ' + query.why}")

    async def close(self) -> None:
        """Closes the connections of the running event loop. The next query opens new connections."""
        wire = self._wires.pop(asyncio.get_running_loop(), None)
        if wire is not None:
            await wire.http.aclose()

    def _pause(self, wire: _Wire, tries: int, later: _Later, *, first: bool) -> None:
        """Delays all queries to the endpoint. `first`: whether this is the first failure among the concurrent requests."""
        was_down = wire.down
        wire.refused += first
        seconds = backoff_s(tries, later.wait_s, refused=wire.refused if later.from_server else 1)
        if seconds > self.patience_s:  # no query is willing to wait as long as the header requests
            seconds = min(PROBE_S, self.patience_s)
        wire.resume_at = max(wire.resume_at, self.clock.monotonic() + seconds)
        if not was_down:
            log.warning("%s: %s; next request in %.1f s", self._where(), later.why, seconds)

    def _wire(self) -> _Wire:
        import httpx  # the import takes half a second, so it is not done when a recipe is loaded

        loop = asyncio.get_running_loop()
        for other in [known for known in self._wires if known.is_closed()]:
            del self._wires[other]
        if loop not in self._wires:
            limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency, keepalive_expiry=10.0)
            local = isinstance(self.url, ServedUrl) or (isinstance(self.url, str) and (urlsplit(self.url).hostname or "") in _LOOPBACK)
            certified = not local or str(self.url).startswith("https:")  # reading certificates takes longer than most queries
            http = httpx.AsyncClient(limits=limits, timeout=None, follow_redirects=False, trust_env=not local, verify=certified)
            self._wires[loop] = _Wire(http=http, slots=asyncio.Semaphore(self.concurrency))
        return self._wires[loop]

    async def _send(self, wire: _Wire, query: _PendingQuery, *, limit_s: float) -> Reply | _Later:
        import httpx

        key, more_headers = self._key(), self._additional_headers()
        hidden = [value for value in (key, *more_headers.values()) if value and (value == key or len(value) >= _SHORTEST_HIDDEN)]
        # No compression: a small answer could otherwise expand to gigabytes.
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {}), **more_headers}
        body = self._body(query.messages, query.schema, query.more)
        try:
            async with asyncio.timeout(limit_s), wire.http.stream("POST", self._address(), json=body, headers=headers) as response:
                content = await bounded_body(response, self.max_bytes if response.status_code == 200 else 4 * _EXCERPT)
                error = error_in(content) if response.status_code == 200 else (response.status_code, content.decode(errors="replace"))
                if error is not None:
                    text = " ".join(printable(_without(key, error[1]), _EXCERPT).split())
                    return self._refusal(error[0], response.headers, text, query.schema)
                for value in hidden:
                    content = content.replace(value.encode(), secrets.HIDDEN.encode())
                return self._read(content, query.messages)
        except TimeoutError:
            return _Later(why=f"no answer within {limit_s:g} s")
        except ServerStarting as starting:
            return _Later(why=str(starting), wait_s=_OWN_S, from_server=False)
        except (httpx.HTTPError, httpx.StreamError) as failure:
            return _Later(why=_without(key, describe_error(failure)))

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> Reply:
        """Returns the reply in the body of a response with status 200."""
        return parse_completion(content, self.max_bytes, messages)

    def _refusal(self, status: int, headers: Mapping[str, str], text: str, schema: Mapping[str, Any] | None) -> _Later:
        """Returns the retry for a response with a status other than 200. Raises `JudgeError` if a retry would not help."""
        if status in _SCHEMA_REFUSED and schema is not None and self.structured == "auto":
            return _Later(why=f"status {status}: {text}", without_schema=True)
        if status in TRANSIENT:
            return _Later(why=f"status {status}: {text}", wait_s=requested_wait_s(headers, now=self.clock.time()))
        if 300 <= status < 400:
            raise JudgeError(f"{self._where()} redirects (status {status}), but prompt and key are sent only to the recipe's URL")
        hint = f"; check the key in {self.key_env or 'Endpoint.key_env'}" if status in (401, 403) else ""
        kind = PromptRefusedError if status in _PROMPT_REFUSED else JudgeError
        raise kind(f"{self._where()} rejects the request: status {status}: {text}{hint}")

    def _additional_headers(self) -> dict[str, str]:
        try:
            values = {name: secrets.read_secret(reference).strip() for name, reference in self.headers.items()}
        except UserError as error:
            raise JudgeError(f"a header for {self._where()} has no value: {error.message}") from None
        if wrong := next((name for name, value in values.items() if not value.isascii() or not value.isprintable()), ""):
            raise JudgeError(f"the header {wrong} for {self._where()} has a value with characters that are invalid in a header")
        return values

    def _address(self) -> str:
        return f"{self._base()}/chat/completions"

    def _body(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), self.tokens_name: self.max_tokens, **self.options, **more}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.seed is not None:
            body["seed"] = self.seed
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        return body

    def _base(self) -> str:
        return validate_url(self.url if isinstance(self.url, str) else self.url()).rstrip("/")

    def _key(self) -> str:
        if isinstance(self.url, ServedUrl):
            return self.url.key
        if not self.key_env:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if not key or len(key) > _LONGEST_KEY or not key.isascii() or not key.isprintable():
            raise JudgeError(f"the environment variable {self.key_env} does not contain a valid key for {self._where()}")
        return secrets.register(key)

    def _where(self) -> str:
        """Returns the model and the host for error messages, without the path and query of the URL, which may contain secrets."""
        host = urlsplit(self.url).netloc if isinstance(self.url, str) else "a server of the run"
        return f"judge {printable(self.model, 80)} at {host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later:
    """A failure after which a retry may succeed.

    `wait_s` is the requested wait in seconds; None means that no wait was requested. If `from_server` is true, the server requested the
    wait, otherwise the process that is starting the server.
    """

    why: str
    wait_s: float | None = None
    from_server: bool = True
    without_schema: bool = False  # the server rejects the schema, so retry immediately without it


@dataclass(slots=True, kw_only=True)
class _PendingQuery:
    """A query that has no response yet, and the state of its requests."""

    messages: Sequence[Mapping[str, Any]]
    more: Mapping[str, Any]
    schema: Mapping[str, Any] | None
    until: float  # deadline, in the clock's monotonic time
    tries: int = 0
    why: str = ""  # why the last request failed
    refused: str = ""  # why the server rejected the schema


async def _acquired(lock: asyncio.Lock, within_s: float) -> bool:
    """Acquires a lock. Returns False if the lock cannot be acquired within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            return await lock.acquire()
    except TimeoutError:
        return False


def error_in(content: bytes) -> tuple[int, str] | None:
    """Returns the status and text of an error in the body of a 200 response, as some proxies send it; None if the body contains no error.

    An error without a status is treated as status 503 if its text reports an overload or a server fault. Otherwise, the body is treated as
    a reply.
    """
    if b'"error"' not in content:
        return None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    answers = body.get("choices") if isinstance(body, dict) else None
    first = answers[0] if isinstance(answers, list) and answers else body
    error = first.get("error") if isinstance(first, dict) and not first.get("message") and "data" not in first else None
    if not error:
        return None
    code, kind, text = (error.get(key) for key in ("code", "type", "message")) if isinstance(error, dict) else (None, None, error)
    status = int(code) if isinstance(code, int | str) and re.fullmatch(r"[45]\d\d", str(code)) else 0
    if not status and _OVERLOADED.search(f"{code} {kind} {text}"[:1000]):
        status = 503
    return (status, f"in a response with status 200: {text if isinstance(text, str) else code}") if status else None


def parse_completion(content: bytes, most: int, messages: Sequence[Mapping[str, Any]]) -> Reply:
    """Parses the reply in the body of a 200 response. If the content is unreadable, returns it as `Reply.text` with `Reply.problem` set."""
    prompt_tokens = sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN
    text = content[:most].decode(errors="replace")
    guess: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text) // CHARS_PER_TOKEN, "counted": False}
    if len(content) > most:
        return Reply(text=text, problem=f"the answer has more than {most:,} bytes", **guess)
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        answer, refusal, finish_reason = choice["message"].get("content"), choice["message"].get("refusal"), choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Reply(text=text, problem="the answer is not a chat completion", **guess)
    cost = token_usage(body.get("usage"), prompt_tokens, answer)
    if not isinstance(answer, str):
        problem = "the model refused to answer" if isinstance(refusal, str) else "the answer has no text"
        return Reply(text=encodable(refusal) if isinstance(refusal, str) else text, problem=problem, **cost)
    problem = CUT_OFF if finish_reason == "length" else ""
    thought = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
    return Reply(text=encodable(answer), problem=problem, separate_reasoning=bool(thought), **cost)


def token_usage(reported: Any, prompt_tokens: int, answer: Any) -> dict[str, Any]:
    """Returns the token counts that the server reports if they are plausible, otherwise an estimate from the number of characters."""
    counts = [reported.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(reported, dict) else []
    if counts and all(type(count) is int and 0 <= count < _MOST_TOKENS for count in counts):
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1]}
    length = len(answer) if isinstance(answer, str) else 0
    return {"prompt_tokens": prompt_tokens, "completion_tokens": length // CHARS_PER_TOKEN, "counted": False}


def _without(key: str, text: str) -> str:
    """Removes the API key from the text of a response, because a server may quote a key that it rejects."""
    return secrets.redact(text.replace(key, "[key]") if key else text)
