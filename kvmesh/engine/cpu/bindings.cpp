// The one place that registers operators: torch.ops.kvmesh.NAME.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(kvmesh, m) {
  m.def("pack_room(int outputs, int inputs) -> Tensor", kvmesh::pack_room);
  m.def("pack_into(Tensor(a!) packed, Tensor[] parts) -> ()");
  m.def("pack(Tensor[] parts) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? residual, bool wide) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor ids, int outputs, int inputs) -> Tensor");
  m.def(
      "experts(Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, int count, int first, int inner, "
      "Tensor? bias, Tensor? down_bias, int activation, float alpha, float limit, bool scale_input) -> Tensor");
  m.def("use_tiles(int mode) -> bool", kvmesh::use_tiles);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rotate_heads(Tensor(a!) qkv, int heads, Tensor cos, Tensor sin, Tensor? weight, float eps) -> ()");
  m.def("gated(Tensor x, bool gelu) -> Tensor");
  m.def("write_kv(Tensor(a!) pages, int layer, Tensor qkv, Tensor sequences, Tensor table) -> ()");
  m.def(
      "paged_attention(Tensor pages, int layer, Tensor qkv, Tensor sequences, Tensor table, float scale, int window, "
      "int chunk, float softcap, Tensor? sinks) -> Tensor");
  m.def("delta_convolve(Tensor x, Tensor weight, Tensor(a!) known, Tensor slots, Tensor runs) -> Tensor");
  m.def(
      "delta_rule(Tensor x, Tensor log_decay, Tensor rate, Tensor(a!) states, Tensor slots, Tensor runs) -> Tensor");
  m.def("best_allowed(Tensor logits, Tensor rows, Tensor bits, Tensor masks) -> Tensor");
  m.def(
      "latent_attention(Tensor pages, int layer, Tensor q, Tensor table, Tensor ends, int latent, float scale) -> "
      "Tensor");
  m.def(
      "paged_parts(Tensor pages, int layer, Tensor q, Tensor sequences, Tensor table, float scale, float softcap, bool "
      "together) -> (Tensor, Tensor)");
  m.def(
      "latent_parts(Tensor pages, int layer, Tensor q, Tensor table, Tensor ends, int latent, float scale) -> (Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(kvmesh, CPU, m) {
  m.impl("pack", kvmesh::pack);
  m.impl("pack_into", kvmesh::pack_into);
  m.impl("experts", kvmesh::experts);
  m.impl("linear", kvmesh::linear);
  m.impl("packed_rows", kvmesh::packed_rows);
  m.impl("rms_norm", kvmesh::rms_norm);
  m.impl("rotate_heads", kvmesh::rotate_heads);
  m.impl("gated", kvmesh::gated);
  m.impl("write_kv", kvmesh::write_kv);
  m.impl("paged_attention", kvmesh::paged_attention);
  m.impl("delta_convolve", kvmesh::delta_convolve);
  m.impl("delta_rule", kvmesh::delta_rule);
  m.impl("best_allowed", kvmesh::best_allowed);
  m.impl("latent_attention", kvmesh::latent_attention);
  m.impl("paged_parts", kvmesh::paged_parts);
  m.impl("latent_parts", kvmesh::latent_parts);
}
