"""Fast paths: a gRPC service's unary methods over a plain socket, for callers to whom a call's own cost matters.

The messages, the servicer, the errors and the deadlines are those of gRPC; what differs is only how they travel.
Whoever cannot reach a fast path, or finds it closed or silent, calls over gRPC: see `caller.FastCaller`.
"""
