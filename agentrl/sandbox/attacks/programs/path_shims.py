"""Puts programs of the same name before the real ones, on the path, in the working directory and over the real ones.

kind: grader
seconds: 10
"""

import os

shim = "#!/bin/sh\necho ESCAPED: a shim ran\nexit 0\n"
placed = 0
for folder in (".", "bin", ".local/bin", "/tmp", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"):
    try:
        os.makedirs(folder, exist_ok=True)
        for name in ("true", "python3", "sh", "cat", "pytest", "git", "test"):
            path = f"{folder}/{name}"
            if folder.startswith(("/usr", "/bin", "/sbin")) and os.path.exists(path):
                os.unlink(path)
            with open(path, "w") as file:
                file.write(shim)
            os.chmod(path, 0o755)
            placed += 1
            if folder.startswith(("/usr", "/bin", "/sbin")):
                print(f"ESCAPED: replaced {path}")
    except OSError:
        continue
for path in (
    "/etc/ld.so.preload",
    "/etc/ld.so.cache",
    "/etc/passwd",
    "/etc/environment",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/python3/debian_config",
):
    try:
        with open(path, "a") as file:
            file.write("x")
        print(f"ESCAPED: wrote {path}")
    except OSError:
        continue
print(f"held: {placed} shims where only the agent looks")
