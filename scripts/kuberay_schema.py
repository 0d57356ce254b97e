"""Writes the schema of KubeRay's RayJob that tests validate manifests with, from the CRD's OpenAPI schema.

    python scripts/kuberay_schema.py rayjobs.v1.json tests/cluster/rayjob.schema.json

The source is the `openAPIV3Schema` of version v1 in ray-operator/config/crd/bases/ray.io_rayjobs.yaml of KubeRay 1.7 (Apache-2.0), as JSON.
Pod templates, most of it, become plain objects: tests validate them as pods of Kubernetes. Fields that a manifest of agentrl never has are
removed, and so are descriptions. Unknown fields are errors, although an API server would drop them silently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REMOVED = ("status", "autoscalerOptions", "historyServerOptions", "submitterPodTemplate", "networkPolicy")
SOURCE = "KubeRay 1.7, ray-operator/config/crd/bases/ray.io_rayjobs.yaml, version v1 (Apache-2.0); reduced by scripts/kuberay_schema.py"


def reduced(schema: Any) -> Any:
    """Returns the schema without pod templates, descriptions and removed fields; objects with known fields allow no others."""
    if isinstance(schema, list):
        return [reduced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if _is_pod_template(schema):
        return {"type": "object"}
    smaller = {name: reduced(value) for name, value in schema.items() if name not in ("description", "properties")}
    if "properties" in schema:
        smaller["properties"] = {name: reduced(value) for name, value in schema["properties"].items() if name not in REMOVED}
        smaller.setdefault("additionalProperties", False)
    return smaller


def _is_pod_template(schema: dict[str, Any]) -> bool:
    return "containers" in schema.get("properties", {}).get("spec", {}).get("properties", {})


def main() -> int:
    """Writes the reduced schema."""
    source, target = map(Path, sys.argv[1:])
    schema = {"$comment": SOURCE, **reduced(json.loads(source.read_text(encoding="utf-8")))}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    target.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
