// Runs one norm's kernel over a shape: the work of each thread, and the sums that cross threads.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/tile.h"
#include "xla/ffi/api/ffi.h"

namespace normfuse {

// One buffer for `count` elements, or null when there is no memory for it.
template <typename T>
std::unique_ptr<T[]> Allocate(int64_t count) {
  return std::unique_ptr<T[]>(new (std::nothrow) T[count]);
}

inline xla::ffi::Error OutOfMemory() {
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                         "normfuse: no memory for the partial sums");
}

// Calls fn(offset, feature, tile) for each tile of the given lines and features: `offset` counts
// elements from the start of the array, `feature` is the first of the tile.
template <typename C, typename F>
void ForEachTile(const Shape& shape, const Range& lines, const Range& features, const F& fn) {
  const int64_t outer = lines.begin / shape.inner, column = lines.begin % shape.inner;
  const bool dense = lines.size() == shape.inner || shape.inner == 1;
  const int64_t step = dense ? std::max<int64_t>(1, kTileSize<C> / lines.size()) : 1;
  for (int64_t feature = features.begin; feature < features.end; feature += step) {
    const int64_t size = std::min(step, features.end - feature);
    Tile<C> tile{size, lines.size(), true};
    if (shape.inner == 1) tile = {lines.size(), size, false};
    tile.n = shape.n, tile.heads = shape.heads, tile.line = lines.begin;
    fn((outer * shape.n + feature) * shape.inner + column, feature, tile);
  }
}

// kCount numbers of each line, as they lie, as so many arrays.
template <typename C, int kCount>
struct Unzipped {
  C at[kCount][kGroupLines];

  Unzipped(const C* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (int k = 0; k < kCount; ++k) at[k][i] = values[kCount * i + k];
    }
  }
};

// A kernel has a `shape`, kSums and kValues (of a line, next to each other), kColumns (sums over
// lines), and the const methods
//   bool reduces()                                          whether it sums along lines
//   void Reduce(lines, features, double* sums)              adds to the sums of each line
//   void Finish(lines, const double* sums, C* values)       the values of each line for Apply
//   bool applies()                                          whether there is an Apply
//   void Apply(lines, features, const C* values, C* columns)
//   C* column_sums(int which)                               (heads, n), or null
// `sums`, `values` and `columns` start at the first line or feature given; in `columns`, which is
// null where no sums over lines are wanted, one sum's features, and one head's, are n after
// another's.
template <typename C, typename Kernel>
class Runner {
 public:
  Runner(const Kernel& kernel, xla::ffi::ThreadPool& pool)
      : kernel_(kernel), plan_(shape_, kTileSize<C>, HasColumns(kernel)), pool_(pool) {}

  xla::ffi::Error Run() {
    if (HasColumns(kernel_) && (plan_.blocks() != 1 || kColumns != 1)) {
      partials_ = Allocate<C>(plan_.blocks() * rows_ * shape_.n);
      if (!partials_) return OutOfMemory();
    }
    if (plan_.segments() == 1) {
      For(plan_.blocks(), [this](int64_t block) { WholeLines(block); });
    } else if (!SegmentsOfLines()) {
      return OutOfMemory();
    }
    if (partials_) SumPartials();
    return xla::ffi::Error::Success();
  }

  static bool HasColumns(const Kernel& kernel) {
    for (int k = 0; k < kColumns; ++k) {
      if (kernel.column_sums(k) != nullptr) return true;
    }
    return false;
  }

 private:
  static constexpr int kColumns = Kernel::kColumns;
  static constexpr int kSums = Kernel::kSums, kValues = Kernel::kValues;

  template <typename F>
  void For(int64_t count, const F& body) {
    if (!plan_.small()) return ParallelFor(pool_, count, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  // Returns a block's sums over its lines, with the given features set to zero.
  C* Partial(int64_t block, const Range& features) const {
    C* row = partials_ ? partials_.get() + block * rows_ * shape_.n : kernel_.column_sums(0);
    if (row == nullptr) return nullptr;
    for (int64_t k = 0; k < rows_; ++k) {
      std::fill_n(row + k * shape_.n + features.begin, features.size(), C{0});
    }
    return row + features.begin;
  }

  void WholeLines(int64_t block) const {
    const Range features{0, shape_.n}, groups = plan_.Groups(block);
    C* partial = Partial(block, features);
    double sums[kGroupLines * kSums];
    C values[kGroupLines * kValues];
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const Range lines = plan_.Lines(group);
      std::fill_n(sums, lines.size() * kSums, 0.0);
      if (kernel_.reduces()) kernel_.Reduce(lines, features, sums);
      kernel_.Finish(lines, sums, values);
      if (kernel_.applies()) kernel_.Apply(lines, features, values, partial);
    }
  }

  // Few and long lines: a pass for the sums, of (group, segment) each, and a second over the same.
  bool SegmentsOfLines() {
    const int64_t count = shape_.lines() * kSums, segments = plan_.segments();
    const int64_t groups = plan_.Groups(plan_.blocks() - 1).end;
    auto sums = Allocate<double>((segments + 1) * count);
    auto values = Allocate<C>(shape_.lines() * kValues);
    if (!sums || !values) return false;
    std::fill(sums.get(), sums.get() + (segments + 1) * count, 0.0);
    double* total = sums.get() + segments * count;
    if (kernel_.reduces()) {
      For(groups * segments, [&](int64_t i) {
        const Range lines = plan_.Lines(i / segments);
        double* at = sums.get() + i % segments * count + lines.begin * kSums;
        kernel_.Reduce(lines, plan_.Features(i % segments), at);
      });
      for (int64_t i = 0; i < segments * count; ++i) total[i % count] += sums[i];
    }
    kernel_.Finish({0, shape_.lines()}, total, values.get());
    if (!kernel_.applies()) return true;
    For(plan_.blocks() * segments, [&](int64_t i) {
      const Range features = plan_.Features(i % segments), block = plan_.Groups(i / segments);
      C* partial = Partial(i / segments, features);
      for (int64_t group = block.begin; group < block.end; ++group) {
        const Range lines = plan_.Lines(group);
        kernel_.Apply(lines, features, values.get() + lines.begin * kValues, partial);
      }
    });
    return true;
  }

  void SumPartials() {
    static constexpr int64_t kStep = 512;
    const int64_t steps = CeilDiv(shape_.n, kStep);
    For(steps * rows_, [&](int64_t i) {
      const int64_t which = i / steps;
      C* result = kernel_.column_sums(which / shape_.heads);
      if (result == nullptr) return;
      result += which % shape_.heads * shape_.n;
      const int64_t begin = i % steps * kStep, size = std::min(kStep, shape_.n - begin);
      double sums[kStep] = {};
      for (int64_t block = 0; block < plan_.blocks(); ++block) {
        const C* row = partials_.get() + (block * rows_ + which) * shape_.n + begin;
        for (int64_t j = 0; j < size; ++j) sums[j] += row[j];
      }
      for (int64_t j = 0; j < size; ++j) result[begin + j] = static_cast<C>(sums[j]);
    });
  }

  const Kernel& kernel_;
  const Shape shape_ = kernel_.shape;
  const int64_t rows_ = kColumns * shape_.heads;  // a block has so many rows of n sums
  const Plan plan_;
  xla::ffi::ThreadPool& pool_;
  std::unique_ptr<C[]> partials_;
};

template <typename C, typename Kernel>
xla::ffi::Error Run(const Kernel& kernel, xla::ffi::ThreadPool& pool) {
  if (kernel.shape.lines() > 0) return Runner<C, Kernel>(kernel, pool).Run();
  for (int k = 0; k < Kernel::kColumns; ++k) {
    if (C* sums = kernel.column_sums(k)) {
      std::fill_n(sums, kernel.shape.heads * kernel.shape.n, C{0});
    }
  }
  return xla::ffi::Error::Success();
}

}  // namespace normfuse
