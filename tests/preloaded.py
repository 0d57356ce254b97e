"""Modules that tests/forking.py preloads into its fork server, for processes that try templates and tokenizers."""

import transformers.utils.chat_template_utils

from agentrl.agent.template import auto_tokenizer

__all__ = ["transformers"]
auto_tokenizer()
