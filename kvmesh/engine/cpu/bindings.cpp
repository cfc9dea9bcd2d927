// The one place that registers operators: torch.ops.kvmesh.NAME.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(kvmesh, m) {
  m.def("pack(Tensor[] parts) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? residual, bool wide) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor ids, int outputs, int inputs) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvmesh, CPU, m) {
  m.impl("pack", kvmesh::pack);
  m.impl("linear", kvmesh::linear);
  m.impl("packed_rows", kvmesh::packed_rows);
  m.impl("rms_norm", kvmesh::rms_norm);
}
