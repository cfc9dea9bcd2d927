// Read bandwidth and bfloat16 products per second; see limits.py.
#include <immintrin.h>
#include <omp.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#endif

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

volatile long sink;

long sum(const char* from, size_t bytes) {
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t at = 0; at + 256 <= bytes; at += 256) {
    const char* p = from + at;
    for (int line = 0; line < 4; ++line) _mm_prefetch(p + 4096 + 64 * line, _MM_HINT_T0);
    a = _mm512_add_epi64(a, _mm512_load_si512(p));
    b = _mm512_add_epi64(b, _mm512_load_si512(p + 64));
    c = _mm512_add_epi64(c, _mm512_load_si512(p + 128));
    d = _mm512_add_epi64(d, _mm512_load_si512(p + 192));
  }
  return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
#else
  long total = 0;
  for (size_t at = 0; at + 8 <= bytes; at += 8) total += *reinterpret_cast<const long*>(from + at);
  return total;
#endif
}

#if defined(__AMX_BF16__)
struct alignas(64) Tiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Tiles kTiles;  // not a local: the intrinsic tells the compiler of its first bytes only

double products(long rounds) {  // FLOP done
  syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, tile data
  _tile_loadconfig(&kTiles);
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * rounds * 2 * 16 * 16 * 32;
}
constexpr long kRounds = 400000;
#elif defined(__AVX512BF16__)
double products(long rounds) {
  __m512 c[12];
  for (auto& x : c) x = _mm512_setzero_ps();
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (long i = 0; i < rounds; ++i) {
    for (auto& x : c) x = _mm512_dpbf16_ps(x, a, a);
    asm volatile("" : "+v"(a));
  }
  float total = 0;
  for (auto& x : c) total += _mm512_reduce_add_ps(x);
  sink = static_cast<long>(total);
  return 12.0 * rounds * 64;
}
constexpr long kRounds = 15000000;
#else
double products(long rounds) {
  __m256 c[12];
  for (auto& x : c) x = _mm256_setzero_ps();
  __m256 a = _mm256_set1_ps(1.0f);
  for (long i = 0; i < rounds; ++i) {
    for (auto& x : c) x = _mm256_fmadd_ps(a, a, x);
    asm volatile("" : "+x"(a));
  }
  float total = 0;
  for (auto& x : c) total += x[0];
  sink = static_cast<long>(total);
  return 12.0 * rounds * 16;
}
constexpr long kRounds = 15000000;
#endif

}  // namespace

extern "C" double read_bytes_s(int threads, size_t bytes) {
  static char* memory = nullptr;
  static size_t have = 0;
  if (have < bytes) {
    std::free(memory);
    memory = static_cast<char*>(std::aligned_alloc(2 << 20, bytes));
    std::memset(memory, 1, bytes);
    have = bytes;
  }
  const size_t part = bytes / threads / 4096 * 4096;
  long total = 0;
  const double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += sum(memory + part * omp_get_thread_num(), part);
  const double seconds = now() - start;
  sink = total;
  return part * threads / seconds;
}

extern "C" double bf16_flops(int threads) {
  double done = 0;
  const double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : done)
  done += products(kRounds);
  return done / (now() - start);
}
