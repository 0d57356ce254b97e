"""What the drivers share. A driver runs in the environment of its program, as `python3 driver.py PROTOCOL whole|streamed`, with the task on
its standard input.
"""

import os
import subprocess
import sys

PROTOCOL, STREAM = sys.argv[1], sys.argv[2] == "streamed"
PROMPT = sys.stdin.read()
MODEL = os.environ["AGENTRL_MODEL"]


def shell(command: str) -> str:
    """Runs a shell command and returns what it prints.

    Args:
        command: The command.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def report(file: str, passed: bool) -> None:
    """Prints the structured answer."""
    print(f"RESULT {file} {passed}")
