"""Imports models: a Hugging Face folder, a GGUF file, or one in an installed package becomes a folder that can be served and trained."""

from agentrl.model.importing import Imported, import_model

__all__ = ["Imported", "import_model"]
