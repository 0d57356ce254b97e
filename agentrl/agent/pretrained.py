"""Where tokenizers of model folders come from."""

from __future__ import annotations

import sys
from typing import Any


def auto_tokenizer() -> Any:
    """transformers' `AutoTokenizer`; heavy, so only where a tokenizer is really needed.

    Its module shares one with `AutoModel`, which imports all that generates text (compilers, scikit-learn, pandas): three of four seconds
    of CPU time. That is for the base class that a model gets which brings its own code. None does here, so while the module is imported
    an empty class stands in for it.
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
