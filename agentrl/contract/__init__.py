"""What tasks, sandboxes and rewards share: the outputs that leave an agent's sandbox, and how a task is graded."""
