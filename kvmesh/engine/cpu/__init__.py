"""C++ operators for CPUs with AVX-512 and its bf16 dot product: `build` makes them at install, `native` loads them."""
