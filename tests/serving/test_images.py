"""Each image of a prompt is one placeholder in a request, and the server's expansion must equal the prompt's ids."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from agentrl.base.media import MediaFolder
from agentrl.errors import InfrastructureError, RequestRefused, ServingError
from agentrl.records.images import MAX_IN_PROMPT, image_ids, plain_ids
from agentrl.serving.images import PromptImages

TOKEN = 9
BLOCK = [8, TOKEN, TOKEN, 8]


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    media = MediaFolder(tmp_path)
    return [media.put(content) for content in (b"one", b"two")]


def test_each_image_is_one_placeholder_with_its_bytes(tmp_path: Path, names: list[str]) -> None:
    """Also equal images in a row. The hash under which vLLM caches features changes with the weights."""
    prompt = (1, *image_ids(BLOCK, names[0]), *image_ids(BLOCK, names[0]), 2, *image_ids(BLOCK[1:3], names[1]))
    fields = PromptImages(tmp_path, TOKEN).fields(prompt, "salt")
    assert fields["token_ids"] == [1, TOKEN, TOKEN, 2, TOKEN] and fields["return_token_ids"]
    urls = [part["url"].partition(",") for part in fields["content_parts"]]
    assert [base64.b64decode(data) for *_, data in urls] == [b"one", b"one", b"two"]
    assert {start for start, *_ in urls} == {"data:image/png;base64"}
    assert [part["uuid"] for part in fields["content_parts"]] == [f"salt-{sha256[:10]}" for sha256 in (names[0], names[0], names[1])]


def test_a_text_prompt_is_unchanged(tmp_path: Path) -> None:
    images = PromptImages(tmp_path, TOKEN)
    assert images.fields((1, 2, 3), "salt") == {"token_ids": [1, 2, 3]}
    images.check({}, (1, 2, 3))


def test_a_sampled_image_token_and_too_many_images_raise(tmp_path: Path, names: list[str]) -> None:
    """The policy can sample both, so an error of the server would be provoked by the policy."""
    images, block = PromptImages(tmp_path, TOKEN), image_ids(BLOCK, names[0])
    for prompt in ((TOKEN, *block), (*block, 1, TOKEN), (TOKEN,)):
        with pytest.raises(RequestRefused, match="outside of an image"):
            images.fields(prompt, "salt")
    assert images.fields(block * MAX_IN_PROMPT, "salt")
    with pytest.raises(RequestRefused, match="at most"):
        images.fields(block * (MAX_IN_PROMPT + 1), "salt")


def test_another_expansion_of_the_server_raises(tmp_path: Path, names: list[str]) -> None:
    images, prompt = PromptImages(tmp_path, TOKEN), (1, *image_ids(BLOCK, names[0]), 2)
    images.check({"prompt_token_ids": plain_ids(prompt)}, prompt)
    for answer in ({"prompt_token_ids": [1, 8, TOKEN, 8, 2]}, {"prompt_token_ids": None}, {}, None, [1]):
        with pytest.raises(ServingError, match="different tokens"):
            images.check(answer, prompt)


def test_a_missing_image_is_an_infrastructure_fault(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="missing"):
        PromptImages(tmp_path, TOKEN).fields(image_ids(BLOCK, "ab" * 32), "salt")
