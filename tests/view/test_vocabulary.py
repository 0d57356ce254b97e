from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.view import vocabulary
from agentrl.view.vocabulary import read_vocabulary
from tests.chats import shared_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shared_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@given(st.text(max_size=40))
def test_texts_add_up_to_what_the_tokenizer_decodes(folder: Path, text: str) -> None:
    """Characters of several bytes are split into several tokens here: a token has its text once the character is complete."""
    tokenizer, ours = shared_tokenizer(), read_vocabulary(folder / "tokenizer.json", inside=folder)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert "".join(ours.texts(ids)) == ours.decode(ids) == text + "<|im_end|>"
    assert len(ours.texts(ids)) == len(ids) and ids[-1] in ours.special


@given(st.lists(st.integers(-5, 400), max_size=40))
def test_any_ids_have_a_text(folder: Path, ids: list[int]) -> None:
    ours = read_vocabulary(folder / "tokenizer.json", inside=folder)
    assert len(ours.texts(ids)) == len(ids) and isinstance(ours.decode(ids), str)


def test_vocabularies_of_sentencepiece_have_spaces_and_bytes(tmp_path: Path) -> None:
    model = {"vocab": [["<unk>", 0], ["\u2581the", -1.0], ["<0xC3>", -1.0], ["<0xA9>", -1.0], ["s", -1.0]]}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": model, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}})
    )
    ours = read_vocabulary(tmp_path / "tokenizer.json", inside=tmp_path)
    assert ours.texts([1, 4, 2, 3, 1]) == [" the", "s", "", "\xe9", " the"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"model": {"vocab": 5}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": 99999999999}}}',
        "[" * 99999,
        '{"model": {"vocab": {}}, "added_tokens": [1]}',
    ],
)
def test_what_is_no_vocabulary_is_an_error(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError):
        read_vocabulary(path, inside=tmp_path)
    path.write_text('{"model": {"vocab": {"a": 0}}}')
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="larger"):
        read_vocabulary(path, inside=tmp_path)
