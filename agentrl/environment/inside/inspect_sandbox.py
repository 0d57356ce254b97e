"""The sandbox environment `agentrl`, with which inspect's tools run in the episode's sandbox. Runs in a host (`inspect_host.py`).

Files are read and written by programs in the sandbox, so the permissions of the sandbox's user apply, and absolute paths work.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Callable
from typing import Any, ClassVar

from host_channel import Caller
from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment, SandboxEnvironmentLimits, sandboxenv
from inspect_ai.util._sandbox.environment import SandboxUserUnsupportedError

TIMEOUT_S = 3600.0
"""Timeout, in seconds, for a program for which no timeout is set. The episode's time limit also applies."""
FILE_S = 60.0
CHUNK = 6 << 20
"""Number of bytes that are read from a file at once."""
_WRITE = 'd=$(dirname -- "$1"); [ -d "$1" ] && exit 81; mkdir -p -- "$d" || exit 83; (: >> "$1") 2>/dev/null || exit 83; cat > "$1"'
_SIZE = '[ -d "$1" ] && exit 81; [ -e "$1" ] || exit 82; [ -r "$1" ] || exit 83; wc -c < "$1"'
_READ = 'tail -c "+$2" -- "$1" | head -c "$3" | base64'
_CWD = 'cd -- "$1" || exit 1; shift; exec "$@"'
_ERRORS: dict[int | None, tuple[type[OSError], str]] = {
    81: (IsADirectoryError, "Is a directory"),
    82: (FileNotFoundError, "No such file or directory"),
    83: (PermissionError, "Permission denied"),
}
_SIGNALLED = 128


@sandboxenv(name="agentrl")
class EpisodeSandbox(SandboxEnvironment):
    """The sandbox of one episode."""

    caller_of_sample: ClassVar[Callable[[], Caller]]
    """Returns the `Caller` of the sample that is running."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller = caller

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Returns the sandbox of the sample. The sandbox is opened when it is first used."""
        return {"default": cls(cls.caller_of_sample())}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool) -> None:
        """Does nothing: agentrl closes the sandbox with its episode."""

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a program. Raises the same errors as `SandboxEnvironment.exec`. `user` must be None, because a sandbox has only one user."""
        if user is not None:
            raise SandboxUserUnsupportedError(f"agentrl's sandboxes have one user, so no program can run as {user!r}")
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        argv = cmd if cwd is None else ["sh", "-c", _CWD, "sh", cwd, *cmd]
        result = await self._run(argv, input, timeout_s=float(timeout or TIMEOUT_S), output_bytes=2 * limit, env=env)
        for name in ("stdout", "stderr"):
            if len(result[name].encode()) > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result[name][:limit])
        if result["exit_code"] in (126, 127) and "ermission denied" in result["stderr"]:
            raise PermissionError(f"{cmd[0]}: Permission denied")
        code = result["exit_code"]
        if code is None:
            code = _SIGNALLED + 9  # it was killed, for example because of its memory use
        elif code < 0:
            code = _SIGNALLED - code
        return ExecResult(success=code == 0, returncode=code, stdout=result["stdout"], stderr=result["stderr"])

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file and creates its folders. Raises `OSError` if the file cannot be written."""
        result = await self._run(["sh", "-c", _WRITE, "sh", _plain(file)], contents)
        self._check(result, file)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Returns the content of a file. Raises `OSError` if the file cannot be read, `OutputLimitExceededError` if it is too large, and
        `UnicodeDecodeError` if `text` is set and the file is not UTF-8."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        if len(file) > 4000 or any(len(name) > 255 for name in file.split("/")):
            raise FileNotFoundError(2, "No such file or directory", file)
        size = int(self._check(await self._run(["sh", "-c", _SIZE, "sh", _plain(file)]), file))
        if size > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        data = b""
        while len(data) < size:
            argv = ["sh", "-c", _READ, "sh", _plain(file), str(len(data) + 1), str(CHUNK)]
            piece = base64.b64decode(self._check(await self._run(argv, output_bytes=4 * CHUNK), file))
            if not piece:
                break
            data += piece
        return data.decode("utf-8") if text else data

    async def _run(
        self,
        argv: list[str],
        stdin: str | bytes | None = None,
        *,
        timeout_s: float = FILE_S,
        output_bytes: int = 1 << 16,
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        result: dict[str, Any] = await self._caller.request(
            "exec", argv=argv, stdin=base64.b64encode(data).decode(), timeout_s=timeout_s, output_bytes=output_bytes, env=env
        )
        if result["reason"] == "timeout":
            raise TimeoutError(f"the program did not exit within {timeout_s:g} s")
        return result

    @staticmethod
    def _check(result: dict[str, Any], file: str) -> str:
        """Returns the output of a program that reads or writes a file. Raises the `OSError` that Python would raise for the file."""
        code = result["exit_code"]
        if code == 0:
            return str(result["stdout"])
        kind, text = _ERRORS.get(code, (OSError, (result["stderr"] or result["reason"] or f"status {code}").strip()[:500]))
        raise kind(5 if kind is OSError else 1, text, file)


def _plain(file: str) -> str:
    """Returns the path in a form that no program interprets as an option."""
    return file if posixpath.isabs(file) else f"./{file}"
