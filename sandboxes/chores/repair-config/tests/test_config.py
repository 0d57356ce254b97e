"""Every setting by itself, so that the report says which one is wrong."""


def test_what_was_meant_is_kept(outputs):
    config = outputs.json("service.json")
    assert (config["name"], config["workers"], config["debug"], config["tags"]) == ("gate", 6, False, ["edge", "eu"])
    assert config["debug"] is False
    assert config["limits"] == {"rate": 0.5, "burst": 20, "note": "a, ] in text // stays"}
    assert set(config) == {"name", "workers", "debug", "listen", "log", "limits", "tags"}


def test_log(outputs):
    assert outputs.json("service.json")["log"] == {"level": "warning", "file": "/var/log/gate//out.log"}


def test_ports(outputs):
    listen = outputs.json("service.json")["listen"]
    assert [(entry["host"], entry["port"]) for entry in listen] == [("0.0.0.0", 8080), ("::1", 8443), ("10.0.0.7", 8443)]
