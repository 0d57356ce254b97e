"""What `benchmarks/peers.py` is made of: the setting both sides share, our run, the peer's, what is measured, and the tables."""
