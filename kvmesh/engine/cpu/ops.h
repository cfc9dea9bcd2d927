// Operators of kvmesh for CPUs with AVX-512 and VDPBF16PS: plain functions over tensors, one .cpp per concern,
// registered in bindings.cpp. All use torch's own thread pool (at::parallel_for); callers hold no GIL.
#pragma once

#include <ATen/ATen.h>

namespace kvmesh {

// linear.cpp. A packed weight is bf16 [panels, pairs, 32, 2]; `outputs` and inputs are the matrix's own counts.
at::Tensor pack(at::TensorList parts);
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& residual, bool wide);
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& ids, int64_t outputs, int64_t inputs);

// tiles.cpp. How products of several rows and attention of bfloat16 prompts are made from now on, 0: not on AMX tiles,
// 1: on them if this CPU has them, 2: by plain code that does what tiles do (tests); answers whether it is so now.
bool use_tiles(int64_t mode);

// fused.cpp
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
void rotate_heads(at::Tensor qkv, int64_t heads, const at::Tensor& cos, const at::Tensor& sin,
                  const std::optional<at::Tensor>& weight, double eps);
at::Tensor gated(const at::Tensor& x, bool gelu);

// attention.cpp. `sequences` and `table` describe a step, see there; answers [T, H * D].
void write_kv(at::Tensor pages, int64_t layer, const at::Tensor& qkv, const at::Tensor& sequences,
              const at::Tensor& table);
at::Tensor paged_attention(const at::Tensor& pages, int64_t layer, const at::Tensor& qkv, const at::Tensor& sequences,
                           const at::Tensor& table, double scale, int64_t window, int64_t chunk, double softcap,
                           const std::optional<at::Tensor>& sinks);

}  // namespace kvmesh
