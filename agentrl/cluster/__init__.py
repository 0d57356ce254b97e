"""Where the parts of a run start: the plan of a recipe, and the devices of one machine."""

from agentrl.cluster.plan import Bundle, ClusterPlan, PlannedPart, plan_here, plan_parts

__all__ = ["Bundle", "ClusterPlan", "PlannedPart", "plan_here", "plan_parts"]
