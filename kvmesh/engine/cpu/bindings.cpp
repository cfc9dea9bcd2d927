// The one place that registers operators: torch.ops.kvmesh.NAME.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(kvmesh, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvmesh, CPU, m) {
  m.impl("rms_norm", kvmesh::rms_norm);
}
