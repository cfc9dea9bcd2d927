// Attention over paged KV, read where it lies, and the writing of K and V into pages. The step is described by two
// int32 arrays: `sequences [S, 4]` (first row in qkv, length, position of the first token, 1 where the rest of the last
// page is to be cleared) and `table [>= S, width]` (each sequence's page ids, from token 0 on).
#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attention_amx.h"
#include "attention_rows.h"
#include "ops.h"
#include "scratch.h"

namespace kvmesh {
namespace attention {
namespace {

inline __m512 load(const c10::Half* p, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(c10::Half* p, __m512 v, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
using kvmesh::load, kvmesh::store;

// What is multiplied: bfloat16 as it is, float16 as float.
template <typename T>
using Element = std::conditional_t<std::is_same_v<T, c10::BFloat16>, c10::BFloat16, float>;

struct Sequence {
  int32_t first, length, start, fresh;
};

struct Step {
  const Sequence* sequences;
  int64_t count;
  const int32_t* table;
  int64_t table_width;

  const int32_t* pages(int64_t i) const { return table + i * table_width; }
};

Step step_of(const at::Tensor& sequences, const at::Tensor& table, int64_t tokens, bool all = true) {
  TORCH_CHECK(sequences.scalar_type() == at::kInt && sequences.dim() == 2 && sequences.size(1) == 4 &&
                  sequences.is_contiguous() && table.scalar_type() == at::kInt && table.dim() == 2 &&
                  table.is_contiguous() && table.size(0) >= sequences.size(0),
              "sequences [S, 4] and table [>= S, width] are contiguous int32");
  const auto* of = reinterpret_cast<const Sequence*>(sequences.const_data_ptr<int32_t>());
  const int64_t count = sequences.size(0);
  // A token that is no sequence's would be written nowhere and answered by whatever memory holds.
  const int64_t planned = count ? int64_t{of[count - 1].first} + of[count - 1].length : 0;
  TORCH_CHECK(all ? planned == tokens : planned <= tokens, "qkv has ", tokens, " tokens, the step's sequences have ", planned);
  return {of, count, table.const_data_ptr<int32_t>(), table.size(1)};
}

// One layer of `pages [P, L, 2, K, B, D]`.
template <typename T>
struct Pages {
  T* base;
  int64_t page_stride, kv_heads, block, dim;

  Pages(const at::Tensor& pages, int64_t layer)
      : base(pages.data_ptr<T>() + layer * pages.stride(1)),
        page_stride(pages.stride(0)),
        kv_heads(pages.size(3)),
        block(pages.size(4)),
        dim(pages.size(5)) {}

  // Slot 0 of one of the 2 K planes of a page.
  T* plane(int64_t page, int64_t plane) const { return base + page * page_stride + plane * block * dim; }
};

void check(const at::Tensor& pages, int64_t layer, const at::Tensor& qkv) {
  TORCH_CHECK(pages.dim() == 6 && pages.is_contiguous() && layer >= 0 && layer < pages.size(1) && qkv.dim() == 3 &&
                  qkv.size(2) == pages.size(5) && qkv.stride(2) == 1 && qkv.stride(1) == pages.size(5) &&
                  qkv.scalar_type() == pages.scalar_type() && pages.size(5) % 2 == 0,
              "pages [P, L, 2, K, B, D] and qkv [T, H + 2K, D] of one dtype, D even");
}

template <typename F>
void for_dtype(const at::Tensor& pages, F&& f) {
  switch (pages.scalar_type()) {
    case at::kFloat:
      return f(0.0f);
    case at::kBFloat16:
      return f(c10::BFloat16());
    case at::kHalf:
      return f(c10::Half());
    default:
      TORCH_CHECK(false, "pages are float32, bfloat16 or float16, got ", pages.scalar_type());
  }
}

template <typename T>
void write(const Pages<T>& pages, const at::Tensor& qkv, const Step& step) {
  const int64_t planes = 2 * pages.kv_heads, dim = pages.dim;
  const int64_t heads = qkv.size(1) - planes, stride = qkv.stride(0);
  const T* rows = qkv.const_data_ptr<T>() + heads * dim;
  const auto one = [&](const Sequence& seq, const int32_t* ids, int64_t row) {
    const int64_t position = seq.start + row - seq.first, slot = position % pages.block;
    const bool clear = seq.fresh && row + 1 == seq.first + seq.length;
    for (int64_t plane = 0; plane < planes; plane++) {
      T* to = pages.plane(ids[position / pages.block], plane) + slot * dim;
      std::memcpy(to, rows + row * stride + plane * dim, dim * sizeof(T));
      if (clear) std::memset(static_cast<void*>(to + dim), 0, (pages.block - slot - 1) * dim * sizeof(T));
    }
  };
  const int64_t grain = std::max<int64_t>(1, 65536 / (planes * dim * static_cast<int64_t>(sizeof(T))));
  at::parallel_for(0, qkv.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < step.count; i++) {
      const Sequence& seq = step.sequences[i];
      const int64_t to = std::min<int64_t>(end, seq.first + seq.length);
      for (int64_t row = std::max<int64_t>(begin, seq.first); row < to; row++) one(seq, step.pages(i), row);
    }
  });
}

// Where the answers about a part of a context go: sums of values `[T, H, D]` that are divided by their weights, and the
// log of the sum of weights `[T, H]`. With `together` all queries of a sequence see the same tokens, its first one's.
struct Found {
  float* values = nullptr;
  float* lse = nullptr;
  bool together = false;
};

// A piece of work: a part of a decode row's context, or a block of a longer run of queries.
struct Piece {
  int32_t sequence, head, at;
};

template <typename T>
class Attend {
  using E = Element<T>;

 public:
  Attend(const at::Tensor& pages, int64_t layer, const at::Tensor& qkv, int64_t heads, const Step& step, double scale,
         int64_t window, int64_t chunk, double softcap, const float* sinks, T* out, const Found& found)
      : pages_(pages, layer),
        step_(step),
        qkv_(qkv.const_data_ptr<T>()),
        out_(out),
        found_(found),
        stride_(qkv.stride(0)),
        heads_(heads),
        group_(heads_ / pages_.kv_heads),
        dim_(pages_.dim),
        width_(round_up(dim_, 16 * PACK<E>)),
        words_(width_ / PACK<E>),
        staged_(!std::is_same_v<T, E> || width_ != dim_),
        unit_(std::is_same_v<T, c10::BFloat16> ? tile_unit() : nullptr),
        rows_(unit_ ? BANDS * ROWS : ROWS),
        window_(window),
        chunk_(chunk),
        sinks_(sinks),
        bend_{static_cast<float>(scale), static_cast<float>(softcap)} {}

  void run() {
    plan();
    const int64_t count = static_cast<int64_t>(pieces_.size());
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
      static thread_local Scratch scratch;
      const TileSession session(blocks_ ? unit_ : nullptr);
      for (int64_t i = next++, after; i < count; i = after) {
        scratch.reset(scratch_bytes());
        const Sequence& seq = step_.sequences[pieces_[i].sequence];
        if (seq.length == 1) {
          after = next++;
          row(pieces_[i], after < count ? &pieces_[after] : nullptr, scratch);
        } else {
          const int64_t rows = std::min(rows_, seq.length * group_ - pieces_[i].at);
          const auto work = unit_       ? &Attend::tiles
                            : rows > 48 ? &Attend::template block<4>
                            : rows > 32 ? &Attend::template block<3>
                            : rows > 16 ? &Attend::template block<2>
                                        : &Attend::template block<1>;
          (this->*work)(pieces_[i], seq, rows, scratch);
          after = next++;
        }
      }
    });
  }

 private:
  int64_t seen_from(int64_t position) const {
    if (chunk_) return position - position % chunk_;
    return window_ ? std::max<int64_t>(0, position - window_ + 1) : 0;
  }

  int64_t parts(const Sequence& seq) const {
    return (seq.start + 1 - seen_from(seq.start) + PART - 1) / PART;
  }

  // Long pieces first, so that the threads end together. How work is cut depends on one sequence alone: an answer is
  // the same to the last bit in any batch and on any number of threads.
  void plan() {
    const int32_t heads = static_cast<int32_t>(pages_.kv_heads);
    for (int32_t s = 0; s < step_.count; s++) {
      const int64_t rows = step_.sequences[s].length * group_;
      if (step_.sequences[s].length == 1) continue;
      for (int32_t head = 0; head < heads; head++)
        for (int64_t at = (rows - 1) / rows_ * rows_; at >= 0; at -= rows_)
          pieces_.push_back({s, head, static_cast<int32_t>(at)});
    }
    blocks_ = !pieces_.empty();
    partials_of_.assign(step_.count, 0);
    int64_t partials = 0;
    for (int32_t s = 0; s < step_.count; s++) {
      if (step_.sequences[s].length != 1) continue;
      const int64_t count = parts(step_.sequences[s]);
      partials_of_[s] = partials;
      if (count > 1) partials += count * heads;
      for (int32_t part = 0; part < count; part++)
        for (int32_t head = 0; head < heads; head++) pieces_.push_back({s, head, part});
    }
    if (!partials) return;
    static thread_local Scratch kept;
    kept.reset(partials * partial_floats() * static_cast<int64_t>(sizeof(float)));
    partials_ = kept.take<float>(partials * partial_floats());
    left_ = std::make_unique<std::atomic<int64_t>[]>(step_.count * heads);
    for (int64_t s = 0; s < step_.count; s++)
      for (int32_t head = 0; head < heads; head++)
        left_[s * heads + head] = step_.sequences[s].length == 1 ? parts(step_.sequences[s]) : 0;
  }

  // A part's answer: accumulators [group, width], then each head's largest score and sum of weights.
  int64_t partial_floats() const { return round_up(group_ * (width_ + 2), 16); }

  int64_t scratch_bytes() const { return blocks_ && unit_ ? std::max(without_tiles(), tile_bytes()) : without_tiles(); }

  int64_t tile_bytes() const {
    const int64_t band = sizeof(Running) + 4 * ROWS * (words_ + width_);
    return BANDS * band + 4 * STRETCH * ROWS + 2 * 2 * STRETCH * width_ + 2 * 8 * STRETCH + 64 * 16;
  }

  int64_t without_tiles() const {
    const int64_t tokens = std::max(TILE, PART), queries = std::max(ROWS, group_);
    const int64_t words = queries * (words_ + width_) + (TILE + SIX) * ROWS + group_ * PART +
                          TILE / 2 * round_up(width_, 64) + width_;
    return 4 * words + (tokens + AHEAD) * (3 * 8 + 2 * width_ * static_cast<int64_t>(sizeof(E))) + sizeof(Running) +
           64 * 16 + 4 * partial_floats();
  }

  // `width` elements from `dim`, the rest zeros.
  void stage(const T* from, E* to) const {
    each16(dim_, [&](int64_t d, __mmask16 m) { store(to + d, load(from + d, m), m); });
    std::fill(to + dim_, to + width_, E(0.0f));
  }

  // Pointers to K and V of tokens [begin, end), in the pages or, where these are not what the loops take, in scratch.
  void find(const int32_t* ids, int64_t head, int64_t begin, int64_t end, Scratch& scratch, const E** k,
            const E** v) const {
    E* staged = staged_ ? scratch.take<E>(2 * (end - begin) * width_) : nullptr;
    for (int64_t t = begin; t < end;) {
      const int64_t page = ids[t / pages_.block], slot = t % pages_.block;
      const T* keys = pages_.plane(page, head) + slot * dim_;
      const T* values = pages_.plane(page, pages_.kv_heads + head) + slot * dim_;
      const int64_t run = std::min(pages_.block - slot, end - t);
      for (int64_t i = 0; i < run; i++, t++) {
        if constexpr (std::is_same_v<T, E>) {
          k[t - begin] = keys + i * dim_;
          v[t - begin] = values + i * dim_;
        }
        if (staged) {
          stage(keys + i * dim_, staged);
          stage(values + i * dim_, staged + width_);
          k[t - begin] = staged;
          v[t - begin] = staged + width_;
          staged += 2 * width_;
        }
      }
    }
  }

  // Pointers to the first AHEAD keys of a decode row's piece, where they lie in the pages.
  void foresee(const Piece& piece, const E** k) const {
    const int32_t* ids = step_.pages(piece.sequence);
    const auto [begin, end] = tokens(piece);
    for (int64_t i = 0; i < AHEAD; i++) {
      const int64_t t = std::min(begin + i, end - 1);
      k[i] = reinterpret_cast<const E*>(pages_.plane(ids[t / pages_.block], piece.head) + t % pages_.block * dim_);
    }
  }

  const T* query(int64_t row, int64_t head) const { return qkv_ + row * stride_ + head * dim_; }

  void put(int64_t row, int64_t head, const float* o, float top, float sum) const {
    const __m512 scale = _mm512_set1_ps(1.0f / sum);
    if (found_.lse) {
      float* to = found_.values + (row * heads_ + head) * dim_;
      found_.lse[row * heads_ + head] = (top + std::log2(sum)) / LOG2E;
      each16(dim_, [&](int64_t d, __mmask16 m) { store(to + d, _mm512_mul_ps(load(o + d, m), scale), m); });
      return;
    }
    T* to = out_ + (row * heads_ + head) * dim_;
    each16(dim_, [&](int64_t d, __mmask16 m) { store(to + d, _mm512_mul_ps(load(o + d, m), scale), m); });
  }

  // The tokens of a decode row's piece.
  std::pair<int64_t, int64_t> tokens(const Piece& piece) const {
    const int64_t last = step_.sequences[piece.sequence].start, begin = seen_from(last) + piece.at * PART;
    return {begin, std::min<int64_t>(begin + PART, last + 1)};
  }

  // `next` is what this thread does afterwards: its first keys are fetched while this one's last values are summed.
  void row(const Piece& piece, const Piece* next, Scratch& scratch) const {
    const Sequence& seq = step_.sequences[piece.sequence];
    const int64_t count = parts(seq);
    const auto [begin, end] = tokens(piece);
    const int64_t n = end - begin;
    const E **k = scratch.take<const E*>(2 * PART + AHEAD), **v = k + n;
    find(step_.pages(piece.sequence), piece.head, begin, end, scratch, k, v);
    std::fill_n(v + n, AHEAD, v[n - 1]);
    if (next && !staged_) foresee(*next, v + n);
    float* q = scratch.take<float>(group_ * words_);
    for (int64_t g = 0; g < group_; g++)
      stage(query(seq.first, piece.head * group_ + g), reinterpret_cast<E*>(q + g * words_));
    float* s = scratch.take<float>(group_ * PART);
    row_scores(q, group_, k, n, words_, s);
    const int64_t mine = (partials_of_[piece.sequence] + piece.at * pages_.kv_heads + piece.head) * partial_floats();
    float* o = count > 1 ? partials_ + mine : scratch.take<float>(partial_floats());
    float *top = o + group_ * width_, *sum = top + group_;
    for (int64_t g = 0; g < group_; g++) row_weights(s + g * PART, n, bend_, top[g], sum[g]);
    row_values(s, group_, v, n, o, width_);
    if (count > 1) {
      if (left_[piece.sequence * pages_.kv_heads + piece.head].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      o = scratch.take<float>(partial_floats());
      join(partials_ + mine - piece.at * pages_.kv_heads * partial_floats(), count, o);
      top = o + group_ * width_;
      sum = top + group_;
    }
    if (sinks_)  // once, whatever the context was cut into
      for (int64_t g = 0; g < group_; g++) sum[g] += std::exp2(sinks_[piece.head * group_ + g] * LOG2E - top[g]);
    for (int64_t g = 0; g < group_; g++) put(seq.first, piece.head * group_ + g, o + g * width_, top[g], sum[g]);
  }

  // One softmax over all parts, in their order.
  void join(const float* partials, int64_t count, float* o) const {
    const int64_t apart = pages_.kv_heads * partial_floats(), tops = group_ * width_;
    std::fill(o, o + partial_floats(), 0.0f);
    for (int64_t g = 0; g < group_; g++) {
      float top = NEVER;
      for (int64_t i = 0; i < count; i++) top = std::max(top, partials[i * apart + tops + g]);
      o[tops + g] = top;
      for (int64_t i = 0; i < count; i++) {
        const float* part = partials + i * apart;
        const float weight = std::exp2(part[tops + g] - top);
        o[tops + group_ + g] += weight * part[tops + group_ + g];
        for (int64_t d = 0; d < width_; d++) o[g * width_ + d] += weight * part[g * width_ + d];
      }
    }
  }

  // Queries as words [depth][lanes], and their softmax before any token, of the sink alone; `line` is room for one query. Inlined, so that
  // `lanes` is a constant in `block`.
  [[gnu::always_inline]] void begin(const Piece& piece, const Sequence& seq, int64_t rows, int64_t lanes, Running& run,
                                    float* q, E* line) const {
    for (int64_t r = 0; r < lanes; r++) {
      const int64_t at = piece.at + std::min(r, rows - 1);  // lanes without a query repeat the last one
      stage(query(seq.first + at / group_, piece.head * group_ + at % group_), line);
      for (int64_t d = 0; d < words_; d++) q[d * lanes + r] = reinterpret_cast<const float*>(line)[d];
      run.last[r] = static_cast<int32_t>(seq.start + (found_.together ? 0 : at / group_));
      run.before[r] = static_cast<int32_t>(seen_from(run.last[r]) - 1);
      run.top[r] = sinks_ ? sinks_[piece.head * group_ + at % group_] * LOG2E : NEVER;
      run.sum[r] = sinks_ ? 1.0f : 0.0f;
    }
  }

  template <int MV>
  void block(const Piece& piece, const Sequence& seq, int64_t rows, Scratch& scratch) const {
    constexpr int64_t LANES = 16 * MV;
    Running& run = *scratch.take<Running>(1);
    float* q = scratch.take<float>(words_ * LANES);
    begin(piece, seq, rows, LANES, run, q, scratch.take<E>(width_));
    float* s = scratch.take<float>((TILE + SIX) * LANES);
    float* o = scratch.take<float>(LANES * width_);
    std::fill(o, o + LANES * width_, 0.0f);
    const float** words = scratch.take<const float*>(TILE);
    float* paired = PACK<E> == 2 ? scratch.take<float>(TILE / 2 * round_up(width_, 64)) : nullptr;
    const E **k = scratch.take<const E*>(2 * TILE), **v = scratch.take<const E*>(2 * TILE);
    const int64_t end = run.last[rows - 1] + 1;
    for (int64_t t = seen_from(run.last[0]) / TILE * TILE; t < end; t += TILE) {
      const int64_t n = std::min(TILE, end - t);
      Scratch::Mark mark(scratch);
      const int64_t next = staged_ ? 0 : std::min(TILE, end - t - n);
      find(step_.pages(piece.sequence), piece.head, t, t + n + next, scratch, k, v);
      __m512 most[MV];
      block_scores<E, MV>(q, k, v, n, next, words_, s, most);
      const bool masked = t + n - 1 > run.last[0] || t < seen_from(run.last[rows - 1]);
      block_weights<E, MV>(s, most, t, n, bend_, window_ || chunk_, masked, run);
      const int64_t steps = (n + PACK<E> - 1) / PACK<E>;
      for (int64_t i = 0; i < steps; i++) {
        if constexpr (PACK<E> == 2) {
          words[i] = paired + i * 64;
          pair_values(v[2 * i], 2 * i + 1 < n ? v[2 * i + 1] : nullptr, width_, paired + i * 64);
        } else {
          words[i] = v[i];
        }
      }
      block_values<E>(s, LANES, words, steps, round_up(rows, 2), run.fade, o, width_);
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = piece.at + r;
      put(seq.first + at / group_, piece.head * group_ + at % group_, o + r * width_, run.top[r], run.sum[r]);
    }
  }

  // The same on AMX tiles: bands of up to ROWS queries meet the context together.
  void tiles(const Piece& piece, const Sequence& seq, int64_t rows, Scratch& scratch) const {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      Band bands[BANDS];
      const int64_t count = (rows + ROWS - 1) / ROWS;
      float* s = scratch.take<float>(STRETCH * ROWS);
      for (int64_t b = 0; b < count; b++) {
        const int64_t height = std::min(ROWS, rows - b * ROWS), lanes = round_up(height, 16);
        bands[b] = {scratch.take<Running>(1), scratch.take<uint32_t>(words_ * lanes),
                    scratch.take<float>(width_ * lanes), height, lanes};
        std::fill(bands[b].o, bands[b].o + width_ * lanes, 0.0f);
        const Piece part{piece.sequence, piece.head, static_cast<int32_t>(piece.at + b * ROWS)};
        begin(part, seq, height, lanes, *bands[b].run, reinterpret_cast<float*>(bands[b].q), reinterpret_cast<E*>(s));
      }
      auto* turned = scratch.take<uint32_t>(STRETCH / 2 * width_);
      E* staged = scratch.take<E>(STRETCH * width_);
      const E** v = scratch.take<const E*>(STRETCH);
      const void** k = scratch.take<const void*>(STRETCH / TILE_ROWS);
      const bool direct = width_ == dim_ && pages_.block % TILE_ROWS == 0;
      const int64_t end = bands[count - 1].run->last[bands[count - 1].rows - 1] + 1;
      for (int64_t t = seen_from(bands[0].run->last[0]) / STRETCH * STRETCH; t < end; t += STRETCH) {
        const int64_t n = std::min(STRETCH, end - t);
        meet(step_.pages(piece.sequence), piece.head, t, n, direct ? nullptr : staged, k, v);
        turn_values(v, n, dim_, width_, turned);
        for (int64_t b = 0; b < count; b++) {
          Running& run = *bands[b].run;
          const int32_t oldest = run.last[0], newest = run.last[bands[b].rows - 1];
          const int64_t seen = std::min<int64_t>(n, newest + 1 - t);
          if (seen <= 0 || t + n <= seen_from(oldest)) continue;
          band_scores(*unit_, bands[b], k, 2 * width_, seen, width_, s);
          const bool masked = t + seen - 1 > oldest || t < seen_from(newest);
          BAND_WEIGHTS[bands[b].lanes / 16 - 1](s, t, seen, bend_, window_ || chunk_, masked, run);
          band_values(*unit_, bands[b], turned, s, seen, width_);
        }
      }
      for (int64_t b = 0; b < count; b++) put_band(piece.at + b * ROWS, piece.head, seq, bands[b]);
    }
  }

  // Where tokens [t, t + n) lie: the first key of every sixteen, whose rows follow each other in a page or, copied, in
  // `staged` (not null), and each one's values.
  void meet(const int32_t* ids, int64_t head, int64_t t, int64_t n, E* staged, const void** k, const E** v) const {
    for (int64_t i = 0; i < n; i++) {
      const int64_t page = ids[(t + i) / pages_.block], slot = (t + i) % pages_.block;
      const T* key = pages_.plane(page, head) + slot * dim_;
      v[i] = reinterpret_cast<const E*>(pages_.plane(page, pages_.kv_heads + head) + slot * dim_);
      if (staged) stage(key, staged + i * width_);
      if (i % TILE_ROWS == 0) k[i / TILE_ROWS] = staged ? static_cast<const void*>(staged + i * width_) : key;
    }
  }

  // Sixteen queries by sixteen columns at a time, turned back.
  void put_band(int64_t at, int64_t head, const Sequence& seq, const Band& band) const {
    for (int64_t lane = 0; lane < band.rows; lane += 16) {
      const __m512 scale = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(band.run->sum + lane));
      for (int64_t d = 0; d < dim_; d += 16) {
        __m512i v[16];
        for (int64_t i = 0; i < 16; i++)
          v[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(band.o + (d + i) * band.lanes + lane), scale));
        transpose(v);
        for (int64_t i = 0; i < std::min<int64_t>(16, band.rows - lane); i++) {
          const int64_t row = (at + lane + i) / group_, h = head * group_ + (at + lane + i) % group_;
          const int64_t place = (seq.first + row) * heads_ + h;
          if (found_.lse) {
            store(found_.values + place * dim_ + d, _mm512_castsi512_ps(v[i]), first(dim_ - d));
            found_.lse[place] = (band.run->top[lane + i] + std::log2(band.run->sum[lane + i])) / LOG2E;
          } else {
            store(out_ + place * dim_ + d, _mm512_castsi512_ps(v[i]), first(dim_ - d));
          }
        }
      }
    }
  }

  const Pages<T> pages_;
  const Step step_;
  const T* qkv_;
  T* out_;
  const Found found_;  // in place of out_ where it asks for the log of the sums
  const int64_t stride_, heads_, group_;
  const int64_t dim_, width_, words_;  // elements of a head, padded to whole registers, and words of the latter
  const bool staged_;
  const TileUnit* const unit_;  // for blocks of queries
  const int64_t rows_;          // (query, head) pairs of such a block
  const int64_t window_, chunk_;  // at most one is not 0
  const float* const sinks_;      // of each query head, or null
  const Bend bend_;
  std::vector<Piece> pieces_;
  bool blocks_ = false;  // the first pieces are blocks of queries
  std::vector<int64_t> partials_of_;  // of each sequence whose context is cut: its first one
  float* partials_ = nullptr;
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // parts that are not done, by (sequence, head)
};

}  // namespace
}  // namespace attention

void write_kv(at::Tensor pages, int64_t layer, const at::Tensor& qkv, const at::Tensor& sequences,
              const at::Tensor& table) {
  attention::check(pages, layer, qkv);
  const attention::Step step = attention::step_of(sequences, table, qkv.size(0));
  attention::for_dtype(pages, [&]<typename T>(T) { attention::write(attention::Pages<T>(pages, layer), qkv, step); });
}

at::Tensor paged_attention(const at::Tensor& pages, int64_t layer, const at::Tensor& qkv, const at::Tensor& sequences,
                           const at::Tensor& table, double scale, int64_t window, int64_t chunk, double softcap,
                           const std::optional<at::Tensor>& sinks) {
  attention::check(pages, layer, qkv);
  const attention::Step step = attention::step_of(sequences, table, qkv.size(0));
  const int64_t heads = qkv.size(1) - 2 * pages.size(3);
  TORCH_CHECK(heads > 0 && heads % pages.size(3) == 0, heads, " query heads over ", pages.size(3), " KV heads");
  TORCH_CHECK(scale > 0, "scale is ", scale, ", must be positive");
  TORCH_CHECK(!window || !chunk, "a layer has a window or a chunk, not both");
  TORCH_CHECK(!sinks || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous() && sinks->numel() == heads),
              "sinks [H] are float32");
  at::Tensor out = at::empty({qkv.size(0), heads * pages.size(5)}, qkv.options());
  attention::for_dtype(pages, [&]<typename T>(T) {
    const float* of_heads = sinks ? sinks->const_data_ptr<float>() : nullptr;
    attention::Attend<T>(pages, layer, qkv, heads, step, scale, window, chunk, softcap, of_heads, out.data_ptr<T>(), {})
        .run();
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> paged_parts(const at::Tensor& pages, int64_t layer, const at::Tensor& q,
                                               const at::Tensor& sequences, const at::Tensor& table, double scale,
                                               double softcap, bool together) {
  attention::check(pages, layer, q);
  const attention::Step step = attention::step_of(sequences, table, q.size(0), false);
  const int64_t heads = q.size(1);
  TORCH_CHECK(heads > 0 && heads % pages.size(3) == 0, heads, " query heads over ", pages.size(3), " KV heads");
  TORCH_CHECK(scale > 0, "scale is ", scale, ", must be positive");
  int64_t asking = 0;
  for (int64_t i = 0; i < step.count; i++) asking += step.sequences[i].length;
  const auto options = q.options().dtype(at::kFloat);
  const bool all = asking == q.size(0);
  const std::vector<int64_t> shape{q.size(0), heads, q.size(2)};
  at::Tensor out = all ? at::empty(shape, options) : at::zeros(shape, options);
  at::Tensor lse = all ? at::empty({q.size(0), heads}, options) : at::full({q.size(0), heads}, attention::NEVER, options);
  attention::for_dtype(pages, [&]<typename T>(T) {
    const attention::Found found{out.data_ptr<float>(), lse.data_ptr<float>(), together};
    attention::Attend<T>(pages, layer, q, heads, step, scale, 0, 0, softcap, nullptr, nullptr, found).run();
  });
  return {out, lse};
}

}  // namespace kvmesh
