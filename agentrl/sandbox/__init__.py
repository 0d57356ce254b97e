"""Sandboxes: isolated places to run an agent's programs (Docker, bubblewrap), their images, warm pool and conformance checks."""
