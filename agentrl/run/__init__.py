"""The training loop: `loop` is the pipeline on one page; the other modules are its steps."""
