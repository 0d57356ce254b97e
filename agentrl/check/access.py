"""Checks what an agent can access: answers in its files, its prompt and its image, and tests that share a sandbox with the code under test.

The files of an image are copied to the host and searched there, so the correct answers never enter a sandbox.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.base.numbers import plural
from agentrl.check.report import Finding, Proof, join_examples, shorten, unique
from agentrl.check.verifiers import GoldAttempt, retry_sandbox_errors
from agentrl.errors import SandboxError, TaskError
from agentrl.protocols import SandboxBackend
from agentrl.records import SandboxSpec, Task
from agentrl.task.grading import GRADING_KEY, grading_of
from agentrl.task.leaks import Leak, find_leaks, hidden_truths

SHARED_SANDBOX_RISKS = {
    "pytest": "the code under test shares a process with the tests: it can read the expected values and change what is compared",
    "shell": "the code under test shares a sandbox with test.sh: it can read the expected values and write into the shell's memory",
    "harbor": "the code under test shares a sandbox with the verdict: it can write the reward file",
}
"""Maps each grading mode in which tests and code under test share a sandbox to the risk."""
PAGE_BYTES = 1 << 20
PAGES = 24
FILE_BYTES = 256 << 10  # maximum number of bytes that are searched in each file
PAGE_S = 60.0

# Prints a page of files as JSON, with the start of the next page. Skips files from Debian packages, and Python's package folders.
_PAGE = """
import base64, glob, json, os, sys
owned = set()
for path in glob.glob("/var/lib/dpkg/info/*.list"):
    with open(path, errors="replace") as file:
        owned.update(line.rstrip("\\n") for line in file)
skip = {"/proc", "/sys", "/dev", "/run", "/opt/agentrl", "/var/lib/dpkg", "/var/cache", "/var/log", "/usr/share/doc", "/usr/share/locale"}
if not owned:
    skip |= {"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/var"}
seen, size, files, big, more = 0, 0, {}, 0, None
def walk(top):
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(n for n in folders if os.path.join(folder, n) not in skip
                            and n not in ("__pycache__", "site-packages", "dist-packages"))
        yield from (os.path.join(folder, name) for name in sorted(names))
for path in walk("/"):
    merged = path[4:] if path.startswith("/usr/") else path
    if path in owned or merged in owned or path.endswith(".pyc") or os.path.islink(path) or not os.path.isfile(path):
        continue
    seen += 1
    if seen <= %d:
        continue
    try:
        with open(path, "rb") as file:
            data = file.read(%d)
        big += os.path.getsize(path) > len(data)
    except OSError:
        continue
    text = base64.b64encode(data).decode()
    if size + len(text) > %d:
        more = seen - 1
        break
    size += len(text) + len(path) + 8
    files[path] = text
print(json.dumps([files, more, big]))
"""


def prove_separation(tasks: Sequence[Task]) -> Proof:
    """Reports tasks as unsafe for training if their tests share a sandbox with the code under test. The scores of these tasks are still
    correct."""
    modes: dict[str, list[str]] = {}
    graded = 0
    for task in tasks:
        if GRADING_KEY not in task.data:
            continue
        try:
            mode = grading_of(task).mode
        except TaskError:  # the results of the cases report this
            continue
        graded += 1
        if mode in SHARED_SANDBOX_RISKS:
            modes.setdefault(mode, []).append(task.id)
    findings = [
        Finding(
            severity="unsafe",
            what=f'not for training: mode {mode} of {join_examples(names)}: {SHARED_SANDBOX_RISKS[mode]}; use verifier.mode = "judge"',
            tasks=tuple(names),
        )
        for mode, names in sorted(modes.items())
    ]
    return Proof(name="code under test runs apart from its tests", looked_at=plural(graded, "graded task"), findings=tuple(findings))


async def prove_unreadable(tasks: Sequence[Task], golden: Mapping[str, GoldAttempt], sandboxes: SandboxBackend) -> Proof:
    """Searches the files, the prompt and the image's files of each task with a sandbox for the task's truth. Raises `SandboxError` if the
    files of an image cannot be copied."""
    images: dict[tuple[str, str], ImageFiles] = {}
    in_task: dict[str, list[Leak]] = {}
    built_in: dict[str, list[Leak]] = {}
    searched = 0
    for task in tasks:
        if task.sandbox is None:
            continue
        searched += 1
        image = (task.sandbox.image, task.sandbox.runtime)
        if image not in images:
            images[image] = await retry_sandbox_errors(lambda spec=task.sandbox: image_files(spec, sandboxes))  # type: ignore[misc]
        printed = golden[task.id].episode.answer if task.id in golden else None
        wanted = hidden_truths(task, printed or "")
        prompt = {"its prompt": "\n".join(message.content for message in task.prompt).encode("utf-8", "replace")}
        in_task[task.id] = find_leaks(task.contents(), wanted) + [replace(leak, certain=False) for leak in find_leaks(prompt, wanted)]
        built_in[task.id] = find_leaks(images[image].files, wanted)
    return Proof(
        name="no answer is readable in what the agent is given",
        looked_at=f"files and prompts of {plural(searched, 'task')}, and "
        f"{plural(sum(len(copied.files) for copied in images.values()), 'file')} of {plural(len(images), 'image')}",
        findings=(*_leak_findings(in_task, "in the files or the prompt"), *_leak_findings(built_in, "in the image")),
        unproven=tuple(f"that no answer is in image {image}: {copied.problem}" for (image, _), copied in images.items() if copied.problem),
    )


def _leak_findings(leaks_of: Mapping[str, list[Leak]], where: str) -> list[Finding]:
    """Returns at most two findings about the leaks of all tasks (task id -> leaks): one about certain leaks, and one about all other
    leaks."""
    findings: list[Finding] = []
    for certain in (True, False):
        of_kind = {task: [leak for leak in leaks if leak.certain is certain] for task, leaks in leaks_of.items()}
        of_kind = {task: leaks for task, leaks in of_kind.items() if leaks}
        if not of_kind:
            continue
        texts = [
            f"{task}: {leak.path} {leak.how} {leak.truth.origin} {shorten(leak.truth.text, 40)!r}"
            for task, leaks in of_kind.items()
            for leak in leaks[:1]
        ]
        more = "" if certain else ", which is intended if the agent should look it up"
        text = f"the truth of {plural(len(of_kind), 'task')} is {where}{more} ({join_examples(unique(texts))})"
        findings.append(Finding(severity="failure" if certain else "note", what=text, tasks=tuple(of_kind)))
    return findings


@dataclass(slots=True, kw_only=True)
class ImageFiles:
    """The files copied from an image: path -> bytes. `problem` states why the search was incomplete; empty if it was complete."""

    files: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


async def image_files(spec: SandboxSpec, sandboxes: SandboxBackend) -> ImageFiles:
    """Returns the readable files in a fresh sandbox with this spec: the first `FILE_BYTES` of each, in at most `PAGES` pages,
    without files from Debian packages and Python's package folders. Raises `SandboxError` if the sandbox fails."""
    sandbox = await sandboxes.open(spec)
    copied, skip = ImageFiles(), 0
    try:
        for _ in range(PAGES):
            program = _PAGE % (skip, FILE_BYTES, PAGE_BYTES - (1 << 16))
            result = await sandbox.python(program, timeout_s=PAGE_S, output_bytes=PAGE_BYTES)
            page = _page(result.stdout) if result.ok and not result.truncated else None
            if page is None:
                copied.problem = f"its files cannot be listed: {(result.reason or result.stderr)[-200:] or 'invalid output'}"
                return copied
            files, more, big = page
            copied.files |= files
            if big:
                copied.problem = f"only the first {FILE_BYTES >> 10} KiB of larger files were searched"
            if more is None:
                return copied
            if more <= skip:
                raise SandboxError(f"sandbox {sandbox.id}: the listing of its files does not advance past number {skip}")
            skip = more
    finally:
        await sandbox.close()
    copied.problem = f"only the first {len(copied.files):,} files were searched"
    return copied


def _page(text: str) -> tuple[dict[str, bytes], int | None, bool] | None:
    try:
        files, more, big = json.loads(text)
        contents = {str(path): base64.b64decode(data, validate=True) for path, data in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error):
        return None
    return (contents, more, bool(big)) if more is None or isinstance(more, int) else None
