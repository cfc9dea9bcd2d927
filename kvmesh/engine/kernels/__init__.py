"""Triton kernels over paged KV. Beside each stands its oracle: the same function in plain torch, for tests.

All take one layer's pages as `[num_pages, 2, K, block_tokens, D]`, any strides but a dense last axis. Page ids are
multiplied in 64 bits: pools are larger than 2**31 elements.
"""
