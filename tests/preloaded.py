"""What tests/forking.py has its processes forked with: templates and tokenizers are tried in them."""

import transformers.utils.chat_template_utils

from agentrl.agent.template import auto_tokenizer

__all__ = ["transformers"]
auto_tokenizer()
