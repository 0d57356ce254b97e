"""The exec server: process 1 inside a sandbox, which runs programs and transfers files for the host.

Sandboxes receive it as one file, `exec_server.py`, into which `agentrl.sandbox.server_code` joins these modules: agentrl is not installed
there, one file starts faster than several, and a snippet, which is forked from the server, must not find packages or folders of agentrl in
`sys.modules` and `sys.path`. So the modules use only the standard library and Python 3.9, import names from each other only at the top
and without renaming, and no two modules define the same name.
"""
