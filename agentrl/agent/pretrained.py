"""Loads the tokenizer of a model folder."""

from __future__ import annotations

import sys
from typing import Any


def auto_tokenizer() -> Any:
    """Returns transformers' `AutoTokenizer`.

    Its import loads `GenerationMixin`, which imports compilers, scikit-learn and pandas: three of four seconds of CPU time. Only models
    with custom code need that class, and none are loaded here, so an empty class replaces it during the import.
    """
    import transformers.generation

    lazy: Any = transformers.generation
    if "transformers.models.auto.auto_factory" in sys.modules or "GenerationMixin" in vars(lazy):
        from transformers import AutoTokenizer
    else:
        lazy.GenerationMixin = type("GenerationMixin", (), {})
        try:
            from transformers import AutoTokenizer
        finally:
            del lazy.GenerationMixin
    return AutoTokenizer
