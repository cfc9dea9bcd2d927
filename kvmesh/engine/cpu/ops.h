// Operators of kvmesh for CPUs with AVX-512 and VDPBF16PS: plain functions over tensors, one .cpp per concern,
// registered in bindings.cpp. All use torch's own thread pool (at::parallel_for); callers hold no GIL.
#pragma once

#include <ATen/ATen.h>

namespace kvmesh {

// linear.cpp. A packed weight is bf16 [panels, pairs, 32, 2]; `outputs` and inputs are the matrix's own counts.
at::Tensor pack_room(int64_t outputs, int64_t inputs);
void pack_into(at::Tensor packed, at::TensorList parts);
at::Tensor pack(at::TensorList parts);
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& residual, bool wide);
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& ids, int64_t outputs, int64_t inputs);

// experts.cpp, see there.
at::Tensor experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& gate_up,
                   const at::Tensor& down, int64_t count, int64_t first, int64_t inner,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& down_bias,
                   int64_t activation, double alpha, double limit, bool scale_input);

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
// The same of a part of a context, for queries `q [T, H, D]`: float32 answers `[T, H, D]`, and the log of the sum of
// their weights `[T, H]`; zeros and minus infinity where a query is no sequence's. With `together` all queries of a
// sequence see the tokens [0, start].
std::tuple<at::Tensor, at::Tensor> paged_parts(const at::Tensor& pages, int64_t layer, const at::Tensor& q,
                                               const at::Tensor& sequences, const at::Tensor& table, double scale,
                                               double softcap, bool together);

// delta.cpp. `runs` int32 [sequences, 2] (first token, length) and `slots` int64 [sequences] describe a step; states are
// changed in place.
at::Tensor delta_convolve(const at::Tensor& x, const at::Tensor& weight, at::Tensor known, const at::Tensor& slots,
                          const at::Tensor& runs);
at::Tensor delta_rule(const at::Tensor& x, const at::Tensor& log_decay, const at::Tensor& rate, at::Tensor states,
                      const at::Tensor& slots, const at::Tensor& runs);

// masked.cpp. Tokens int64 [n]: the first of the best logits that a mask allows, of `rows` (int64 [n]) of `logits [R, V]`
// under the masks number `masks` (int64 [n]) of `bits` (int32, bit t % 32 of word t / 32 is token t's). No logit is NaN,
// and each mask allows a token.
at::Tensor best_allowed(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& bits,
                        const at::Tensor& masks);

// latent.cpp. Absorbed queries `q [R, H, W]` of decode rows, row i over its tokens [0, ends[i]); answers [R, H, latent].
at::Tensor latent_attention(const at::Tensor& pages, int64_t layer, const at::Tensor& q, const at::Tensor& table,
                            const at::Tensor& ends, int64_t latent, double scale);
// The same of a part of a context, which may be empty: float32 answers, and the log of the sums of weights [R, H].
std::tuple<at::Tensor, at::Tensor> latent_parts(const at::Tensor& pages, int64_t layer, const at::Tensor& q,
                                                const at::Tensor& table, const at::Tensor& ends, int64_t latent,
                                                double scale);

}  // namespace kvmesh
