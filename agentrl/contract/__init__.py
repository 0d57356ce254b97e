"""What tasks, sandboxes and rewards share: the outputs that leave an agent's sandbox, how a task is graded, and when two
numbers are the same."""
