"""Starts the parts of a run: the plan of a recipe, the devices of one machine, and the hosts of processes."""

from agentrl.cluster.plan import Bundle, ClusterPlan, PlannedPart, plan_here, plan_parts

__all__ = ["Bundle", "ClusterPlan", "PlannedPart", "plan_here", "plan_parts"]
