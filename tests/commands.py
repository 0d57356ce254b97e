"""The command line as a function, because a separate process takes half a second."""

from __future__ import annotations

import contextlib
import io
import subprocess

from agentrl import cli


def agentrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns the output and exit code of `python -m agentrl ARGUMENTS`, run in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
