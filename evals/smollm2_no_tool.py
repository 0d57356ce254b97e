"""Evaluation suite: the problems of `recipes/smollm2.py` without the tool, in one message. Shows what is lost while the tool is learned.

agentrl eval evals/smollm2_no_tool.py
agentrl eval evals/smollm2_no_tool.py --model runs/smollm2/model
"""

from recipes.smollm2 import recipe as base

recipe = base.but("tasks.family.options.tool=none", name="smollm2-no-tool")
