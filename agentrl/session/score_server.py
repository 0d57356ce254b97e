"""The HTTP server of `agentrl score RUN --serve`. It receives late scores from programs, and serves a page on which people score episodes.

Every route except the page's static files requires the run's token as a bearer token in the header `Authorization`. No cookie is used, so
another web page cannot send a score in a user's name.

    POST /scores    one score, or {"scores": [...]} with at most 100 scores (`agentrl.session.late_scores`)
    GET /pending    the parts that can be scored now, in pages: ?limit=100&after=EPISODE
    POST /episode   an episode that can be scored now, as HTML for the page
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.error_text import reason_text
from agentrl.base.secrets import register
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import log_unexpected
from agentrl.errors import ScoreRejected, UserError
from agentrl.experience.late_parts import Clock
from agentrl.gateway.checks import array, known_fields, text, value_or
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import Identified, RequestSlots, bytes_of, check_source, is_key, json_response, key_of
from agentrl.observe.markup import render, template_file
from agentrl.observe.transcripts import show_episode
from agentrl.protocols import ExperienceStore
from agentrl.records import codec
from agentrl.session.late_scores import error_data, parse, pending_pages, read_score
from agentrl.session.transcript import PendingTranscripts

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

TOKEN_FILE = "score.token"
"""File in the run folder that contains the token for its score server. Only the owner of the file can read it."""
MAX_SCORES = 100
"""Maximum number of scores in one request, and maximum number of episodes in one page of pending parts."""
MAX_BODY = 1 << 20
BODY_S = 10.0
ANSWER_S = 60.0
AT_ONCE, WAITING = 4, 64
"""Maximum number of requests that use the store at the same time, and maximum number of requests in progress."""
_MAX_SKIPPED = 1000
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{43}\n?")
_STATUS = {
    **{"malformed": 400, "not_finite": 400, "unknown": 404, "contradictory": 409, "finished": 409, "expired": 410, "out_of_range": 422},
    **{"invalid": 400, "unknown_field": 400, "wrong_key": 401, "wrong_host": 403, "not_found": 404, "too_large": 413, "encoding": 415},
    **{"too_many": 429, "failed": 503},
}
"""Cause of an error -> HTTP status. Only requests that failed with 429 or 503 should be retried."""
_FIX = {
    "wrong_key": f"send Authorization: Bearer TOKEN, with the token in {TOKEN_FILE} of the run folder",
    "failed": "send the request again with the same key",
    "too_many": "send the request again with the same key",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def run_token(run_dir: Path) -> str:
    """Returns the token for a run's score server, creating it on first use.

    Raises `UserError` if the token file is not private or is damaged, or if it cannot be created or read.
    """
    path = run_dir / TOKEN_FILE
    try:
        if not path.exists():
            new = path.with_name(f".{TOKEN_FILE}.{secrets.token_hex(4)}")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            try:
                os.link(new, path)  # fails if another server has created the file in the meantime; then the token in that file is used
            except FileExistsError:
                pass
            finally:
                new.unlink()
        content, mode = read_bytes(path, most=1 << 10, inside=run_dir), path.stat().st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_text(error)}", fix="delete the file, or make the run folder writable") from None
    if mode & 0o077 or not _TOKEN.fullmatch(content):
        raise UserError(f"{path} is damaged, or other users can read it", fix="delete the file; the next start creates a new token")
    return register(content.decode().strip())


@dataclass(slots=True, kw_only=True, eq=False)
class ScoreServer:
    """The routes of a score server, as an ASGI application (`app`).

    Args:
        run_dir: the run folder, for the transcripts of pending episodes.
        blind: whether to hide the correct answers.
        user: the name that the page suggests for the person who scores.
    """

    store: ExperienceStore
    run_dir: Path
    token: str
    blind: bool = False
    user: str = ""
    _clock: Clock = field(default_factory=Clock)
    _slots: RequestSlots = field(default_factory=RequestSlots)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def app(self) -> Any:
        """Returns the application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        page = {"/": ("score.html", "text/html"), "/score.js": ("score.js", "text/javascript"), "/score.css": ("score.css", "text/css")}
        routes = [Route(path, _static(name, kind), methods=["GET"]) for path, (name, kind) in page.items()]
        styles = ("components.css", "report.css")
        routes += [Route(f"/{name}", _static(name, "text/css"), methods=["GET"]) for name in styles]
        for path, answer, method in (
            ("/scores", self._scores, "POST"),
            ("/pending", self._pending, "GET"),
            ("/episode", self._episode, "POST"),
        ):
            routes.append(Route(path, self._guarded(answer), methods=[method]))
        app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
        app.router.redirect_slashes = False
        return Identified(app)

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        """Returns a handler that requires the token. The error responses of the handler contain no details about the server."""

        async def guarded(request: Request) -> Response:
            try:
                check_source(request.headers)
                if not is_key(key_of(request.headers), self.token):
                    raise RequestError("wrong_key", "The token is missing or wrong.")
                async with self._slots.use(most=WAITING, within_s=ANSWER_S):
                    return _protected(await answer(request))
            except RequestError as refused:
                return _refusal(refused.kind, refused.message)
            except ScoreRejected as error:
                rejection = error_data(error)
                return _protected(json_response(rejection, _status(rejection)))
            except TimeoutError:
                return _refusal("failed", "The answer took too long.")
            except Exception as error:
                log_unexpected("a request to the score server", error)
                return _refusal("failed", "The scores cannot be stored or read now; see the server log for the reason.")

        return guarded

    async def _scores(self, request: Request) -> Response:
        data = parse(await bytes_of(request, BODY_S, most=MAX_BODY))
        if not isinstance(data, dict) or "scores" not in data:
            results = await self._on_store(lambda: [self._add(data)])
            return json_response(results[0], _status(results[0]))
        scores = array(known_fields(data, ("scores",))["scores"], "scores", most=MAX_SCORES)
        results = await self._on_store(lambda: [self._add(score) for score in scores])
        return json_response({"results": results}, 422 if any("error" in result for result in results) else 200)

    def _add(self, data: Any) -> dict[str, Any]:
        try:
            receipt: dict[str, Any] = codec.to_data(self.store.add_score(read_score(data), now=self._clock.now()))
            return receipt
        except ScoreRejected as error:
            return error_data(error)

    async def _pending(self, request: Request) -> Response:
        limit, after = request.query_params.get("limit", str(MAX_SCORES)), request.query_params.get("after", "")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 0 < int(limit) <= MAX_SCORES):
            raise RequestError("invalid", f"limit must be a number from 1 to {MAX_SCORES}.")
        pending = await self._on_store(lambda: next(self._pages(limit=int(limit), after=after), []))
        return json_response({"pending": pending, "next": pending[-1]["episode_id"] if pending else None})

    async def _episode(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        fields = known_fields(parse(await bytes_of(request, BODY_S, most=MAX_BODY)), ("skipped", "scored_by"))
        skipped = {text(name, "skipped") for name in array(value_or(fields.get("skipped"), []), "skipped", most=_MAX_SKIPPED)}
        scored_by = text(value_or(fields.get("scored_by"), ""), "scored_by")
        return HTMLResponse(await self._on_store(lambda: self._show(skipped, scored_by)))

    def _show(self, skipped: set[str], scored_by: str) -> str:
        """Returns the HTML for a pending episode, or for a note if no other episode is pending. Each person sees the episodes in a
        different order."""
        part = min(self._candidates(skipped), key=lambda one: _hash(f"{scored_by}/{one['episode_id']}"), default=None)
        if part is None:
            return render("score_episode.html", part=None, skipped=len(skipped))
        transcript = PendingTranscripts(self.run_dir).read(part["group"], part["attempt"]) or {"question": part["task_id"]}
        shown = show_episode(transcript, title=part["task_id"])
        outcome = [(name, value) for name, value in shown.outcome if not (self.blind and name == "truth")]
        target = json.dumps({name: part[name] for name in ("episode_id", "part", "low", "high")})
        return render("score_episode.html", part=part, target=target, shown=shown, outcome=outcome, user=self.user)

    def _candidates(self, skipped: set[str]) -> list[dict[str, Any]]:
        """Returns the parts to score from the first page that contains an episode that is not skipped."""
        pages = ([part for part in page if part["episode_id"] not in skipped] for page in self._pages(limit=MAX_SCORES))
        return next(filter(None, pages), [])

    def _pages(self, *, limit: int, after: str = "") -> Iterator[list[dict[str, Any]]]:
        return pending_pages(self.store, limit=limit, after=after, now=self._clock.now())

    async def _on_store(self, work: Callable[[], Any]) -> Any:
        async with self._turns:
            return await asyncio.to_thread(work)


def _static(name: str, kind: str) -> Callable[[Request], Any]:
    content = template_file(name)

    async def answer(request: Request) -> Response:
        from starlette.responses import Response

        return _protected(Response(content, media_type=kind))

    return answer


def _protected(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


def _status(result: dict[str, Any]) -> int:
    return _STATUS.get(result["error"]["cause"], 400) if "error" in result else 200


def _refusal(cause: str, message: str) -> Response:
    error = {"cause": cause, "message": message, "fix": _FIX.get(cause, "correct the request")}
    return _protected(json_response({"error": error}, _STATUS[cause]))


async def _no_route(request: Request, error: Exception) -> Response:
    return _protected(json_response({"error": {"cause": "not_found", "message": "There is no such route.", "fix": ""}}, 404))


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "replace")).digest()
