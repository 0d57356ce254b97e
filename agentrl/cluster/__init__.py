"""Which of a machine's devices each part of a run gets."""
