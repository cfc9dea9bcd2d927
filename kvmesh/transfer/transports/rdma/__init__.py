"""The rdma transport: one-sided writes and reads over RC queue pairs, on every NIC that has a port.

    library     pyverbs and libibverbs: found, and of one version
    verbs       the hot path: libibverbs called through ctypes with the objects that pyverbs made
    gids        which GID of a port to use, and which NICs of two hosts reach each other (pure)
    device      a NIC: registered memory, completion queues, the thread that polls them, its events; how a
                queue pair ends
    queue_pair  a queue pair: chains of work requests, bounded by the depth of its queue
    protocol    messages of the control connection (TCP); `channel` carries them
    rail, path  the opener
    server      the target
    transport   RdmaTransport

Imported only where a configuration names rdma, or `auto` finds a device.
"""
