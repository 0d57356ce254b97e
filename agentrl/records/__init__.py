"""The data types of agentrl: frozen records that are passed between the stages, one type per file. Uses only the standard library.

A record checks lengths and ranges when it is created. `agentrl.records.codec` converts records to JSON and back.
"""

from agentrl.records.batch import Batch, Sample
from agentrl.records.chat import Message, ToolCall, ToolResult
from agentrl.records.environment import EnvironmentSpec, Observation, RoleStep, Step
from agentrl.records.episode import MAX_AGENT_STATE_CHARS, OUTPUT_BYTES, OUTPUT_FILES, REMOVED_FILES, Episode, EpisodeState, Memo
from agentrl.records.failure import Blame, Failure
from agentrl.records.group import Cancelled, Group, ScoredEpisode, sampled_index, sampled_tokens
from agentrl.records.late_score import LateScore, PendingPart, PendingScore, ScoreReceipt
from agentrl.records.ledger import GroupUse, LedgerEntry
from agentrl.records.limits import Limits
from agentrl.records.sampling import SamplingParams, Supports
from agentrl.records.sandbox import MAX_SNAPSHOT_BYTES, ExecResult, SandboxSpec
from agentrl.records.score import Score
from agentrl.records.task import Split, Task
from agentrl.records.trajectory import Parent, Trajectory, TurnKey, check_tree, turn_key
from agentrl.records.turn import CUT, Completion, Turn, VersionSpan
from agentrl.records.version import ADAPTER, WHOLE_MODEL, PolicyVersion, Probe, SwapReport, VersionState

__all__ = [
    "ADAPTER",
    "CUT",
    "MAX_AGENT_STATE_CHARS",
    "MAX_SNAPSHOT_BYTES",
    "OUTPUT_BYTES",
    "OUTPUT_FILES",
    "REMOVED_FILES",
    "WHOLE_MODEL",
    "Batch",
    "Blame",
    "Cancelled",
    "Completion",
    "EnvironmentSpec",
    "Episode",
    "EpisodeState",
    "ExecResult",
    "Failure",
    "Group",
    "GroupUse",
    "LateScore",
    "LedgerEntry",
    "Limits",
    "Memo",
    "Message",
    "Observation",
    "Parent",
    "PendingPart",
    "PendingScore",
    "PolicyVersion",
    "Probe",
    "RoleStep",
    "Sample",
    "SamplingParams",
    "SandboxSpec",
    "Score",
    "ScoreReceipt",
    "ScoredEpisode",
    "Split",
    "Step",
    "Supports",
    "SwapReport",
    "Task",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "TurnKey",
    "VersionSpan",
    "VersionState",
    "check_tree",
    "sampled_index",
    "sampled_tokens",
    "turn_key",
]
