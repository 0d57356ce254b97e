"""Needs torch."""

import torch

m = torch.nn.Linear(64, 64)
m(torch.randn(8, 64)).sum().backward()
torch.save(m.state_dict(), "m.pt")
torch.load("m.pt")
