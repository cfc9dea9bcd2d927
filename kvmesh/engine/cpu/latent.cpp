// Decode rows of latent attention, absorbed: all heads of a token meet the same rows, whose first columns are the values
// as well. A context is cut into parts of PART tokens; a part's rows are read from memory once for a block of heads.
#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "attention_rows.h"
#include "ops.h"
#include "scratch.h"

namespace kvmesh {
namespace attention {
namespace {

constexpr int64_t FOUR = 4;       // heads by tokens, and heads by registers of columns: their sums fill 16 registers
constexpr int64_t COLUMNS = 64;   // of values that are summed at a time
constexpr int64_t STRIPE = 16;    // tokens whose rows stay in the first cache while all heads meet them

// s[h][t] = q[h]·k[t] for four heads and four tokens; a head's queries are `words` words, its scores PART floats.
template <typename E>
void scores_of_four(const float* q, const float* const* k, int64_t words, float* s) {
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < words; d += 16) {
    __m512 kv[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) kv[t] = _mm512_loadu_ps(k[t] + d);
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++) {
      const __m512 qv = _mm512_load_ps(q + h * words + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; t++) acc[h * 4 + t] = dot<E>(acc[h * 4 + t], qv, kv[t]);
    }
  }
  const __m512 sums = sums16(acc);
  _mm_store_ps(s, _mm512_extractf32x4_ps(sums, 0));
  _mm_store_ps(s + PART, _mm512_extractf32x4_ps(sums, 1));
  _mm_store_ps(s + 2 * PART, _mm512_extractf32x4_ps(sums, 2));
  _mm_store_ps(s + 3 * PART, _mm512_extractf32x4_ps(sums, 3));
}

// o[h][c] = Σ s[h][t] v[t][c] for four heads and 16 DV columns from `column` on; a head's answer is `width` floats.
template <typename E, int DV>
void values_of_four(const float* s, const E* const* v, int64_t n, int64_t column, float* o, int64_t width) {
  __m512 acc[4][DV];
  for (int h = 0; h < 4; h++)
    for (int c = 0; c < DV; c++) acc[h][c] = _mm512_setzero_ps();
  for (int64_t t = 0; t < n; t++) {
    __m512 vv[DV];
#pragma GCC unroll 4
    for (int c = 0; c < DV; c++) vv[c] = load(v[t] + column + c * 16);
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++) {
      const __m512 p = _mm512_set1_ps(s[h * PART + t]);
#pragma GCC unroll 4
      for (int c = 0; c < DV; c++) acc[h][c] = _mm512_fmadd_ps(p, vv[c], acc[h][c]);
    }
  }
  for (int h = 0; h < 4; h++)
    for (int c = 0; c < DV; c++) _mm512_store_ps(o + h * width + column + c * 16, acc[h][c]);
}

// A part of one row's context, for heads [head, head + heads).
struct LatentPiece {
  int64_t row, part, head, heads, partial;
};

// One layer of `pages [P, L, 1, 1, B, W]`, queries `[R, H, W]`, answers `[R, H, latent]`.
template <typename E>
class Latent {
 public:
  Latent(const at::Tensor& pages, int64_t layer, const at::Tensor& q, const at::Tensor& table, const at::Tensor& ends,
         int64_t latent, double scale, E* out, float* values, float* lse)
      : rows_(pages.const_data_ptr<E>() + layer * pages.stride(1)),
        page_stride_(pages.stride(0)),
        block_(pages.size(4)),
        dim_(pages.size(5)),
        width_(round_up(dim_, 16 * PACK<E>)),
        words_(width_ / PACK<E>),
        latent_(latent),
        columns_(round_up(latent, 16)),
        heads_(q.size(1)),
        padded_(round_up(heads_, FOUR)),
        q_(q.const_data_ptr<E>()),
        table_(table.const_data_ptr<int32_t>()),
        table_width_(table.size(1)),
        ends_(ends.const_data_ptr<int64_t>()),
        count_(q.size(0)),
        bend_{static_cast<float>(scale), 0.0f},
        out_(out),
        values_(values),
        lse_(lse) {}

  void run() {
    std::vector<int64_t> first(count_);
    int64_t parts = 0;
    for (int64_t row = 0; row < count_; row++) first[row] = parts, parts += parts_of(row);
    // An answer is the same to the last bit however heads are shared out.
    const int64_t threads = at::get_num_threads();
    const int64_t some = parts >= 4 * threads ? padded_ : round_up((padded_ + threads - 1) / threads, FOUR);
    std::vector<LatentPiece> pieces;
    for (int64_t row = 0; row < count_; row++)
      for (int64_t part = 0; part < parts_of(row); part++)
        for (int64_t head = 0; head < heads_; head += some)
          pieces.push_back({row, part, head, std::min(some, padded_ - head), first[row] + part});
    const at::Tensor partials = at::empty({parts * padded_ * partial_floats() + 16}, at::kFloat);
    partials_ = reinterpret_cast<float*>(round_up(reinterpret_cast<int64_t>(partials.data_ptr<float>()), 64));
    shared(static_cast<int64_t>(pieces.size()), [&](int64_t i) { part(pieces[i]); });
    at::parallel_for(0, count_ * heads_, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) join(i / heads_, i % heads_, first[i / heads_]);
    });
  }

 private:
  int64_t parts_of(int64_t row) const { return (ends_[row] + PART - 1) / PART; }

  // Sums of values, the largest score and the sum of weights, to whole lines.
  int64_t partial_floats() const { return columns_ + 16; }

  float* partial(int64_t number, int64_t head) const {
    return partials_ + (number * padded_ + head) * partial_floats();
  }

  template <typename F>
  static void shared(int64_t count, F&& f) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) f(i);
    });
  }

  void stage(const E* from, E* to) const {
    std::memcpy(to, from, dim_ * sizeof(E));
    std::fill(to + dim_, to + width_, E(0.0f));
  }

  void part(const LatentPiece& piece) const {
    static thread_local Scratch scratch;
    const int64_t begin = piece.part * PART, n = std::min(PART, ends_[piece.row] - begin);
    const bool staged = width_ != dim_;
    scratch.reset(piece.heads * (words_ + PART) * 4 + PART * (8 + (staged ? width_ * sizeof(E) : 0)) + 4 * 64);
    const E** rows = scratch.take<const E*>(PART);
    E* copies = staged ? scratch.take<E>(PART * width_) : nullptr;
    const int32_t* ids = table_ + piece.row * table_width_;
    for (int64_t t = 0; t < n; t++) {
      const int64_t at = begin + t;
      rows[t] = rows_ + ids[at / block_] * page_stride_ + at % block_ * dim_;
      if (staged) stage(rows[t], copies + t * width_), rows[t] = copies + t * width_;
    }
    float* q = scratch.take<float>(piece.heads * words_);
    for (int64_t h = 0; h < piece.heads; h++) {
      E* to = reinterpret_cast<E*>(q + h * words_);
      if (piece.head + h < heads_)
        stage(q_ + (piece.row * heads_ + piece.head + h) * dim_, to);
      else
        std::fill(to, to + width_, E(0.0f));
    }
    float* s = scratch.take<float>(piece.heads * PART);
    for (int64_t t = 0; t < n; t += STRIPE)
      for (int64_t h = 0; h < piece.heads; h += FOUR)
        for (int64_t u = t; u < std::min(t + STRIPE, n); u += FOUR) {
          const float* k[FOUR];
          for (int64_t i = 0; i < FOUR; i++) k[i] = reinterpret_cast<const float*>(rows[std::min(u + i, n - 1)]);
          scores_of_four<E>(q + h * words_, k, words_, s + h * PART + u);
        }
    for (int64_t h = 0; h < piece.heads; h++) {
      float* of = partial(piece.partial, piece.head + h) + columns_;
      row_weights(s + h * PART, n, bend_, of[0], of[1]);
    }
    for (int64_t c = 0; c < columns_;) {
      const bool wide = columns_ - c >= COLUMNS;
      for (int64_t h = 0; h < piece.heads; h += FOUR) {
        float* o = partial(piece.partial, piece.head + h);
        if (wide)
          values_of_four<E, 4>(s + h * PART, rows, n, c, o, partial_floats());
        else
          values_of_four<E, 1>(s + h * PART, rows, n, c, o, partial_floats());
      }
      c += wide ? COLUMNS : 16;
    }
  }

  // One softmax over all parts, in their order.
  void join(int64_t row, int64_t head, int64_t first_part) const {
    const int64_t count = parts_of(row);
    float top = NEVER, sum = 0.0f;
    for (int64_t i = 0; i < count; i++) top = std::max(top, partial(first_part + i, head)[columns_]);
    for (int64_t i = 0; i < count; i++) {
      const float* of = partial(first_part + i, head) + columns_;
      sum += std::exp2(of[0] - top) * of[1];
    }
    const int64_t place = row * heads_ + head;
    if (lse_) lse_[place] = (top + std::log2(sum)) / LOG2E;  // of no tokens: minus infinity
    const __m512 share = _mm512_set1_ps(count ? sum : 1.0f);
    each16(latent_, [&](int64_t c, __mmask16 m) {
      __m512 total = _mm512_setzero_ps();
      for (int64_t i = 0; i < count; i++) {
        const float* of = partial(first_part + i, head);
        total = _mm512_fmadd_ps(_mm512_set1_ps(std::exp2(of[columns_] - top)), load(of + c), total);
      }
      if (values_)
        store(values_ + place * latent_ + c, _mm512_div_ps(total, share), m);
      else
        store(out_ + place * latent_ + c, _mm512_div_ps(total, share), m);
    });
  }

  const E* rows_;
  const int64_t page_stride_, block_, dim_, width_, words_, latent_, columns_, heads_, padded_;
  const E* q_;
  const int32_t* table_;
  const int64_t table_width_;
  const int64_t* ends_;
  const int64_t count_;
  const Bend bend_;
  E* out_;         // answers, or ...
  float* values_;  // ... in float32, with the log of the sums of weights in lse_
  float* lse_;
  float* partials_ = nullptr;
};

}  // namespace
}  // namespace attention

namespace {

void attend_latents(const at::Tensor& pages, int64_t layer, const at::Tensor& q, const at::Tensor& table,
                    const at::Tensor& ends, int64_t latent, double scale, int64_t shortest, at::Tensor& out,
                    float* lse) {
  TORCH_CHECK(pages.dim() == 6 && pages.is_contiguous() && pages.size(2) == 1 && pages.size(3) == 1 && layer >= 0 &&
                  layer < pages.size(1) && q.dim() == 3 && q.is_contiguous() && q.size(2) == pages.size(5) &&
                  q.scalar_type() == pages.scalar_type() && latent > 0 && latent <= pages.size(5),
              "pages [P, L, 1, 1, B, W] and q [R, H, W] of one dtype, a latent of at most W");
  TORCH_CHECK(table.scalar_type() == at::kInt && table.dim() == 2 && table.is_contiguous() &&
                  table.size(0) >= q.size(0) && ends.scalar_type() == at::kLong && ends.dim() == 1 &&
                  ends.is_contiguous() && ends.size(0) == q.size(0),
              "table [>= R, width] is contiguous int32, ends [R] int64");
  const int64_t* last = ends.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < q.size(0); i++)
    TORCH_CHECK(last[i] >= shortest && last[i] <= table.size(1) * pages.size(4), "row ", i, " ends at ", last[i]);
  if (!out.numel()) return;
  const auto attend = [&]<typename E>(E) {
    E* plain = lse ? nullptr : out.data_ptr<E>();
    float* values = lse ? out.data_ptr<float>() : nullptr;
    attention::Latent<E>(pages, layer, q, table, ends, latent, scale, plain, values, lse).run();
  };
  switch (pages.scalar_type()) {
    case at::kFloat:
      return attend(0.0f);
    case at::kBFloat16:
      return attend(c10::BFloat16());
    default:
      TORCH_CHECK(false, "pages are float32 or bfloat16, got ", pages.scalar_type());
  }
}

}  // namespace

at::Tensor latent_attention(const at::Tensor& pages, int64_t layer, const at::Tensor& q, const at::Tensor& table,
                            const at::Tensor& ends, int64_t latent, double scale) {
  at::Tensor out = at::empty({q.size(0), q.size(1), latent}, q.options());
  attend_latents(pages, layer, q, table, ends, latent, scale, 1, out, nullptr);
  return out;
}

std::tuple<at::Tensor, at::Tensor> latent_parts(const at::Tensor& pages, int64_t layer, const at::Tensor& q,
                                                const at::Tensor& table, const at::Tensor& ends, int64_t latent,
                                                double scale) {
  const auto options = q.options().dtype(at::kFloat);
  at::Tensor out = at::empty({q.size(0), q.size(1), latent}, options);
  at::Tensor lse = at::empty({q.size(0), q.size(1)}, options);
  attend_latents(pages, layer, q, table, ends, latent, scale, 0, out, lse.data_ptr<float>());
  return {out, lse};
}

}  // namespace kvmesh
