"""Asks this container's service whether it is ready: exit status 0 or 1, and one line. Standard library alone: it runs
every few seconds in every container."""

import http.client
import json
import os
import sys

path = sys.argv[1] if len(sys.argv) > 1 else "/ready"
try:
    port = int(os.environ.get("KVMESH_METRICS_PORT", "0"))
    if not port:  # it picked one
        with open(os.environ["KVMESH_READY_FILE"]) as file:
            port = int(json.load(file)["metrics"].rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    connection.request("GET", path)
    answer = connection.getresponse()
    said, ready = answer.read(300).decode(errors="replace").strip(), answer.status == 200
except (OSError, KeyError, ValueError) as err:
    said, ready = f"the service does not answer: {type(err).__name__}: {err}", False
print(said)
sys.exit(not ready)
