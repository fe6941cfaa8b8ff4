// Runs one RMSNorm kernel over a shape: which thread does what, and the sums that cross threads.
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
    fn((outer * shape.n + feature) * shape.inner + column, feature, tile);
  }
}

// A kernel has a `shape`, and the const methods
//   bool reduces()                                          whether it sums along lines
//   void Reduce(lines, features, double* sums)              adds to one sum a line
//   void Finish(lines, const double* sums, C* values)       what Apply needs of each line
//   bool applies()                                          whether there is an Apply
//   void Apply(lines, features, const C* values, C* dscale)
//   C* dscale()                                             (n,), or null
// `sums`, `values` and `dscale` (in Apply) start at the first line or feature given.
template <typename C, typename Kernel>
class Runner {
 public:
  Runner(const Kernel& kernel, xla::ffi::ThreadPool& pool)
      : kernel_(kernel), plan_(shape_, kTileSize<C>, kernel.dscale() != nullptr), pool_(pool) {}

  xla::ffi::Error Run() {
    if (kernel_.dscale() != nullptr && plan_.blocks() != 1) {
      partials_ = Allocate<C>(plan_.blocks() * shape_.n);
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

 private:
  template <typename F>
  void For(int64_t count, const F& body) {
    if (!plan_.small()) return ParallelFor(pool_, count, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  // Where a block sums its share of dscale, zeroed between the features given.
  C* Partial(int64_t block, const Range& features) const {
    C* row = partials_ ? partials_.get() + block * shape_.n : kernel_.dscale();
    if (row == nullptr) return nullptr;
    std::fill(row + features.begin, row + features.end, C{0});
    return row + features.begin;
  }

  void WholeLines(int64_t block) const {
    const Range features{0, shape_.n}, groups = plan_.Groups(block);
    C* partial = Partial(block, features);
    double sums[kGroupLines];
    C values[kGroupLines];
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const Range lines = plan_.Lines(group);
      std::fill(sums, sums + lines.size(), 0.0);
      if (kernel_.reduces()) kernel_.Reduce(lines, features, sums);
      kernel_.Finish(lines, sums, values);
      if (kernel_.applies()) kernel_.Apply(lines, features, values, partial);
    }
  }

  // Few and long lines: a pass for the sums, of (group, segment) each, and a second over the same.
  bool SegmentsOfLines() {
    const int64_t count = shape_.lines(), segments = plan_.segments();
    const int64_t groups = plan_.Groups(plan_.blocks() - 1).end;
    auto sums = Allocate<double>((segments + 1) * count);
    auto values = Allocate<C>(count);
    if (!sums || !values) return false;
    std::fill(sums.get(), sums.get() + (segments + 1) * count, 0.0);
    double* total = sums.get() + segments * count;
    if (kernel_.reduces()) {
      For(groups * segments, [&](int64_t i) {
        const Range lines = plan_.Lines(i / segments);
        double* at = sums.get() + i % segments * count + lines.begin;
        kernel_.Reduce(lines, plan_.Features(i % segments), at);
      });
      for (int64_t i = 0; i < segments * count; ++i) total[i % count] += sums[i];
    }
    kernel_.Finish({0, count}, total, values.get());
    if (!kernel_.applies()) return true;
    For(plan_.blocks() * segments, [&](int64_t i) {
      const Range features = plan_.Features(i % segments), block = plan_.Groups(i / segments);
      C* partial = Partial(i / segments, features);
      for (int64_t group = block.begin; group < block.end; ++group) {
        const Range lines = plan_.Lines(group);
        kernel_.Apply(lines, features, values.get() + lines.begin, partial);
      }
    });
    return true;
  }

  void SumPartials() {
    static constexpr int64_t kStep = 512;
    For(CeilDiv(shape_.n, kStep), [this](int64_t i) {
      const int64_t begin = i * kStep, size = std::min(kStep, shape_.n - begin);
      double sums[kStep] = {};
      for (int64_t block = 0; block < plan_.blocks(); ++block) {
        const C* row = partials_.get() + block * shape_.n + begin;
        for (int64_t j = 0; j < size; ++j) sums[j] += row[j];
      }
      for (int64_t j = 0; j < size; ++j) kernel_.dscale()[begin + j] = static_cast<C>(sums[j]);
    });
  }

  const Kernel& kernel_;
  const Shape shape_ = kernel_.shape;
  const Plan plan_;
  xla::ffi::ThreadPool& pool_;
  std::unique_ptr<C[]> partials_;
};

template <typename C, typename Kernel>
xla::ffi::Error Run(const Kernel& kernel, xla::ffi::ThreadPool& pool) {
  if (kernel.shape.lines() > 0) return Runner<C, Kernel>(kernel, pool).Run();
  if (kernel.dscale() != nullptr) std::fill_n(kernel.dscale(), kernel.shape.n, C{0});
  return xla::ffi::Error::Success();
}

}  // namespace normfuse
