"""First code of the server process: ties its life to the driver's, trims its start, then hands over to vLLM's own server.

    python -m agentrl.serving.launch --driver-pid 4711 [--cpu-threads 2] -- <vLLM api_server arguments>

On CPU vLLM starts the engine as a freshly spawned interpreter that imports everything a second time (about 13 CPU seconds of a
40-second start). Here the engine is forked instead, as vLLM itself does on GPU: safe because this process runs single-threaded
torch until then, so no OpenMP pool exists that a fork could break.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Imported by vLLM and transformers where installed, never used by a text server on CPU: a fifth of the start, and joblib (by
# way of sklearn) leaves a semaphore in /dev/shm. triton has no CPU backend; vLLM would import it only to set it aside.
_UNUSED_ON_CPU = ("cv2", "pandas", "pyarrow", "scipy", "sklearn", "triton")


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however the parent ends (Linux `prctl(2)`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver-pid", type=int, required=True)
    parser.add_argument("--cpu-threads", type=int, default=0, help="fork the engine and give it this many threads (CPU only)")
    parser.add_argument("arguments", nargs="+", help="for vLLM's api_server")
    options = parser.parse_args()

    die_with_parent(options.driver_pid)
    api_server = os.getpid()
    # A fork forgets the signal that was asked for, so every forked child asks again.
    os.register_at_fork(after_in_child=lambda: die_with_parent(api_server) if os.getppid() == api_server else None)
    if options.cpu_threads:
        _trim_cpu_start(options.cpu_threads)
    sys.argv = ["api_server", *options.arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _trim_cpu_start(threads: int) -> None:
    for name in _UNUSED_ON_CPU:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # an import of it then says "not installed"
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # Looking up the model class takes a whole further interpreter the first time, to keep CUDA out of this process.
    registry._run_in_subprocess = lambda inspect: inspect()

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
