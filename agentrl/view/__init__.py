"""`agentrl view`: a local web application that shows runs, from curves down to single tokens and how the learner used them.

`library` finds runs, `source` reads one run, each `*_data` module computes the JSON for one subject, and `server` handles requests.
"""

from agentrl.view.library import RunLibrary
from agentrl.view.server import ViewServer

__all__ = ["RunLibrary", "ViewServer"]
