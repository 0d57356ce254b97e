"""Calls one function of the code under test and prints its result as JSON. Runs in the same process as that code, so it has no secrets.

python3 -I -B -c SOURCE   with {"file", "function", "args", "kwargs"} on stdin; output of the code goes to stderr
"""

import importlib.util
import json
import os
import sys

request = json.loads(sys.stdin.read())
answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
path = os.path.abspath(request["file"])
sys.path.insert(0, os.path.dirname(path))
spec = importlib.util.spec_from_file_location(os.path.basename(path)[: -len(".py")], path)
assert spec is not None and spec.loader is not None, path
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
answer.write(json.dumps(getattr(module, request["function"])(*request["args"], **request["kwargs"])))
answer.close()
