"""`agentrl view`: a local web application that shows runs, from a curve down to the token and what the learner did with it.

`library` finds runs, `source` reads one of them, the modules `*_data` compute the JSON of one subject, and `server` answers requests.
"""

from agentrl.view.library import RunLibrary
from agentrl.view.server import ViewServer

__all__ = ["RunLibrary", "ViewServer"]
