"""The forms in which models write tool calls. Each form has a reader that converts the text of a turn to calls or errors.

`FORMS` maps names to forms. The probe of a chat template tries the forms in this order.
"""

from collections.abc import Mapping

from agentrl.agent.forms.base import CallForm, Frame, Reading, Schemas
from agentrl.agent.forms.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from agentrl.agent.forms.harmony import HARMONY
from agentrl.agent.forms.json_calls import HERMES, LLAMA3
from agentrl.agent.forms.mistral import MISTRAL
from agentrl.agent.forms.pythonic import PYTHONIC
from agentrl.agent.forms.tagged import GLM45, QWEN3_CODER
from agentrl.errors import UserError

FORMS: Mapping[str, CallForm] = {
    form.name: form for form in (HERMES, QWEN3_CODER, GLM45, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, LLAMA3, PYTHONIC)
}


def call_form(name: str) -> CallForm:
    """Returns the form with this name. Raises `UserError` if no form has this name."""
    if name not in FORMS:
        raise UserError(f"policy.tool_format={name}: unknown form of tool calls", fix=f"use one of {', '.join(FORMS)}")
    return FORMS[name]


__all__ = ["FORMS", "CallForm", "Frame", "Reading", "Schemas", "call_form"]
