"""The checks of `agentrl.cluster.object_store` with a server of the S3 protocol: `python -m tests.cluster.s3_store FOLDER`.

The environment needs moto[server], s3fs, and the packages that `agentrl.cluster` imports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def main(folder: Path) -> None:
    """Raises if a check fails."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {**KEYS, "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}"}  # credentials and address by environment only

    from agentrl.cluster.chunks import ChunkIndex
    from agentrl.cluster.object_store import ObjectStore
    from agentrl.errors import InfrastructureError, UserError

    try:
        ObjectStore("s3://missing/run").check()
        raise AssertionError("the bucket does not exist")
    except UserError as error:
        assert "set the store's credentials" in str(error), error
    store = ObjectStore("s3://weights/run")
    store._files.mkdir("weights")
    store.check()
    for number in (1, 2):
        version = folder / f"{number:06d}"
        version.mkdir()
        (version / "model.safetensors").write_bytes(os.urandom(60_000_001))  # several parts of an upload
        store.upload(f"versions/{version.name}", version, ChunkIndex().list_folder(version))
    content = (folder / "000002" / "model.safetensors").read_bytes()
    for start, end in ((0, 16 << 20), (48 << 20, len(content)), (len(content) - 1, len(content))):
        assert store.read("versions/000002/model.safetensors", start, end) == content[start:end]
    try:
        store.read("versions/000003/model.safetensors", 0, 1)
        raise AssertionError("the object does not exist")
    except InfrastructureError as error:
        print(error)
    store.drop_others(["000002"])
    assert [path.rpartition("/")[2] for path in store._files.ls("weights/run/versions", detail=False)] == ["000002"]
    store.remove()
    store.remove()
    assert store._files.find("weights") == []
    server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # the library of the store has threads that do not end
