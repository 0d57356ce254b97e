"""The charts of a run's metrics, which the report and the pages of `agentrl view` show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from agentrl.observe.stats import Format, format_count
from agentrl.observe.timeline import PARTS, UTILIZATION

Form = Literal["plain", "count", "whole", "round", "exponent"]
"""How the values of an axis are written; `whole` also keeps its marks at whole numbers."""
FORMATS: Mapping[Form, Format] = {
    "plain": lambda value: f"{value:g}",
    "count": format_count,
    "whole": lambda value: f"{value:g}",
    "round": lambda value: f"{value:.0f}",
    "exponent": lambda value: f"{value:.0e}" if value else "0",
}
# Title, note, metric -> label of its line, and the format of the y axis.
CHARTS: tuple[tuple[str, str, Mapping[str, str], Form], ...] = (
    ("Staleness", "versions between sampling and learning", {"staleness_mean": "mean", "staleness_max": "max"}, "plain"),
    ("Swap stall", "ms during which requests waited", {"swap_stall_ms": "stall"}, "round"),
    ("Swap probe", "largest |server - learner| logprob, nats", {"swap_probe_max_abs_diff": "difference"}, "exponent"),
    ("Throughput", "sampled tokens per second", {"tokens_per_s": "tokens/s"}, "count"),
    ("Step time", "seconds from swap to swap", {"step_s": "seconds"}, "plain"),
    ("Utilization", "share of a step in which a part was busy", {f"{UTILIZATION}{part}": part for part in PARTS[:4]}, "plain"),
    (
        "Loop latency",
        "seconds from a turn to the version trained on it",
        {"loop_latency_s_mean": "mean", "loop_latency_s_max": "max"},
        "plain",
    ),
    (
        "Queues",
        "groups, and requests in the server, at the end of a step",
        {"groups_running": "running", "groups_ready": "ready", "groups_assigned": "assigned", "requests_waiting": "requests waiting"},
        "whole",
    ),
    ("Sandbox time", "seconds per episode to open, run and close, with waiting", {"sandbox_s_per_episode": "seconds"}, "plain"),
    ("Loss", "", {"loss": "loss"}, "plain"),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}, "plain"),
    ("Entropy", "nats per token", {"entropy": "entropy"}, "plain"),
    ("KL", "behaviour policy to learner, nats per token", {"kl_behaviour": "KL"}, "plain"),
    ("KL to the reference model", "learner to version 0, nats per token", {"kl_reference": "KL"}, "plain"),
    ("Server against learner", "KL with the same weights, nats per token", {"mismatch_kl": "KL"}, "exponent"),
    ("Ratio extremes", "learner to behaviour policy", {"ratio_max": "largest", "ratio_min": "smallest"}, "plain"),
    ("Effective sample size", "share of tokens, after truncated importance sampling", {"ess": "share"}, "plain"),
    ("Faults", "failed attempts and tool calls", {"attempts_failed": "attempts", "tool_failures": "tool calls"}, "whole"),
    ("Updates skipped", "not finite, or beyond a limit", {"updates_left_out": "updates", "rollbacks": "rollbacks"}, "whole"),
    ("Clipped ratios", "share of tokens", {"clip_fraction_high": "from above", "clip_fraction_low": "from below"}, "plain"),
    ("Groups without signal", "all attempts have equal scores", {"groups_without_signal": "groups"}, "whole"),
    ("Episodes excluded", "for task or infrastructure faults", {"episodes_left_out": "episodes"}, "whole"),
    ("Judges' disagreement", "mean over the episodes with several judges", {"judge_disagreement": "disagreement"}, "plain"),
)
