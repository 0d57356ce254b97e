"""Starts a server process: sets its parent death signal, shortens its startup, and runs vLLM's server.

    python -m agentrl.serving.launch --driver-pid 4711 [--cpu-threads 2] -- <vLLM api_server arguments>

On CPU, vLLM starts the engine in a new interpreter, whose imports take 13 of the 40 CPU seconds of the startup. Here, the engine is forked
instead, as vLLM does on GPU. The fork is safe because until then, this process runs torch with one thread, without an OpenMP pool.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys

from agentrl.base.processes import die_with_parent, freeze_imports
from agentrl.serving import access

_SERVER = "vllm.entrypoints.openai.api_server"

# vLLM and transformers import these if they are installed, but a text server on CPU never uses them. The imports take a fifth of the
# start, and joblib (through sklearn) would leave a semaphore in /dev/shm.
_UNUSED_ON_CPU = ("cv2", "pandas", "pyarrow", "scipy", "sklearn", "triton")


def main() -> None:
    """Runs vLLM's server with this process's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver-pid", type=int, required=True)
    parser.add_argument("--cpu-threads", type=int, default=0, help="fork the engine with this many threads (CPU only)")
    parser.add_argument("arguments", nargs="+", help="arguments of vLLM's api_server")
    options = parser.parse_args()

    die_with_parent(options.driver_pid)
    access.load_key()
    api_server = os.getpid()
    # A fork does not inherit the parent death signal, so each child sets it again.
    os.register_at_fork(after_in_child=lambda: die_with_parent(api_server) if os.getppid() == api_server else None)
    with freeze_imports():
        if options.cpu_threads:
            _trim_cpu_start(options.cpu_threads)
        importlib.import_module(_SERVER)
        del sys.modules[_SERVER]  # run below
    sys.argv = ["api_server", *options.arguments]
    runpy.run_module(_SERVER, run_name="__main__")


def _trim_cpu_start(threads: int) -> None:
    for name in _UNUSED_ON_CPU:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # its import then fails as if it were not installed
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda inspect: inspect()  # vLLM uses a separate interpreter only to keep CUDA out of this one
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(threads))
    platform = type(current_platform)
    update = platform.check_and_update_config.__func__

    def update_and_fork(cls: type, vllm_config: object) -> None:
        update(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(update_and_fork)


if __name__ == "__main__":
    main()
