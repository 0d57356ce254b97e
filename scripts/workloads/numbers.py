"""Needs numpy."""

import numpy

a = numpy.random.rand(300, 300)
(a @ a).sum()
numpy.save("a.npy", a)
numpy.load("a.npy", mmap_mode="r").sum()
