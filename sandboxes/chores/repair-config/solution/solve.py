import json

with open("service.json", "w") as file:
    json.dump(
        {
            "name": "gate",
            "workers": 6,
            "debug": False,
            "listen": [
                {"host": "0.0.0.0", "port": 8080},
                {"host": "::1", "port": 8443},
                {"host": "10.0.0.7", "port": 8443},
            ],
            "log": {"level": "warning", "file": "/var/log/gate//out.log"},
            "limits": {"rate": 0.5, "burst": 20, "note": "a, ] in text // stays"},
            "tags": ["edge", "eu"],
        },
        file,
        indent=2,
    )
