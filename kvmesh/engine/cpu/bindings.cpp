// The one place that registers operators: torch.ops.kvmesh.NAME.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(kvmesh, m) {
  m.def("pack(Tensor[] parts) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? residual, bool wide) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor ids, int outputs, int inputs) -> Tensor");
  m.def("use_tiles(int mode) -> bool", kvmesh::use_tiles);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rotate_heads(Tensor(a!) qkv, int heads, Tensor cos, Tensor sin, Tensor? weight, float eps) -> ()");
  m.def("gated(Tensor x, bool gelu) -> Tensor");
  m.def("write_kv(Tensor(a!) pages, int layer, Tensor qkv, Tensor sequences, Tensor table) -> ()");
  m.def(
      "paged_attention(Tensor pages, int layer, Tensor qkv, Tensor sequences, Tensor table, float scale, int window, "
      "int chunk, float softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvmesh, CPU, m) {
  m.impl("pack", kvmesh::pack);
  m.impl("linear", kvmesh::linear);
  m.impl("packed_rows", kvmesh::packed_rows);
  m.impl("rms_norm", kvmesh::rms_norm);
  m.impl("rotate_heads", kvmesh::rotate_heads);
  m.impl("gated", kvmesh::gated);
  m.impl("write_kv", kvmesh::write_kv);
  m.impl("paged_attention", kvmesh::paged_attention);
}
