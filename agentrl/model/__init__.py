"""Importing models: a Hugging Face folder, a GGUF file, or one in an installed package becomes a folder that is served and trained exactly.

`import_model` does it; `agentrl.model.source` finds the files, `agentrl.model.gguf` reads a GGUF's header within bounds.
"""

from agentrl.model.importing import Imported, import_model

__all__ = ["Imported", "import_model"]
