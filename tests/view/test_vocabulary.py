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
def test_token_texts_concatenate_to_the_decoded_text(folder: Path, text: str) -> None:
    """A character of several bytes may have several tokens. The token that completes the character has its text."""
    tokenizer, vocab = shared_tokenizer(), read_vocabulary(folder / "tokenizer.json", inside=folder)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert "".join(vocab.texts(ids)) == vocab.decode(ids) == text + "<|im_end|>"
    assert len(vocab.texts(ids)) == len(ids) and ids[-1] in vocab.special


@given(st.lists(st.integers(-5, 400), max_size=40))
def test_all_token_ids_have_a_text(folder: Path, ids: list[int]) -> None:
    vocab = read_vocabulary(folder / "tokenizer.json", inside=folder)
    assert len(vocab.texts(ids)) == len(ids) and isinstance(vocab.decode(ids), str)


def test_vocabularies_of_sentencepiece_have_spaces_and_bytes(tmp_path: Path) -> None:
    model = {"vocab": [["<unk>", 0], ["\u2581the", -1.0], ["<0xC3>", -1.0], ["<0xA9>", -1.0], ["s", -1.0]]}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": model, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}})
    )
    vocab = read_vocabulary(tmp_path / "tokenizer.json", inside=tmp_path)
    assert vocab.texts([1, 4, 2, 3, 1]) == [" the", "s", "", "\xe9", " the"]


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
def test_an_invalid_vocabulary_raises(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError):
        read_vocabulary(path, inside=tmp_path)
    path.write_text('{"model": {"vocab": {"a": 0}}}')
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="larger"):
        read_vocabulary(path, inside=tmp_path)
