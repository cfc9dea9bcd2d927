"""Asks this container's service whether it is ready: exit status 0 or 1, and one line. Standard library alone: it runs
every few seconds in every container."""

import http.client
import json
import os
import ssl
import sys


def asked(port):
    """(what it says, whether it is ready), over TLS where the service has a certificate. Whose it is matters to nobody
    on this machine."""
    ways = [http_plain, http_tls]
    if os.environ.get("KVMESH_TLS_CERT"):
        ways.reverse()
    try:
        return said_by(ways[0](port))
    except (ssl.SSLError, http.client.HTTPException, ConnectionResetError):  # it speaks the other one
        return said_by(ways[1](port))


def http_plain(port):
    return http.client.HTTPConnection("127.0.0.1", port, timeout=4)


def http_tls(port):
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=context)


def said_by(connection):
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.read(300).decode(errors="replace").strip(), answer.status == 200


path = sys.argv[1] if len(sys.argv) > 1 else "/ready"
try:
    port = int(os.environ.get("KVMESH_METRICS_PORT", "0"))
    if not port:  # it picked one
        with open(os.environ["KVMESH_READY_FILE"]) as file:
            port = int(json.load(file)["metrics"].rpartition(":")[2])
    said, ready = asked(port)
except (OSError, KeyError, ValueError, http.client.HTTPException) as err:
    said, ready = f"the service does not answer: {type(err).__name__}: {err}", False
print(said)
sys.exit(not ready)
