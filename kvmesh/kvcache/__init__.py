"""KV blocks: keys, shard layouts, page pools and the local prefix cache.

Imports nothing here on purpose: `keys` and `page_pool` must load without `layout`'s dependencies.
"""
