"""Code that tools run inside a sandbox, sent there as source. The code uses only the standard library of Python 3.8 and later, and runs as
the agent, so its output is as untrusted as the agent's."""
