"""The training loop: `loop` is the pipeline on one page, and the other modules implement its steps."""
