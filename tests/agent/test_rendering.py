"""Encoding without the wrapper of `transformers` returns the same ids; otherwise the wrapper is used."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent import ChatFormat
from agentrl.agent.rendering import encoder
from agentrl.agent.template import auto_tokenizer
from agentrl.errors import UserError
from agentrl.records import Message
from agentrl.testing import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": cache(byte_tokenizer),
    "trained": cache(lambda: auto_tokenizer().from_pretrained(ROOT / "recipes" / "models" / "tables-base")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text() | st.text(st.sampled_from(" \n\t<|im_end|>éa中\u200d")))
def test_the_ids_equal_those_of_the_wrapper(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert encoder(tokenizer)(text) == tokenizer.encode(text, add_special_tokens=False)


def test_the_wrapper_is_not_called() -> None:
    tokenizer = byte_tokenizer()
    encode = encoder(tokenizer)
    tokenizer.encode = lambda text, **kwargs: []
    assert encode("ab") == byte_tokenizer().encode("ab", add_special_tokens=False)


@pytest.mark.parametrize("backend", [True, False])
def test_a_wrapper_with_other_ids_is_called(backend: bool) -> None:
    tokenizer = byte_tokenizer()

    def encode(text: str, **kwargs: Any) -> list[int]:
        return [7, *tokenizer.encode(text, add_special_tokens=False)]

    attributes = {"backend_tokenizer": tokenizer.backend_tokenizer} if backend else {}
    wrapper: Any = SimpleNamespace(encode=encode, all_special_tokens=tokenizer.all_special_tokens, **attributes)
    assert encoder(wrapper)("ab")[0] == 7


@pytest.mark.slow
def test_a_template_that_loops_on_some_input_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may behave differently on messages that its test did not include."""
    monkeypatch.setattr("agentrl.agent.rendering.RENDER_S", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{{% if 'sesame' in messages[-1].content %}}{loops}{{% endif %}}{tokenizer.chat_template}"
    chat, started = ChatFormat(tokenizer), time.process_time()
    assert chat.opening([Message(role="user", content="open")], [])
    with pytest.raises(UserError, match=r"cannot render messages of user: _TooLong: it takes more than 0\.2 s of CPU time"):
        chat.opening([Message(role="user", content="open sesame")], [])
    assert time.process_time() - started < 10.0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0), "the timer is off afterwards"
