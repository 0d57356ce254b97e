"""What tools run inside a sandbox, sent there as source: the standard library alone, any Python from 3.8 on. It runs as the agent, so
that its words are the agent's."""
