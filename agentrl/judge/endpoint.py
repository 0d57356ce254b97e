"""An OpenAI-compatible chat endpoint: one question, one bounded answer. A server that is down or busy is waited for, within a patience."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from agentrl.base import secrets
from agentrl.base.liveness import AnswerLiveness
from agentrl.base.user_code import describe_error, printable
from agentrl.errors import JudgeError, PromptRefusedError, UserError
from agentrl.judge.backoff import PROBE_S, TRANSIENT, Clock, SystemClock, backoff_s, requested_wait_s
from agentrl.judge.servers import ServedUrl, ServerStarting
from agentrl.records.fields import text as encodable

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_EXCERPT = 300  # characters of a refusal that are quoted
_LONGEST_KEY = 8192
_SHORTEST_HIDDEN = 16  # characters of a header's value that is hidden in answers; shorter ones may be words
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
CHARS_PER_TOKEN = 3  # where a server does not count: rather too many tokens than too few
_MOST_TOKENS = 1 << 31  # that are believed of one answer
_OWN_S = 1.0  # before a server that the run starts is looked for again
_SCHEMA_REFUSED = (400, 404, 415, 422, 501)
_PROMPT_REFUSED = (400, 413, 422)
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_OWN_HEADERS = ("accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "transfer-encoding")
_OVERLOADED = re.compile(r"rate.?limit|overload|too.many|unavailable|time[ds]?.?out|server.?error|internal", re.IGNORECASE)
_MOST_PIECES = 4096  # small pieces of an answer
_FULL_PIECE = 64  # bytes of a piece that is not small
_PIECES_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a million tokens cost, in one currency: `Prices(prompt=0.4, completion=1.6)`."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.prompt < math.inf and 0 <= self.completion < math.inf):
            raise UserError(f"prices are numbers from 0, got {self.prompt} and {self.completion}", fix="give them a million tokens")

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an endpoint said, and what it cost. `problem` says why `text` cannot be a verdict; empty: it may be one."""

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = True  # by the server; False: estimated from the number of characters
    tries: int = 1
    separate_reasoning: bool = False  # whether the server returned the model's reasoning separately from `text`


@dataclass(slots=True)
class _Wire:
    """The connections of one event loop, and until when the server wants to be left alone."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    resume_at: float = 0.0  # of the clock
    refused: int = 0  # number of refused rounds of requests in a row
    probe: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the only question that may ask a server that is down

    @property
    def down(self) -> bool:
        """Whether the last requests were refused."""
        return self.refused > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Endpoint:
    """Where a judge model answers: `Endpoint(url="http://127.0.0.1:8000/v1", model="qwen3-8b")`.

    Several judges may share one: then they share its connections and its pauses.
    """

    url: str | Callable[[], str]  # up to and without /chat/completions; a function is asked before each request, for a server of the run
    model: str
    key_env: str = ""  # environment variable that holds the key, read before each request; empty: the server wants none
    revision: str = ""  # what tells weights of one name apart: a judge with another one has to be calibrated again
    temperature: float | None = 0.0  # None: the server's own
    max_tokens: int = 1024
    tokens_name: str = "max_tokens"  # some servers call it max_completion_tokens
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further keys of the request, such as {"reasoning_effort": "low"}
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers, each by reference: {"api-key": "env:THEIR_KEY"}
    structured: Literal["auto", "always", "never"] = "auto"  # whether to ask for a JSON schema; auto: as long as the server takes it
    timeout_s: float = 120.0  # of one request
    patience_s: float = 1800.0  # of one question, waiting and all requests included
    max_bytes: int = 1 << 20  # of one answer
    concurrency: int = 16
    prices: Prices = field(default_factory=Prices)
    clock: Clock = field(default_factory=SystemClock, repr=False)
    _wires: WeakKeyDictionary[asyncio.AbstractEventLoop, _Wire] = field(default_factory=WeakKeyDictionary, init=False, repr=False)
    _takes_no_schema: list[str] = field(default_factory=list, init=False, repr=False)
    _live: AnswerLiveness = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.url, str):
            validate_url(self.url)
        if found := next(secrets.literal_secret_errors(dict(self.options), "Endpoint.options"), ""):
            raise UserError(found, fix="name the variable that holds the key with Endpoint.key_env")
        for name, where in self.headers.items():
            if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS or not secrets.is_reference(where):
                raise UserError(
                    f"Endpoint.headers: {printable(name, 80)!r} is not an additional header with a reference as its value",
                    fix='write it as {"api-key": "env:THEIR_KEY"} or with "file:/run/secrets/key"; use Endpoint.key_env for a bearer token',
                )
        if not self.model:
            raise UserError("a judge's endpoint needs the name of a model", fix='Endpoint(url=..., model="...")')
        for name in ("timeout_s", "patience_s", "max_bytes", "concurrency", "max_tokens"):
            if not getattr(self, name) > 0:
                raise UserError(f"Endpoint.{name} must be positive, got {getattr(self, name)}", fix="give a larger number")
        fix = "check the endpoint; requests to it are repeated on new connections until patience_s has passed"
        object.__setattr__(self, "_live", AnswerLiveness(self._where(), fix=fix, first_s=self.timeout_s, clock=self.clock.monotonic))

    def identity(self) -> dict[str, Any]:
        """What decides about its answers, and nothing else: not where the server is, nor how long it is waited for.

        The weights of a server that the run starts are known, and so they are part of it.
        """
        weights = {"weights": self.url.weights} if isinstance(self.url, ServedUrl) else {}
        return weights | {
            "model": self.model,
            "revision": self.revision,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "options": dict(self.options),
            "structured": self.structured,
        }

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, schema: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None
    ) -> Reply:
        """The model's answer, readable or not. `more`: further keys of this request; they count before `options`.

        Busy and broken servers are asked again after the wait that their headers ask for: 408, 425, 429, 5xx, such an error in a 200, no
        connection, no answer in time, an answer that breaks off. All questions of an endpoint wait together, and then one of them looks
        whether the server is back. A wait that is asked for and longer than the patience ends the question that got it, and is no longer
        than `PROBE_S` for the others.

        Raises:
            JudgeError: nothing came within `patience_s`, or the server refuses such requests.
        """
        with nullcontext() if isinstance(self.url, ServedUrl) else self._live.question():  # a server of the run has its own watch
            return await self._answer(messages, schema, more or {})

    async def _answer(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None, more: Mapping[str, Any]) -> Reply:
        wire, began = self._wire(), self.clock.monotonic()
        trying = _Trying(schema=None if self.structured == "never" or self._takes_no_schema else schema)
        while True:
            left = self.patience_s - (self.clock.monotonic() - began)
            pause = wire.resume_at - self.clock.monotonic()
            if left <= 0 or pause >= left:
                raise JudgeError(f"{self._where()} did not answer within {self.patience_s:g} s{trying.why and ': ' + trying.why}")
            got = None
            if pause > 0:
                await self.clock.sleep(pause)
            elif not wire.down:
                got = await self._try(wire, trying, messages, more, left=left)
            elif await _acquired(wire.probe, left):
                try:
                    left = self.patience_s - (self.clock.monotonic() - began)
                    if wire.down and left > 0 and wire.resume_at <= self.clock.monotonic():  # no other question has checked meanwhile
                        got = await self._try(wire, trying, messages, more, left=left, probing=True)
                finally:
                    wire.probe.release()
            if got is not None:
                return got

    async def _try(
        self,
        wire: _Wire,
        trying: _Trying,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
        *,
        left: float,
        probing: bool = False,
    ) -> Reply | None:
        """Sends one request. Returns None if it should be repeated. Raises `JudgeError` as `ask`.

        Args:
            probing: the server is down, and this is the question that checks whether it is back.
        """
        async with wire.slots:
            if wire.down and not probing:  # the server went down while this question waited for its slot
                return None
            trying.tries += 1
            round_ = wire.refused
            body = self._body(messages, trying.schema, more)
            asked = self.clock.monotonic()
            got = await self._once(wire, body, messages, trying.schema, limit_s=min(self.timeout_s, left))
        if not isinstance(got, _Later):
            self._live.answered(self.clock.monotonic() - asked)
        if isinstance(got, _Later):
            trying.why = got.why
            self._pause(wire, trying.tries, got, first=round_ == wire.refused)
            if (got.wait_s or 0.0) >= left:
                raise JudgeError(f"{self._where()} did not answer within {self.patience_s:g} s: {got.why}")
            return None
        if isinstance(got, _NoSchema):
            trying.schema, trying.refused = None, got.why
            return None
        self._learn(wire, trying.refused)
        return replace(got, tries=trying.tries)

    async def close(self) -> None:
        """Closes the connections of this event loop; the next question opens new ones."""
        wire = self._wires.pop(asyncio.get_running_loop(), None)
        if wire is not None:
            await wire.http.aclose()

    def _learn(self, wire: _Wire, refused: str) -> None:
        """What an answer shows: that the server is back, or that it answers once it is asked for no schema."""
        if refused and not self._takes_no_schema:
            self._takes_no_schema.append(refused)
            log.warning("%s takes no JSON schema (%s); its answers are parsed as they come", self._where(), refused)
        if wire.down:
            wire.refused = 0
            log.warning("%s answers again", self._where())

    def _pause(self, wire: _Wire, tries: int, got: _Later, *, first: bool) -> None:
        """Delays all questions. `first`: whether this is the first refusal among the concurrent requests."""
        fresh = not wire.down
        wire.refused += first
        seconds = backoff_s(tries, got.wait_s, refused=wire.refused if got.asked else 1)
        if seconds > self.patience_s:  # the header requests more than any question waits
            seconds = min(PROBE_S, self.patience_s)
        wire.resume_at = max(wire.resume_at, self.clock.monotonic() + seconds)
        if fresh:
            log.warning("%s: %s; next request in %.1f s", self._where(), got.why, seconds)

    def _wire(self) -> _Wire:
        import httpx  # half a second that a recipe's loading does without

        loop = asyncio.get_running_loop()
        for other in [one for one in self._wires if one.is_closed()]:
            del self._wires[other]
        if loop not in self._wires:
            limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency, keepalive_expiry=10.0)
            local = isinstance(self.url, ServedUrl) or (isinstance(self.url, str) and (urlsplit(self.url).hostname or "") in _LOOPBACK)
            certified = not local or str(self.url).startswith("https:")  # reading certificates takes longer than most of what comes here
            http = httpx.AsyncClient(limits=limits, timeout=None, follow_redirects=False, trust_env=not local, verify=certified)
            self._wires[loop] = _Wire(http=http, slots=asyncio.Semaphore(self.concurrency))
        return self._wires[loop]

    async def _once(
        self,
        wire: _Wire,
        body: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None,
        *,
        limit_s: float,
    ) -> Reply | _Later | _NoSchema:
        import httpx

        key, further = self._key(), self._further_headers()
        hidden = [value for value in (key, *further.values()) if value and (value == key or len(value) >= _SHORTEST_HIDDEN)]
        try:
            async with asyncio.timeout(limit_s), self._posted(wire, body, key, further) as response:
                if response.status_code == 200:
                    content = await _bounded(response, self.max_bytes)
                    if (error := error_in(content)) is not None:
                        said = printable(_without(key, error[1]), _EXCERPT)
                        return self._refusal(error[0], response.headers, " ".join(said.split()), schema)
                    for value in hidden:
                        content = content.replace(value.encode(), secrets.HIDDEN.encode())
                    return self._read(content, messages)
                said = printable(_without(key, (await _bounded(response, 4 * _EXCERPT)).decode(errors="replace")), _EXCERPT)
                return self._refusal(response.status_code, response.headers, " ".join(said.split()), schema)
        except TimeoutError:
            return _Later(why=f"no answer within {limit_s:g} s")
        except ServerStarting as error:
            return _Later(why=str(error), wait_s=_OWN_S, asked=False)
        except (httpx.HTTPError, httpx.StreamError) as error:
            return _Later(why=_without(key, describe_error(error)))

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> Reply:
        """The answer in the body of a 200."""
        return parse_completion(content, self.max_bytes, messages)

    def _refusal(self, status: int, headers: Mapping[str, str], said: str, schema: Mapping[str, Any] | None) -> _Later | _NoSchema:
        """What to do about a status that is no 200. Raises `JudgeError` where asking again would not help."""
        if status in TRANSIENT and not (status in _SCHEMA_REFUSED and schema is not None and self.structured == "auto"):
            return _Later(why=f"status {status}: {said}", wait_s=requested_wait_s(headers, now=self.clock.time()))
        if status in _SCHEMA_REFUSED and schema is not None and self.structured == "auto":
            return _NoSchema(why=f"status {status}: {said}")
        if 300 <= status < 400:
            raise JudgeError(f"{self._where()} redirects, and a judge's prompt and key go nowhere but where the recipe says: {status}")
        hint = f"; look at the key in {self.key_env or 'Endpoint.key_env'}" if status in (401, 403) else ""
        kind = PromptRefusedError if status in _PROMPT_REFUSED else JudgeError
        raise kind(f"{self._where()} refuses: status {status}: {said}{hint}")

    @asynccontextmanager
    async def _posted(self, wire: _Wire, body: Mapping[str, Any], key: str, further: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        # No compression: a small answer could otherwise unpack to gigabytes.
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {}), **further}
        async with wire.http.stream("POST", self._address(), json=body, headers=headers) as response:
            yield response

    def _further_headers(self) -> dict[str, str]:
        try:
            read = {name: secrets.read_secret(where).strip() for name, where in self.headers.items()}
        except UserError as error:
            raise JudgeError(f"a header for {self._where()}: {error.message}") from None
        if wrong := next((name for name, value in read.items() if not value.isascii() or not value.isprintable()), ""):
            raise JudgeError(f"the header {wrong} for {self._where()} has a value with characters that a header cannot contain")
        return read

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
            raise JudgeError(f"the environment variable {self.key_env} holds no key for {self._where()}")
        return secrets.register(key)

    def _where(self) -> str:
        """For messages: the model and the host, and nothing that may be secret."""
        host = urlsplit(self.url).netloc if isinstance(self.url, str) else "a server of the run"
        return f"judge {printable(self.model, 80)} at {host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later:
    """A repeated request may succeed, after `backoff_s` if the server (`asked`) or the process that starts it says so."""

    why: str
    wait_s: float | None = None
    asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoSchema:
    why: str


@dataclass(slots=True, kw_only=True)
class _Trying:
    """The state of one question's requests."""

    schema: Mapping[str, Any] | None
    tries: int = 0
    why: str = ""  # why the last request got no answer
    refused: str = ""  # why the server accepted no schema


def validate_url(url: str) -> str:
    """The url of an endpoint. Raises `UserError` for one that is none, or that holds a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            "an endpoint's url is http(s)://HOST/PATH without a user, a password or a query",
            fix='such as "https://api.example.org/v1"; the key comes from the environment variable that is named for it',
        )
    return url


async def _acquired(lock: asyncio.Lock, within_s: float) -> bool:
    """Whether the lock was acquired in time."""
    try:
        async with asyncio.timeout(within_s):
            return await lock.acquire()
    except TimeoutError:
        return False


async def _bounded(response: httpx.Response, most: int) -> bytes:
    """The first `most` bytes of an answer, and one more if there are more. Does not read the rest.

    Raises `httpx.RemoteProtocolError` for an answer in very many pieces, because each piece costs more time than its bytes.
    """
    import httpx

    parts, size = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > most:
            break
        if len(parts) > _MOST_PIECES + size // _FULL_PIECE:
            raise httpx.RemoteProtocolError(f"the answer comes in pieces of {size // len(parts)} bytes")
        if len(parts) % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)  # buffered pieces are read without waiting, so other tasks get no turn
    return b"".join(parts)[: most + 1]


def error_in(content: bytes) -> tuple[int, str] | None:
    """Status and text of an error in the body of a 200, as some proxies send it; None if there is no such error.

    An error without a status counts as 503 if its text reports an overload or a fault of the server. Any other body is read as an answer.
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
    return (status, f"in a 200: {text if isinstance(text, str) else code}") if status else None


def parse_completion(content: bytes, most: int, messages: Sequence[Mapping[str, Any]]) -> Reply:
    """The answer in the body of a 200. What cannot be read is kept as it came, with the problem."""
    asked = sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN
    text = content[:most].decode(errors="replace")
    guess: dict[str, Any] = {"prompt_tokens": asked, "completion_tokens": len(text) // CHARS_PER_TOKEN, "counted": False}
    if len(content) > most:
        return Reply(text=text, problem=f"an answer of more than {most:,} bytes", **guess)
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        said, refusal, ended = choice["message"].get("content"), choice["message"].get("refusal"), choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Reply(text=text, problem="an answer that is no chat completion", **guess)
    cost = token_usage(body.get("usage"), asked, said)
    if not isinstance(said, str):
        problem = "the model refused" if isinstance(refusal, str) else "an answer without text"
        return Reply(text=encodable(refusal) if isinstance(refusal, str) else text, problem=problem, **cost)
    problem = "the answer was cut off by its length" if ended == "length" else ""
    thought = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
    return Reply(text=encodable(said), problem=problem, separate_reasoning=bool(thought), **cost)


def token_usage(told: Any, asked: int, said: Any) -> dict[str, Any]:
    """Tokens as the server counts them where it does so credibly, else an estimate."""
    counts = [told.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(told, dict) else []
    if counts and all(type(count) is int and 0 <= count < _MOST_TOKENS for count in counts):
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1]}
    length = len(said) if isinstance(said, str) else 0
    return {"prompt_tokens": asked, "completion_tokens": length // CHARS_PER_TOKEN, "counted": False}


def _without(key: str, text: str) -> str:
    """A server may quote the key that it refuses."""
    return secrets.redact(text.replace(key, "[key]") if key else text)
