// Vectors and tiles of the registers, and a matrix product with more at its two ends: what is done
// to the rows of one factor as they are loaded, and to the product's rows as they are stored, while
// they are in the nearest cache.

#pragma once

#include <torch/csrc/stable/ops.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace ensemblayers {

// A tile is kRows x kVectors vectors: what the registers hold.
#ifdef __AVX512F__
constexpr int kBytes = 64, kRows = 12;
#else
constexpr int kBytes = 32, kRows = 6;
#endif
constexpr int kVectors = 2, kLine = 64;  // Bytes of the cache's lines.
constexpr int64_t kKept = 4 << 20;  // Bytes.
constexpr int64_t kDepth = 256;  // Terms of a sum at once; the sums of so many are added up.

template <class V>
struct Simd {
  static constexpr int kLanes = kBytes / sizeof(V);
  static constexpr int kColumns = kVectors * kLanes;  // Of a tile.
  typedef V Vector __attribute__((vector_size(kBytes), aligned(sizeof(V)), may_alias));

  static Vector& at(V* p, int v) { return reinterpret_cast<Vector*>(p)[v]; }
  static const Vector& at(const V* p, int v) { return reinterpret_cast<const Vector*>(p)[v]; }
};

struct Delete {
  void operator()(void* p) const { ::operator delete[](p, std::align_val_t{kLine}); }
};

// Memory that begins with a line of the cache: a vector never lies in two.
template <class V>
std::unique_ptr<V[], Delete> uninitialized(int64_t count) {
  void* memory = ::operator new[](count * sizeof(V), std::align_val_t{kLine});
  return std::unique_ptr<V[], Delete>(static_cast<V*>(memory));
}

// A tile's row, to memory and past the caches, which would read there first what is overwritten.
// Both begin with a line.
template <class V>
void stream(V* to, const V* from) {
#if defined(__AVX512F__)
  for (int v = 0; v < kVectors; ++v) {
    const auto lane = v * Simd<V>::kLanes;
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + lane), _mm512_load_si512(from + lane));
  }
#elif defined(__AVX__)
  for (int v = 0; v < kVectors; ++v) {
    const auto lane = v * Simd<V>::kLanes;
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + lane),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(from + lane)));
  }
#else
  std::memcpy(to, from, Simd<V>::kColumns * sizeof(V));
#endif
}

// Whether all rows of a matrix begin with a line.
template <class V>
bool streams(const V* matrix, int64_t columns) {
  return columns * sizeof(V) % kLine == 0 && reinterpret_cast<uintptr_t>(matrix) % kLine == 0;
}

// Other threads read what was streamed.
inline void end_of_stream() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

// Memory that a thread keeps from call to call: the system would give it page by page, zeroed.
template <class V>
V* kept(int64_t count) {
  thread_local std::unique_ptr<V[], Delete> memory;
  thread_local int64_t size = 0;
  if (size < count) {
    memory = uninitialized<V>(count);
    size = count;
  }
  return memory.get();
}

// The first `count` values of a row, zero beyond them.
template <class V, int64_t kCount>
void load(V* to, const V* from, int64_t count) {
  if (count >= kCount) {  // A number that the compiler knows is faster.
    std::memcpy(to, from, kCount * sizeof(V));
  } else {
    std::memcpy(to, from, count * sizeof(V));
    std::fill(to + count, to + kCount, V(0));
  }
}

// Lane l of a and lane l - d of b change places, for all l that have the bit d.
template <int d, class Vector, int... l>
void exchange(Vector& a, Vector& b, std::integer_sequence<int, l...>) {
  constexpr int n = sizeof...(l);
#ifdef __clang__
  const Vector low = __builtin_shufflevector(a, b, (l & d ? n + l - d : l)...);
  b = __builtin_shufflevector(a, b, (l & d ? n + l : l + d)...);
#else  // GCC has the above from 12 on.
  using Lanes = decltype(a < b);
  const Vector low = __builtin_shuffle(a, b, Lanes{(l & d ? n + l - d : l)...});
  b = __builtin_shuffle(a, b, Lanes{(l & d ? n + l : l + d)...});
#endif
  a = low;
}

template <int d, class Vector, int n>
void transpose(Vector (&rows)[n]) {
  if constexpr (d < n) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      if (!(i & d)) exchange<d>(rows[i], rows[i + d], std::make_integer_sequence<int, n>{});
    }
    transpose<2 * d>(rows);
  }
}

// kColumns rows of b [height, depth] as a panel [depth, kColumns], zero beyond the height.
template <class V>
void transposed_panel(const V* b, V* to, int64_t height, int64_t depth) {
  using S = Simd<V>;
  constexpr int kLanes = S::kLanes, kColumns = S::kColumns;
  const int64_t whole = depth / kLanes * kLanes;
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t k = 0; k < whole; k += kLanes) {
      typename S::Vector square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = v * kLanes + i;
        square[i] = row < height ? S::at(b + row * depth + k, 0) : typename S::Vector{};
      }
      transpose<1>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) S::at(to + (k + i) * kColumns, v) = square[i];
    }
  }
  for (int64_t k = whole; k < depth; ++k) {
    for (int64_t row = 0; row < kColumns; ++row) {
      to[k * kColumns + row] = row < height ? b[row * depth + k] : V(0);
    }
  }
}

// To a tile in registers, the product of a [kRows, depth], whose rows are kApart and whose columns
// kNext apart, with a panel b [depth, kColumns].
template <class V, int64_t kApart, int64_t kNext>
[[gnu::always_inline]] inline void add_product(const V* a, const V* b, int64_t depth,
                                               typename Simd<V>::Vector (&h)[kRows][kVectors]) {
  using S = Simd<V>;
  for (const V* end = b + depth * S::kColumns; b < end; a += kNext, b += S::kColumns) {
    typename S::Vector row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = S::at(b, v);
#pragma GCC unroll 8
    for (int byte = 0; byte < kVectors * kBytes; byte += kLine) {  // From the second-level cache.
      __builtin_prefetch(reinterpret_cast<const char*>(b + 8 * S::kColumns) + byte);
    }
#pragma GCC unroll 16
    for (int q = 0; q < kRows; ++q) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) h[q][v] += a[q * kApart] * row[v];
    }
  }
}

// The same to a tile in memory.
template <class V, int64_t kStride>
void add_tile(const V* a, const V* b, int64_t depth,
              typename Simd<V>::Vector (&sums)[kRows][kVectors]) {
  typename Simd<V>::Vector h[kRows][kVectors] = {};
  add_product<V, kStride, 1>(a, b, depth, h);
#pragma GCC unroll 16
  for (int q = 0; q < kRows; ++q) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[q][v] += h[q][v];
  }
}

// a b, of which load(j, first, count, to) writes `count` values of a's row j, from its column
// `first` on, and pack(c, to) columns c to c + kColumns of b as a panel [depth, kColumns].
// store(j, c, h) takes as many values of the product's row j. All of b is packed at once:
// it should fit into a cache, of all cores at least.
template <class V, class Load, class Pack, class Store>
void product(int64_t rows, int64_t depth, int64_t columns, const Load& load, const Pack& pack,
             const Store& store) {
  constexpr int64_t kColumns = Simd<V>::kColumns;
  // Rows a multiple of 4 KB apart would share the lines of the cache.
  constexpr int64_t kStride = kDepth + kLine / sizeof(V), kPart = kRows * kStride;
  const int64_t tiles = (rows + kRows - 1) / kRows, parts = (depth + kDepth - 1) / kDepth;
  const int64_t panels = (columns + kColumns - 1) / kColumns;
  const auto part = [&](int64_t d) { return std::min(kDepth, depth - d * kDepth); };

  const int64_t count = panels * depth * kColumns;
  const bool keep = count * static_cast<int64_t>(sizeof(V)) <= kKept;
  const auto own = uninitialized<V>(keep ? 0 : count);
  V* packed = keep ? kept<V>(count) : own.get();
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) pack(p * kColumns, &packed[p * depth * kColumns]);
  });
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    const auto a = uninitialized<V>(parts * kPart);
    std::fill(a.get(), a.get() + parts * kPart, V(0));  // A last tile may have fewer rows.
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t * kRows, height = std::min<int64_t>(kRows, rows - first);
      for (int64_t q = 0; q < height; ++q) {
        for (int64_t d = 0; d < parts; ++d) {
          load(first + q, d * kDepth, part(d), &a[d * kPart + q * kStride]);
        }
      }
      for (int64_t p = 0; p < panels; ++p) {
        alignas(kLine) typename Simd<V>::Vector sums[kRows][kVectors] = {};
        for (int64_t d = 0; d < parts; ++d) {
          add_tile<V, kStride>(&a[d * kPart], &packed[(p * depth + d * kDepth) * kColumns],
                               part(d), sums);
        }
        for (int64_t q = 0; q < height; ++q) {
          store(first + q, p * kColumns, reinterpret_cast<const V*>(sums[q]));
        }
      }
    }
    end_of_stream();
  });
}

}  // namespace ensemblayers
