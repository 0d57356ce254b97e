from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import sys
import transformers.generation
from agentrl.agent.chat import load_chat

print(load_chat("recipes/models/tables-base").stop_token_ids)
assert "GenerationMixin" not in vars(transformers.generation), "what stands in is gone"
print([name for name in ("sklearn", "pandas", "torch._inductor", "transformers.generation.utils") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_tokenizer_is_loaded_without_the_generation_code() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.splitlines()[1] == "[]", done.stdout + done.stderr
