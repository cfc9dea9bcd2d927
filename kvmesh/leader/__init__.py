"""Who leads among several processes of one kind: a lease in Redis with a fencing token, the term."""
