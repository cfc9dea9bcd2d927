"""What is asked of CUDA's driver, and in which order, on a machine without a GPU: a library with the driver's own
signatures, compiled here, that writes down its calls. Whether a GPU then does it is told by `scripts.gpu.check`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import TransferError
from kvmesh.transfer.cuda_driver import EXPORT_PAGE, GRAIN, WRITES_ORDERING, CudaDriver, covering

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
typedef int E; typedef void *Context; typedef unsigned long long Address;
static int depth, held;
#define TELL(...) do { FILE *f = fopen(getenv("CALLS"), "a"); fprintf(f, __VA_ARGS__); fclose(f); } while (0)
#define NEEDS_CONTEXT if (depth != 1 || held != 1) return 201
E cuInit(unsigned flags) { return flags ? 1 : 0; }
E cuDeviceGet(int *device, int ordinal) { if (ordinal > 1) return 101; *device = 40 + ordinal; return 0; }
E cuDevicePrimaryCtxRetain(Context *context, int device) { held++; *context = (Context)(long)device; return 0; }
E cuDevicePrimaryCtxRelease_v2(int device) { held--; return 0; }
E cuCtxPushCurrent_v2(Context context) { depth++; return (long)context == 41 ? 0 : 1; }
E cuCtxPopCurrent_v2(Context *context) { *context = 0; depth--; return 0; }
E cuDeviceGetAttribute(int *value, int which, int device) {
  if (device != 41) return 101;
  if (which == 124) *value = atoi(getenv("DMA_BUF")); else if (which == 118) *value = 100; else return 1;
  return 0;
}
E cuMemAlloc_v2(Address *address, size_t n) {
  NEEDS_CONTEXT; TELL("alloc %zu\\n", n); if (n > 1ull << 40) return 2; *address = 1ull << 45; return 0;
}
E cuMemGetHandleForAddressRange(void *handle, Address at, size_t n, int kind, unsigned long long flags) {
  NEEDS_CONTEXT; TELL("export %llx %zu %d %llu\\n", at, n, kind, flags);
  *(int *)handle = memfd_create("dmabuf", 0); return 0;
}
#ifndef OLD
E cuFlushGPUDirectRDMAWrites(int target, int scope) { NEEDS_CONTEXT; TELL("flush %d %d\\n", target, scope); return 0; }
#endif
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Callable[[], list[str]]]]:
    """Compiles the library; returns its path and what reads the calls."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here (cc): with one, the driver's signatures are tried")

    def build(*options: str) -> tuple[str, Callable[[], list[str]]]:
        source, library, calls = tmp_path / "driver.c", tmp_path / "libdriver.so", tmp_path / "calls"
        source.write_text(f"#define _GNU_SOURCE\n{SOURCE}")
        subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, source], check=True)
        calls.touch()
        monkeypatch.setenv("CALLS", str(calls))
        monkeypatch.setenv("DMA_BUF", "1")
        return str(library), lambda: calls.read_text().splitlines()

    return build


Built = Callable[..., tuple[str, Callable[[], list[str]]]]


def test_pages_are_whole_grains_exported_by_whole_host_pages_and_flushed_to_the_owner(built: Built) -> None:
    library, calls = built()
    driver = CudaDriver("cuda:1", library)
    assert driver.attribute(WRITES_ORDERING) == 100
    address = driver.allocate(GRAIN + 1)
    fd, offset = driver.export(address + 100, 3 * EXPORT_PAGE)
    os.close(fd)
    driver.flush()
    assert offset == 100
    assert calls() == [f"alloc {2 * GRAIN}", f"export {address:x} {4 * EXPORT_PAGE} 1 0", "flush 0 100"]


def test_what_is_missing_is_named(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    library, calls = built("-DOLD")
    for location, said in (
        ("cuda:2", "cuDeviceGet fails with CUDA error 101"),
        ("npu:0", "rdma registers cpu and cuda memory"),
    ):
        with pytest.raises(TransferError, match=said) as caught:
            CudaDriver(location, library)
        assert caught.value.field == "location" and f"location={location!r}" in caught.value.message
    with pytest.raises(TransferError, match="no CUDA driver here"):
        CudaDriver("cuda:0", "libnone.so.1")
    driver = CudaDriver("cuda:1", library)
    with pytest.raises(TransferError, match="too old: it has no cuFlushGPUDirectRDMAWrites"):
        driver.flush()
    with pytest.raises(TransferError, match="cuMemAlloc_v2 fails with CUDA error 2"):
        driver.allocate(1 << 41)
    monkeypatch.setenv("DMA_BUF", "0")
    with pytest.raises(TransferError, match="DMA_BUF_SUPPORTED is 0"):
        driver.export(1 << 45, 4096)
    assert not any(call.startswith("export") for call in calls())


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 40))
def test_an_export_covers_the_bytes_and_no_page_more(address: int, nbytes: int) -> None:
    start, length = covering(address, nbytes)
    assert start % EXPORT_PAGE == length % EXPORT_PAGE == 0
    assert start <= address < start + EXPORT_PAGE
    assert address + nbytes <= start + length < address + nbytes + EXPORT_PAGE


@given(st.integers(1, 64), st.integers(0, GRAIN * 8), st.integers(1, GRAIN * 8))
def test_no_export_leaves_an_allocation(grains: int, at: int, nbytes: int) -> None:
    """Memory of `allocate` begins at a GRAIN and is whole ones, so what is widened stays in it."""
    base, size = 7 * GRAIN, grains * GRAIN
    at = at % size
    start, length = covering(base + at, min(nbytes, size - at))
    assert base <= start and start + length <= base + size
