"""`agentrl watch`: shows runs, curves, health and transcripts in a terminal, for users on ssh.

`frames` lays out lines of text, `screens` reads the run, `terminal` draws and handles keys.
"""

from agentrl.watch.screens import open_screen
from agentrl.watch.terminal import keyboard, print_frame, show

__all__ = ["keyboard", "open_screen", "print_frame", "show"]
