// Operators of kvmesh for CPUs with AVX-512 and VDPBF16PS: plain functions over tensors, one .cpp per concern,
// registered in bindings.cpp. All use torch's own thread pool (at::parallel_for); callers hold no GIL.
#pragma once

#include <ATen/ATen.h>

namespace kvmesh {

// fused.cpp
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool unit_offset);

}  // namespace kvmesh
