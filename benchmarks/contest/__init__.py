"""Parts of `benchmarks/peers.py`: the common setting, the runs of agentrl and the peer, the measurements, and the tables."""
