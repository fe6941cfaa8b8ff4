// The division of a norm's work. It depends on the shape alone, never on the number of threads, so
// that sums are taken in the same order every time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace normfuse {

// x is (outer, n, inner), normalised over n: outer * inner lines of n elements. Parameters are
// (heads, n), those of line i at i % heads; with more than one head inner is 1.
struct Shape {
  int64_t outer = 0, n = 0, inner = 0, heads = 1;

  int64_t lines() const { return outer * inner; }
};

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

template <typename C>
constexpr int64_t kTileSize = 8192 / sizeof(C);  // elements: a few tiles fit a first-level cache
constexpr int64_t kGroupLines = 512;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lines form groups, small enough to be normalised from the cache; groups form blocks, the unit of
// work of a thread; few long lines are cut into segments of n instead.
class Plan {
 public:
  Plan(const Shape& shape, int64_t tile_size, bool sums_across_lines) : shape_(shape) {
    if (shape.inner == 1) {
      group_lines_ = std::clamp<int64_t>(tile_size / shape.n, 1, kGroupLines);
      groups_per_outer_ = 0;
      groups_ = CeilDiv(shape.outer, group_lines_);
    } else {
      groups_per_outer_ = CeilDiv(shape.inner, kGroupLines);
      group_lines_ = CeilDiv(shape.inner, groups_per_outer_);
      groups_ = shape.outer * groups_per_outer_;
    }
    const int64_t group_size = group_lines_ * shape.n;
    if (groups_ < kFewGroups && group_size > kSegmentSize) {
      segments_ = CeilDiv(group_size, kSegmentSize);
      blocks_ = sums_across_lines ? 1 : groups_;
    } else {
      int64_t groups_per_block = std::max<int64_t>(1, kBlockSize / group_size);
      if (sums_across_lines) {
        // A block keeps n partial sums a head: few blocks, yet at most kSumLines lines in a sum.
        groups_per_block = std::min(std::max(groups_per_block, CeilDiv(groups_, kBlocks)),
                                    std::max<int64_t>(1, kSumLines * shape.heads / group_lines_));
      }
      blocks_ = CeilDiv(groups_, groups_per_block);
    }
  }

  int64_t blocks() const { return blocks_; }
  int64_t segments() const { return segments_; }
  bool small() const { return shape_.lines() * shape_.n <= kSmallSize; }

  Range Groups(int64_t block) const {  // blocks differ by one group at most
    return {groups_ * block / blocks_, groups_ * (block + 1) / blocks_};
  }

  Range Lines(int64_t group) const {
    if (groups_per_outer_ == 0) {
      return {group * group_lines_, std::min((group + 1) * group_lines_, shape_.outer)};
    }
    const int64_t first = group / groups_per_outer_ * shape_.inner;
    const int64_t at = group % groups_per_outer_ * group_lines_;
    return {first + at, first + std::min(at + group_lines_, shape_.inner)};
  }

  Range Features(int64_t segment) const {
    return {shape_.n * segment / segments_, shape_.n * (segment + 1) / segments_};
  }

 private:
  static constexpr int64_t kFewGroups = 16;
  static constexpr int64_t kBlocks = 32;
  static constexpr int64_t kSumLines = 512;
  static constexpr int64_t kBlockSize = 32768;    // elements
  static constexpr int64_t kSegmentSize = 32768;  // elements
  static constexpr int64_t kSmallSize = 65536;    // waking a thread costs more than this much work

  const Shape shape_;
  int64_t group_lines_, groups_, groups_per_outer_;
  int64_t blocks_, segments_ = 1;
};

}  // namespace normfuse
