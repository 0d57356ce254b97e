"""The matrix of third-party agent programs: how each is installed and run (`cli`, `sdk`), one session (`session`), stored cells and their
table (`matrix`). `benchmarks/outside_programs.py` is the command.
"""
