"""Agent libraries, each with a short program of its documentation's kind (`drivers/`): a shell tool and a structured answer."""

from __future__ import annotations

from benchmarks.outside.program import Program

PROGRAMS: tuple[Program, ...] = ()
