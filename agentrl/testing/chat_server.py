"""A chat endpoint with scripted responses, over HTTP on loopback, for tests of judges.

with ChatServer(lambda body, number: ScriptedAnswer('{"reasoning": "", "scores": {"correct": 1}, "abstain": false}')) as server:
    endpoint = Endpoint(url=server.url, model="scripted")

The server also serves the route of a reward model, `/classify`. `ScriptedAnswer(number=1.5)` is a response of this route.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Body = Mapping[str, Any]


_ROUTES = ("/v1/chat/completions", "/classify")


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One response. `text` is the model's text, and `raw` replaces the body of the response."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    finish_reason: str = "stop"
    tokens: tuple[int, int] | None = (100, 10)  # tokens of prompt and answer; None if not reported
    breaks_off: bool = False  # closes the connection in the middle of the body
    hangs: bool = False  # sends nothing until the server is closed
    number: float | None = None  # score of a reward model, instead of text

    def content(self) -> bytes:
        """Returns the body of the response."""
        if self.raw is not None:
            return self.raw
        if self.number is not None:
            output = {"index": 0, "label": "LABEL_0", "probs": [self.number], "num_classes": 1}
            return json.dumps({"object": "list", "data": [output], "usage": {"prompt_tokens": 100, "completion_tokens": 0}}).encode()
        message = {"role": "assistant", "content": self.text}
        body: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}]}
        if self.tokens is not None:
            body["usage"] = {"prompt_tokens": self.tokens[0], "completion_tokens": self.tokens[1]}
        return json.dumps(body).encode()


Script = Callable[[Body, int], ScriptedAnswer]
"""Returns the response to a request, given its JSON and its number, counted from 0. It may be called from several threads concurrently."""


class ChatServer:
    """Serves `POST /v1/chat/completions` and `/classify`, with responses from a script or a list. The last response in a list is
    repeated."""

    def __init__(self, script: Script | Iterable[ScriptedAnswer]) -> None:
        self._script: Script = script if callable(script) else _in_turn(list(script))
        self.requests: list[dict[str, Any]] = []  # {"body", "headers", "path"} of each
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """The base URL of the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def prompts(self) -> list[str]:
        """Returns the text of each request's messages."""
        return ["\n".join(str(message["content"]) for message in request["body"]["messages"]) for request in self.requests]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append({"body": body, "headers": dict(self.headers.items()), "path": self.path})
                says = outer._script(body, number) if self.path in _ROUTES else ScriptedAnswer(status=404, raw=b"no such path")
                with contextlib.suppress(OSError):
                    self._answer(says)

            def _answer(self, says: ScriptedAnswer) -> None:
                if says.hangs:
                    outer._closing.wait()
                    self.close_connection = True
                    return
                content = says.content()
                self.send_response(says.status)
                for name, value in {"content-type": "application/json", "content-length": str(len(content)), **says.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if says.breaks_off else content)
                self.close_connection = self.close_connection or says.breaks_off

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _in_turn(answers: list[ScriptedAnswer]) -> Script:
    return lambda body, number: answers[min(number, len(answers) - 1)]
