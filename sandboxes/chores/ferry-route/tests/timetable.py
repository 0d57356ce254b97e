"""A large timetable: many slow lines, and one chain of short hops that beats them."""

import random
from itertools import pairwise

rng = random.Random(99)
harbours = [f"h{number}" for number in range(150)]
connections = []
for _ in range(19800):
    origin, target = rng.sample(harbours, 2)
    departs = rng.randrange(2000, 40000)
    connections.append([origin, target, departs, departs + rng.randrange(500, 4000)])
chain = rng.sample(harbours, 40)
for step, (origin, target) in enumerate(pairwise(chain)):
    connections.append([origin, target, 100 + 10 * step, 108 + 10 * step])
rng.shuffle(connections)
