"""Imports models: converts a Hugging Face folder or a GGUF file, which may be in an installed package, to a folder for serving and
training."""

from agentrl.model.importing import Imported, import_model

__all__ = ["Imported", "import_model"]
