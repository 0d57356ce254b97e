"""Single proofs about a task family: purity, splits, answers that lie readable, tools, verifiers. `agentrl.check` runs them all.

Each gives findings and says what it looked at; what it cannot know is for `agentrl.check` to list.
"""
