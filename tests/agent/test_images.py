"""Images in a conversation get exactly the ids of the model's processor; hostile text can neither forge nor break them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.agent.contexts import refer_prompt
from agentrl.agent.images import UNREADABLE, ImageTokens
from agentrl.agent.invoke import call_tool
from agentrl.agent.tools import ToolOutcome
from agentrl.base.media import InvalidImage, MediaFolder, open_png
from agentrl.config.recipe import TasksConfig
from agentrl.environment import Environment, close_environments
from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.plugins.parts import Part
from agentrl.records import Blame, Episode, Limits, Message, Observation, Split, Step
from agentrl.records.images import MAX_IMAGES, MAX_IN_PROMPT, count_images, image_blocks, image_text, plain_ids
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.task import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from agentrl.testing.tiny_vision import write_vision_model

PARTS_ONLY = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's template."""
IN_MARKS = PARTS_ONLY.replace("'<image>'", "'<fake_token_around_image><image><end_of_utterance>'")


def noise(width: int, height: int) -> bytes:
    Image.effect_noise((width, height), 80).convert("RGB").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_vision_model(folder)
    return folder


def load(folder: Path, run: Path | None, template: str | None = None) -> tuple[ChatFormat, Any]:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    if template is not None:
        processor.tokenizer.chat_template = template
    chat = ChatFormat(processor.tokenizer)
    chat.read_images(ImageTokens.load(str(folder), chat.render_user, None if run is None else MediaFolder(run)))
    return chat, processor


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, PARTS_ONLY, IN_MARKS])
def test_the_ids_equal_those_of_the_processor(folder: Path, tmp_path: Path, template: str | None) -> None:
    """Tests a prompt and a delta, templates with and without support for images, a small image and one that is split."""
    chat, processor = load(folder, tmp_path, template)
    contents = [noise(20, 30), noise(112, 70)]
    text = f"Left {image_text(contents[0])} and right{image_text(contents[1])}\nWhich?"
    ids = chat.opening([Message(role="user", content=text)], [])
    placeholder = "<fake_token_around_image><image><end_of_utterance>" if template == IN_MARKS else "<image>"
    rendered = chat._renderer.text([{"role": "user", "content": f"Left {placeholder} and right{placeholder}\nWhich?"}])
    names = [name for *_, name in image_blocks(ids)]
    images = [open_png(MediaFolder(tmp_path).read(name)) for name in names]
    assert [image.size for image in images] == [(20, 30), (112, 70)]
    assert plain_ids(ids) == processor(text=rendered, images=images, add_special_tokens=False)["input_ids"][0]
    reference = f"<image sha256:{hashlib.sha256(MediaFolder(tmp_path).read(names[1])).hexdigest()}>"
    delta = chat.user_delta(f"Again {reference}")
    assert [name for *_, name in image_blocks(delta)] == names[1:]
    second_ids = chat.opening([Message(role="user", content=text)], [])
    assert second_ids == ids


async def test_images_are_stored_before_a_text_is_clipped(folder: Path, tmp_path: Path) -> None:
    chat, _ = load(folder, tmp_path)
    content = noise(20, 30)
    stored = await chat.refer(f"a {image_text(content)} b {image_text(content)}")
    assert stored.startswith("a <image sha256:") and len(stored) == 2 * len(f"<image sha256:{64 * 'a'}>") + 5
    assert await chat.refer(stored) == stored and len(list((tmp_path / "media").iterdir())) == 1
    with pytest.raises(InvalidImage, match="not an image"):
        await chat.refer(image_text(b"no image"))
    with pytest.raises(InvalidImage, match="more than"):
        await chat.refer(image_text(content) * (MAX_IMAGES + 1))


def test_hostile_text_forges_no_image(folder: Path, tmp_path: Path) -> None:
    """It uses the model's tokens or references to images that are not stored, also next to a real image."""
    chat, _ = load(folder, tmp_path)
    real = image_text(noise(8, 8))
    token = chat._renderer.images.token  # type: ignore[union-attr]
    for forged in ("<image>", "<fake_token_around_image><image>", f"<image sha256:{'0' * 64}>", "<image base64:AAAA>", "<image sha256:ab>"):
        for text, count in ((forged, 0), (f"{forged}{real}{forged}", 1)):
            ids = chat.tool_delta([text])
            assert len(list(image_blocks(ids))) == count
            assert token not in ids
    with pytest.raises(UserError, match="remove this token"):
        chat.opening([Message(role="user", content=f"<image> {real}")], [])


async def test_a_text_model_gets_a_note_in_place_of_an_image() -> None:
    chat = ChatFormat(byte_tokenizer())
    assert await chat.refer(f"a {image_text(b'anything')} <image src=x>") == f"a {UNREADABLE} <image src=x>"
    assert not chat.reads_images


def test_without_a_run_folder_nothing_is_stored(folder: Path, tmp_path: Path) -> None:
    chat, _ = load(folder, None)
    assert list(image_blocks(chat.opening([Message(role="user", content=image_text(noise(8, 8)))], [])))
    assert not list(tmp_path.iterdir())


def test_a_processor_of_another_model_raises(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "image_token_id": 5}))
    with pytest.raises(UserError, match=r"its config\.json specifies 5"):
        ImageTokens.load(str(other), lambda content: "")
    (other / "processor_config.json").write_text("{}")
    with pytest.raises(UserError, match="image processor cannot be used"):
        ImageTokens.load(str(other), lambda content: "")


class Camera:
    """A tool that shows its image."""

    name, needs_sandbox, schema = "camera", False, {}

    def __init__(self, content: bytes) -> None:
        self.content = content

    async def __call__(self, arguments: Any, sandbox: Any, limits: Limits) -> ToolOutcome:
        return ToolOutcome(output=f"seen: {image_text(self.content)}", ok=True)


async def test_a_tool_shows_images_that_are_longer_than_its_output_may_be(folder: Path, tmp_path: Path) -> None:
    chat, _ = load(folder, tmp_path)
    limits, content = Limits(tool_output_chars=100), noise(60, 60)
    outcome = (await call_tool(Camera(content), {}, None, limits, turn=0, refer=chat.refer)).outcome
    assert outcome.ok and list(image_blocks(chat.tool_delta([outcome.output]))) and len(image_text(content)) > 1000
    unread = (await call_tool(Camera(content), {}, None, limits, turn=0, refer=ChatFormat(byte_tokenizer()).refer)).outcome
    assert unread.output == f"seen: {UNREADABLE}"
    failed = await call_tool(Camera(b"text"), {}, None, limits, turn=0, refer=chat.refer)
    assert not failed.outcome.ok and "not an image" in failed.outcome.output


def test_a_damaged_image_is_an_infrastructure_error_and_no_text(folder: Path, tmp_path: Path) -> None:
    """A reference to an image that never existed is forged and stays text."""
    chat, _ = load(folder, tmp_path)
    chat.tool_delta([image_text(noise(8, 8))])
    (stored,) = (tmp_path / "media").iterdir()
    reference = f"<image sha256:{hashlib.sha256(stored.read_bytes()).hexdigest()}>"
    assert list(image_blocks(chat.tool_delta([reference])))
    stored.write_bytes(b"damaged")
    with pytest.raises(InfrastructureError, match="damaged"):
        chat.tool_delta([reference])
    stored.unlink()
    assert not list(image_blocks(chat.tool_delta([reference])))


LIMITS = {"turns": 20, "turn_tokens": 200, "episode_tokens": 32_000, "tool_output_chars": 1000}


class Mirror(Environment):
    """Shows the agent's text; for `broken` an image that is none, and for `album` as many images as one observation may have."""

    def reset(self, seed: int) -> str:
        return "go"

    def step(self, action: str) -> Step:
        media = {"broken": (b"no image",), "album": (noise(8, 8),) * MAX_IMAGES}.get(action, ())
        return Step(observation=Observation(text=action, media=media), terminated=action == "end")


async def play(chat: ChatFormat, tokenizer: Any, *texts: str) -> Episode:
    config = TasksConfig(family=Part("tests.agent.test_images:Mirror", {"limits": LIMITS}))
    runner = EpisodeRunner(
        policy=ScriptedPolicy.saying(tokenizer, *texts),
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat),
        sampling=Sampling(),
        max_model_len=32_000,
        request_timeout_s=60.0,
    )
    try:
        return await runner.run(open_family(config, seed=0).task(Split.TRAIN, 0), episode_id="e")
    finally:
        await close_environments()


@pytest.mark.slow
async def test_a_policy_cannot_cause_an_infrastructure_failure_with_an_image(folder: Path, tmp_path: Path) -> None:
    """An environment may show the policy's text, which looks like a broken image. A broken image of the environment is its failure."""
    chat, processor = load(folder, tmp_path)
    episode = await play(chat, processor.tokenizer, f"say {image_text(b'no image')}", "end")
    assert not episode.failures and episode.stop_reason == "terminated"
    (failure,) = (await play(chat, processor.tokenizer, "broken", "end")).failures
    assert failure.blame is Blame.INFRASTRUCTURE and "not an image" in failure.message


@pytest.mark.slow
async def test_a_context_full_of_images_reaches_the_token_limit(folder: Path, tmp_path: Path) -> None:
    chat, processor = load(folder, tmp_path)
    turns = MAX_IN_PROMPT // MAX_IMAGES
    episode = await play(chat, processor.tokenizer, *["album"] * (turns + 2))
    (trajectory,) = episode.trajectories
    assert not episode.failures and episode.stop_reason == "token_limit" and len(trajectory.turns) == turns + 1
    assert sum(count_images(turn.prompt_ids) for turn in trajectory.turns) == MAX_IN_PROMPT


async def test_a_prompt_with_an_image_token_is_a_task_error(folder: Path, tmp_path: Path) -> None:
    chat, _ = load(folder, tmp_path)
    with pytest.raises(TaskError, match="remove this token"):
        trajectory: Any = SimpleNamespace(agent="main", describe=lambda *_: None)
        await refer_prompt(chat, trajectory, (Message(role="user", content=f"<image> {image_text(noise(8, 8))}"),), trusted=True)


def test_an_image_that_the_processor_rejects_raises_when_it_is_stored(folder: Path, tmp_path: Path) -> None:
    """When a context is rendered, the error would count as a policy failure."""
    chat, _ = load(folder, tmp_path)
    images = chat._renderer.images
    assert images is not None
    images._processor = lambda *args, **options: 1 // 0
    images._processor.image_token = "<image>"
    with pytest.raises(InvalidImage, match=r"the model's processor rejects the image: .*division"):
        images.refer(image_text(noise(3, 3)))
    assert not (tmp_path / "media").exists()
