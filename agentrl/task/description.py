"""The contents of a `task.toml`: Harbor's keys (see `agentrl.task.harbor`) and agentrl's keys. Any other key is an error.

version = "1.0"
outputs = ["report.json"]         # agentrl's key: the files to grade, as patterns of agentrl.task.outputs
[metadata]                        # free-form; evaluations are grouped by `category`
[agent]                           # limits of an episode
[environment]                     # its sandbox
[verifier]                        # how it is graded
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentrl.base import untrusted_files
from agentrl.records import Limits, SandboxSpec, Split, destinations
from agentrl.records.paths import pattern_error
from agentrl.task import harbor
from agentrl.task.grading import MAX_TEST_SECONDS, GradingRun, Mode
from agentrl.task.outputs import WHOLE_DIRECTORY

M = TypeVar("M", bound=BaseModel)

_LIMITS, _SPEC = Limits(), SandboxSpec(image="-")
_MAX_SECONDS = 24 * 3600.0


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)


class AgentSection(_Table):
    """Limits of an episode."""

    timeout_sec: float = Field(_LIMITS.wall_s, gt=0, le=_MAX_SECONDS)
    """Wall time of the episode."""
    turns: int = Field(8, ge=1)
    """Model turns."""
    turn_tokens: int = Field(512, ge=1)
    """Completion tokens of one turn."""
    episode_tokens: int = Field(8192, ge=1)
    """Prompt and completion tokens of the episode; also limited by policy.max_model_len."""
    tool_timeout_sec: float = Field(_LIMITS.tool_timeout_s, gt=0, le=_MAX_SECONDS)
    """Time of one tool call."""
    tool_output_chars: int = Field(_LIMITS.tool_output_chars, ge=1)
    """Maximum length of one call's output for the agent, in characters."""
    tool_calls: int | None = Field(None, ge=1)
    """Tool calls of the episode, except `submit`."""
    all_tokens: int | None = Field(None, ge=1)
    """Tokens of all contexts of the episode together, if it has several."""
    thinking_tokens: int | None = Field(None, ge=1)
    """Thinking tokens of one turn, after which thinking is stopped. Must be less than turn_tokens."""

    @model_validator(mode="after")
    def _answers_fit(self) -> AgentSection:
        if self.thinking_tokens is not None and self.thinking_tokens >= self.turn_tokens:
            raise ValueError(f"thinking_tokens leaves no room for an answer: use less than turn_tokens={self.turn_tokens}")
        return self


class EnvironmentSection(_Table):
    """Settings of the sandbox. Programs in the sandbox can reach only the hosts in `network`."""

    network: tuple[str, ...] = Field((), strict=False)
    """Hosts that programs may reach, such as "pypi.org:443", also during grading."""
    docker_image: str = ""
    """Harbor's name of a prebuilt image; ignored, because the image is built from the Dockerfile."""
    build_timeout_sec: float = Field(1800.0, gt=0, le=_MAX_SECONDS)
    """Deadline for building the image in `agentrl check`."""
    cpus: float = Field(_SPEC.cpus, gt=0, le=1024)
    """CPU time, in cores."""
    memory_mb: int = Field(_SPEC.memory_mb, ge=32)
    """Memory of all programs together."""
    storage_mb: int = Field(_SPEC.disk_mb, ge=1)
    """Size of the working directory, and of /tmp. It counts as memory."""
    processes: int = Field(_SPEC.processes, ge=2)
    """Concurrent processes and threads."""
    open_files: int = Field(_SPEC.open_files, ge=16)
    """Open files per program."""
    runtime: str = ""
    """Container runtime, such as runsc."""

    @field_validator("network")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        destinations.parse_destinations(value)
        return value


class VerifierSection(_Table):
    """How the outputs are graded."""

    timeout_sec: float = Field(60.0, gt=0, le=MAX_TEST_SECONDS)
    """Time limit for the tests."""
    mode: Mode | None = None
    """judge, pytest, shell or harbor. Default: judge without tests/test.sh; harbor if the tests mention /logs/verifier; else shell."""


class TaskDescription(_Table):
    """One `task.toml`."""

    version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.0"
    """Version of the format; Harbor's schema_version."""
    outputs: tuple[str, ...] | None = Field(None, strict=False, min_length=1, max_length=64)
    """Patterns of the files that are graded. Default in mode harbor: every change of the agent in the working directory."""
    tools: tuple[str, ...] = Field(("python", "submit"), strict=False, min_length=1)
    """Tools that the agent may call."""
    split: Split | None = Field(None, strict=False)
    """train, heldout or heldout_real. Default: drawn with the family's seed."""
    metadata: dict[str, Any] = {}
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    verifier: VerifierSection = VerifierSection()

    @model_validator(mode="before")
    @classmethod
    def _harbor(cls, value: Any) -> Any:
        return harbor.translate_keys(value) if isinstance(value, dict) else value

    @field_validator("outputs")
    @classmethod
    def _patterns(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in value or ():
            if pattern == WHOLE_DIRECTORY:
                raise ValueError(f"{pattern!r} is the default of mode harbor: remove outputs")
            if wrong := pattern_error(pattern):
                raise ValueError(f"{pattern!r} {wrong}")
        return value

    def limits(self) -> Limits:
        """Returns the limits of an episode."""
        agent = self.agent
        return Limits(
            turns=agent.turns,
            turn_tokens=agent.turn_tokens,
            episode_tokens=agent.episode_tokens,
            tool_timeout_s=agent.tool_timeout_sec,
            tool_output_chars=agent.tool_output_chars,
            tool_calls=agent.tool_calls,
            all_tokens=agent.all_tokens,
            thinking_tokens=agent.thinking_tokens,
            wall_s=agent.timeout_sec,
        )

    def sandbox(self, image: str) -> SandboxSpec:
        """Returns the spec of the sandbox with this image."""
        environment = self.environment
        return SandboxSpec(
            image=image,
            memory_mb=environment.memory_mb,
            processes=environment.processes,
            cpus=environment.cpus,
            disk_mb=environment.storage_mb,
            open_files=environment.open_files,
            runtime=environment.runtime,
            network=environment.network,
        )


class RunsFile(BaseModel):
    """One `runs.toml`: `[[run]]` tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: tuple[GradingRun, ...] = Field(min_length=1)


def parse_toml(kind: type[M], text: str) -> M:
    """Parses a model from TOML. Raises `ValueError` with one line for each invalid key: the key's name, the problem, the allowed values."""
    try:
        return kind.model_validate(untrusted_files.loads(text))
    except ValidationError as error:
        raise ValueError("\n".join(_line(kind, item) for item in error.errors())) from None


def _line(kind: type[BaseModel], item: Any) -> str:
    key = ".".join(map(str, item["loc"])) or "task.toml"
    if item["type"] == harbor.UNSUPPORTED_KEY:
        return str(item["msg"])
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key; known here: {', '.join(sorted(_table(kind, item['loc'][:-1]).model_fields))}"
    if item["type"] == "missing":
        return f"{key}: is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (got {item['input']!r})" if not isinstance(item["input"], dict) else f"{key}: {message}"


def _table(kind: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    for part in location:
        if isinstance(part, str):
            annotation = kind.model_fields[part].annotation
            inner = [candidate for candidate in (annotation, *getattr(annotation, "__args__", ())) if isinstance(candidate, type)]
            kind = next((candidate for candidate in inner if issubclass(candidate, BaseModel)), kind)
    return kind
