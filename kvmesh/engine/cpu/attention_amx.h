// The loops of a bfloat16 prompt's attention on AMX tiles, with the softmax of attention_tiles.h between them. Queries are
// columns everywhere: products are K·Qᵀ and Vᵀ·Pᵀ. So keys are read as they lie in the pages, sixteen tokens as the rows
// of a tile; Q and P come in words of two neighbours, as the softmax reads and writes them, which are right-hand tiles as
// they are; only V is turned, once for all bands of a block.
#pragma once

#include "attention_tiles.h"
#include "tiles.h"

namespace kvmesh::attention {

constexpr int64_t BANDS = 4;     // of ROWS (query, head) pairs that share turned values
constexpr int64_t STRETCH = 128;  // tokens of context that they meet at once, a multiple of TILE_DEPTH
constexpr int64_t TILE_BYTES = 1024;

// Of a band's queries: q [depth][lanes] words, o [width][lanes], s [STRETCH][lanes]; lanes are a multiple of 16.
struct Band {
  Running* run;
  uint32_t* q;
  float* o;
  int64_t rows, lanes;
};

// Values of tokens [0, n) as left-hand tiles, 16 columns by 32 tokens each: [width / 16][STRETCH / 32]. Columns from `dim`
// on and tokens from n to the next 32 are zeros.
inline void turn_values(const c10::BFloat16* const* v, int64_t n, int64_t dim, int64_t width, uint32_t* turned) {
  for (int64_t d = 0; d < width; d += 16) {
    const __mmask16 some = d < dim ? first(dim - d) : 0;
    const auto column = [&](int64_t t) {
      return t < n ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, v[t] + d)) : _mm512_setzero_si512();
    };
    uint32_t* to = turned + d / 16 * (STRETCH / TILE_DEPTH) * (TILE_BYTES / 4);
    for (int64_t t = 0; t < n; t += TILE_DEPTH, to += TILE_BYTES / 4) {
      __m512i words[16];
      for (int64_t i = 0; i < 16; i++)
        words[i] = _mm512_or_si512(column(t + 2 * i), _mm512_slli_epi32(column(t + 2 * i + 1), 16));
      transpose(words);
      for (int64_t i = 0; i < 16; i++) _mm512_store_si512(to + i * 16, words[i]);
    }
  }
}

// f(column tiles, first lane) for pairs of column tiles, and a last one alone.
template <typename F>
inline void each_columns(int64_t lanes, F&& f) {
  int64_t lane = 0;
  for (; lanes - lane >= 32; lane += 32) f(2, lane);
  if (lane < lanes) f(1, lane);
}

// s[t][lane] = k[t]·q[lane] for t < n, and further rows to the end of a tile that mean nothing; `keys` are the first ones
// of sixteen tokens each, whose rows lie `stride` bytes apart.
inline void band_scores(const TileUnit& unit, const Band& band, const void* const* keys, int64_t stride, int64_t n,
                        int64_t width, float* s) {
  for (int64_t t = 0; t < n; t += 2 * TILE_ROWS) {
    const int tall = n - t > TILE_ROWS;
    const void* const* at = keys + t / TILE_ROWS;
    const LeftTiles left{{at[0], at[tall]}, stride, TILE_DEPTH * 2};
    each_columns(band.lanes, [&](int wide, int64_t lane) {
      unit.product[tall][wide - 1](left, band.q + lane, band.lanes, width / TILE_DEPTH, s + t * band.lanes + lane,
                                   band.lanes, false);
    });
  }
}

// The weights of n scores, as words of two tokens each, zeros from n to the next 32.
template <int MV>
void band_weights(float* s, int64_t t0, int64_t n, Bend bend, bool bounded, bool masked, Running& run) {
  __m512 most[MV];
  for (int m = 0; m < MV; m++) {
    most[m] = _mm512_set1_ps(NEVER);
    for (int64_t t = 0; t < n; t++) most[m] = _mm512_max_ps(most[m], _mm512_load_ps(s + (t * MV + m) * 16));
  }
  block_weights<c10::BFloat16, MV>(s, most, t0, n, bend, bounded, masked, run);
  const int64_t pairs = (n + 1) / 2, whole = (n + TILE_DEPTH - 1) / TILE_DEPTH * (TILE_DEPTH / 2);
  std::fill(s + pairs * MV * 16, s + whole * MV * 16, 0.0f);
}

using BandWeights = void (*)(float*, int64_t, int64_t, Bend, bool, bool, Running&);
constexpr BandWeights BAND_WEIGHTS[] = {band_weights<1>, band_weights<2>, band_weights<3>, band_weights<4>};

// o[d][lane] = o[d][lane] * fade[lane] + Σ v[t][d] p[t][lane] for t < n.
inline void band_values(const TileUnit& unit, const Band& band, const uint32_t* turned, const float* p, int64_t n,
                        int64_t width) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t lane = 0; lane < band.lanes; lane += 16) {
    const __m512 fade = _mm512_load_ps(band.run->fade + lane);
    if (_mm512_cmp_ps_mask(fade, one, _CMP_NEQ_UQ) == 0) continue;
    for (int64_t d = 0; d < width; d++) {
      float* o = band.o + d * band.lanes + lane;
      _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), fade));
    }
  }
  const int64_t row_bytes = STRETCH / TILE_DEPTH * TILE_BYTES;
  for (int64_t d = 0; d < width; d += 2 * TILE_ROWS) {
    const char* at = reinterpret_cast<const char*>(turned) + d / TILE_ROWS * row_bytes;
    const LeftTiles left{{at, at + row_bytes}, 64, TILE_BYTES};
    each_columns(band.lanes, [&](int wide, int64_t lane) {
      unit.product[1][wide - 1](left, reinterpret_cast<const uint32_t*>(p) + lane, band.lanes,
                                (n + TILE_DEPTH - 1) / TILE_DEPTH, band.o + d * band.lanes + lane, band.lanes, true);
    });
  }
}

}  // namespace kvmesh::attention
