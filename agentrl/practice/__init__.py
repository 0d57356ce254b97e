"""Practice: training tasks made from the cases of a suite, kept beside it, and mixed into a run's schedule.

`agentrl.prove.practice` makes and proves them; a case itself, or a near twin of one, is never among them.
"""

from agentrl.practice.files import FILE, Practiced, load_practice, save_practice
from agentrl.practice.mixed import Mixed, open_practice
from agentrl.practice.mutants import mutants, truth_free_gold

__all__ = ["FILE", "Mixed", "Practiced", "load_practice", "mutants", "open_practice", "save_practice", "truth_free_gold"]
