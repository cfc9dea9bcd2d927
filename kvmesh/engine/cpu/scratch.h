// Memory that a thread works in.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace kvmesh {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch of one thread, kept from call to call; pointers are aligned to a cache line.
class Scratch {
 public:
  // Begins anew with room for `bytes`.
  void reset(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, round_up(bytes, 4096))));
      size_ = memory_ ? round_up(bytes, 4096) : 0;
      TORCH_CHECK(memory_, "no memory for ", bytes, " bytes of scratch");
    }
    used_ = 0;
  }

  // What is taken while a Mark lives is free again afterwards.
  struct Mark {
    explicit Mark(Scratch& scratch) : scratch_(scratch), used_(scratch.used_) {}
    ~Mark() { scratch_.used_ = used_; }
    Scratch& scratch_;
    int64_t used_;
  };

  template <typename X>
  X* take(int64_t count) {
    char* at = memory_.get() + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(X)), 64);
    TORCH_INTERNAL_ASSERT(used_ <= size_);
    return reinterpret_cast<X*>(at);
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace kvmesh
