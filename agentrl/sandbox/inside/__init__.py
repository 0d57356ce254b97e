"""The exec server: process 1 inside a sandbox, which runs programs and moves files for the host.

It is written as the modules of this package and handed to sandboxes as one file, `exec_server.py` (`agentrl.sandbox.server_code`
joins them): agentrl is not installed in there, one file starts faster than several, and a snippet, which is forked from the
server, finds no package and no folder of ours in `sys.modules` and `sys.path`. Hence the rules of the modules: standard library
only, Python 3.9 or later; from each other they import names, at their top, as they are; and no two define the same name.
"""
