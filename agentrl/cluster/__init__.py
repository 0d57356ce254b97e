"""Starts the parts of a run: plans the parts of a recipe, assigns the devices of one machine, and hosts the processes."""

from agentrl.cluster.plan import Bundle, ClusterPlan, PlannedPart, plan_here, plan_parts

__all__ = ["Bundle", "ClusterPlan", "PlannedPart", "plan_here", "plan_parts"]
