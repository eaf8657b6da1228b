// The fused passes of the subspace optimizers on a CPU: what mix_next.cpp and sgd_ahead.cpp share.
//
// Vertices lie in one buffer [n + frozen, P]; a parameter is a range of its columns. The arithmetic
// is the vertices' (float for half-precision parameters), element by element:
//   d_i = alpha_i g + weight_decay W_i;   W_i -= step(d_i);   p = sum_i next_i W_i
// Built at first use through libtorch's stable ABI: see ensemblayers/ops/native.py.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

namespace ensemblayers {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 1024;       // Elements whose sums stay in the first-level cache.
constexpr int64_t kGrain = 16 * 1024;  // Elements that are worth a thread.
constexpr int64_t kGroup = 6;          // Vertices at a time: more have no room in the registers.

struct Range {
  int64_t column;  // First column in the vertices.
  int64_t begin;   // First element in the concatenation of the parameters of this call.
  int64_t count;
};

inline std::vector<Range> ranges(const std::vector<Tensor>& params, const std::vector<int64_t>& columns) {
  std::vector<Range> out;
  int64_t begin = 0;
  for (size_t k = 0; k < params.size(); ++k) {
    const int64_t count = params[k].numel();
    out.push_back({columns[k], begin, count});
    begin += count;
  }
  return out;
}

// Calls body(k, column, offset, count) on blocks of at most kBlock elements of the k-th parameter.
template <class Body>
void for_blocks(const std::vector<Range>& all, const Body& body) {
  if (all.empty()) return;
  const int64_t total = all.back().begin + all.back().count;
  torch::stable::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    size_t k = 0;
    while (all[k].begin + all[k].count <= begin) ++k;
    for (int64_t at = begin; at < end;) {
      while (at >= all[k].begin + all[k].count) ++k;
      const int64_t offset = at - all[k].begin;
      const int64_t count = std::min({kBlock, end - at, all[k].count - offset});
      body(k, all[k].column + offset, offset, count);
      at += count;
    }
  });
}

// Calls element(j) for a block's elements, and before each line of the cache fetch(j) with the first
// element of a later one, to ask for it: so many streams are more than processors foresee.
template <class V, class Fetch, class Element>
void for_lines(int64_t count, const Fetch& fetch, const Element& element) {
  constexpr int64_t kLine = 64 / sizeof(V), kLines = 4;
  int64_t j = 0;
  for (; j + kLine <= count; j += kLine) {
    fetch(j + kLines * kLine);
#pragma GCC ivdep
    for (int64_t k = j; k < j + kLine; ++k) element(k);
  }
  for (; j < count; ++j) element(j);
}

template <class V, class P>
void store(const V* __restrict from, P* __restrict to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = static_cast<P>(from[j]);
}

template <class V>
std::vector<V> weights(const Tensor& alpha) {
  std::vector<V> out(alpha.numel());
  if (alpha.scalar_type() == ScalarType::Double) {
    const double* a = static_cast<const double*>(alpha.const_data_ptr());
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<V>(a[i]);
  } else {
    STD_TORCH_CHECK(alpha.scalar_type() == ScalarType::Float, "expected float32 or float64 alpha");
    const float* a = static_cast<const float*>(alpha.const_data_ptr());
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<V>(a[i]);
  }
  return out;
}

// The rows of a matrix whose elements lie side by side within a row.
template <class V>
struct Rows {
  V* data;
  int64_t count, stride;

  explicit Rows(const Tensor& matrix)
      : data(static_cast<V*>(matrix.mutable_data_ptr())),
        count(matrix.size(0)),
        stride(matrix.stride(0)) {}
};

// A rule updates one element of a vertex, w, and its moments, m and s, given its gradient g.
template <class V, bool Moment, bool First, bool Nesterov>
struct Sgd {
  static constexpr int kMoments = Moment ? 1 : 0;
  V lr, momentum, keep, weight_decay;

  void operator()(V& w, V& m, V&, V g) const {
    V d = g + weight_decay * w;
    if constexpr (Moment) {
      if constexpr (First) {
        m = d;  // Whatever the buffer held.
      } else {
        m = momentum * m + keep * d;
      }
      d = Nesterov ? d + momentum * m : m;
    }
    w -= lr * d;
  }
};

// All that a step touches.
template <class V>
struct Buffers {
  Rows<V> w;
  std::optional<Rows<V>> m, s;
  std::vector<V> alpha, next;

  V* moment(const std::optional<Rows<V>>& rows, int64_t i, int64_t column) const {
    return rows ? rows->data + i * rows->stride + column : nullptr;
  }
};

// N vertices side by side, from vertex i0 on: an element of each and its moments stay in registers.
// The first group of vertices starts the sum of the next point, the others go on with it.
template <int N, bool First, class V, class P, class Rule>
void step_group(Rule rule, const Buffers<V>& b, int64_t i0, const P* __restrict grad,
                V* __restrict sum, int64_t column, int64_t count) {
  V* w[N];
  V* m[N];
  V* s[N];
  V alpha[N], next[N];
  for (int i = 0; i < N; ++i) {
    w[i] = b.w.data + (i0 + i) * b.w.stride + column;
    m[i] = b.moment(b.m, i0 + i, column);
    s[i] = b.moment(b.s, i0 + i, column);
    alpha[i] = b.alpha[i0 + i];
    next[i] = b.next[i0 + i];
  }
  const auto element = [&](int64_t j) {
    const V g = static_cast<V>(grad[j]);
    V total = First ? V(0) : sum[j];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      V wi = w[i][j], mi = 0, si = 0;
      if constexpr (Rule::kMoments > 0) mi = m[i][j];
      if constexpr (Rule::kMoments > 1) si = s[i][j];
      rule(wi, mi, si, alpha[i] * g);
      w[i][j] = wi;
      if constexpr (Rule::kMoments > 0) m[i][j] = mi;
      if constexpr (Rule::kMoments > 1) s[i][j] = si;
      total += next[i] * wi;
    }
    sum[j] = total;
  };
  const auto fetch = [&](int64_t j) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(w[i] + j, 1);
      if constexpr (Rule::kMoments > 0) __builtin_prefetch(m[i] + j, 1);
      if constexpr (Rule::kMoments > 1) __builtin_prefetch(s[i] + j, 1);
    }
  };
  for_lines<V>(count, fetch, element);
}

// A block of columns: the vertices in groups of equal size, as far as that goes, then frozen ones.
template <class V, class P, class Rule>
void step_block(const Rule& rule, const Buffers<V>& b, const P* __restrict grad,
                P* __restrict point, int64_t column, int64_t count) {
  constexpr bool kSame = std::is_same_v<V, P>;
  V rounded_later[kSame ? 1 : kBlock];
  V* sum = rounded_later;
  if constexpr (kSame) sum = point;
  const int64_t n = static_cast<int64_t>(b.alpha.size());
  const int64_t groups = (n + kGroup - 1) / kGroup;
  for (int64_t group = 0, i = 0; group < groups; ++group) {
    const int64_t size = (n - i) / (groups - group);
    const auto step = [&](auto first) {
      constexpr bool kFirst = decltype(first)::value;
      switch (size) {
        case 1: return step_group<1, kFirst>(rule, b, i, grad, sum, column, count);
        case 2: return step_group<2, kFirst>(rule, b, i, grad, sum, column, count);
        case 3: return step_group<3, kFirst>(rule, b, i, grad, sum, column, count);
        case 4: return step_group<4, kFirst>(rule, b, i, grad, sum, column, count);
        case 5: return step_group<5, kFirst>(rule, b, i, grad, sum, column, count);
        case 6: return step_group<6, kFirst>(rule, b, i, grad, sum, column, count);
      }
    };
    group ? step(std::false_type{}) : step(std::true_type{});
    i += size;
  }
  for (int64_t i = n; i < b.w.count; ++i) {
    const V* __restrict w = b.w.data + i * b.w.stride + column;
    const V next = b.next[i];
    for (int64_t j = 0; j < count; ++j) sum[j] += next * w[j];
  }
  if constexpr (!kSame) store(sum, point, count);
}

// Calls f with a value of the vertices' type and one of the parameters'.
template <class F>
void dispatch(const Tensor& vertices, const std::vector<Tensor>& params, const F& f) {
  if (params.empty()) return;
  const ScalarType v = vertices.scalar_type(), p = params[0].scalar_type();
  if (v == ScalarType::Double && p == ScalarType::Double) return f(double{}, double{});
  STD_TORCH_CHECK(v == ScalarType::Float, "expected vertices in float32, or all in float64");
  if (p == ScalarType::Float) return f(float{}, float{});
  if (p == ScalarType::BFloat16) return f(float{}, torch::headeronly::BFloat16{});
  STD_TORCH_CHECK(p == ScalarType::Half, "expected parameters in float32, bfloat16 or float16");
  f(float{}, torch::headeronly::Half{});
}

template <class V>
Buffers<V> buffers(const Tensor& vertices, const std::optional<Tensor>& first,
                   const std::optional<Tensor>& second, const Tensor& alpha, const Tensor& next,
                   bool maximize) {
  Buffers<V> b{Rows<V>(vertices), {}, {}, weights<V>(alpha), weights<V>(next)};
  if (first) b.m.emplace(*first);
  if (second) b.s.emplace(*second);
  if (maximize) {
    for (V& a : b.alpha) a = -a;
  }
  return b;
}

// The numbers of torch.optim.SGD's rule.
struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first, maximize;
};

// Calls f with the rule in the arithmetic of V.
template <class V, class F>
void with_sgd(const SgdOptions& o, bool moment, const F& f) {
  const V a = static_cast<V>(o.lr), m = static_cast<V>(o.momentum);
  const V k = static_cast<V>(1 - o.dampening), d = static_cast<V>(o.weight_decay);
  if (!moment) return f(Sgd<V, false, false, false>{a, m, k, d});
  if (o.first && o.nesterov) return f(Sgd<V, true, true, true>{a, m, k, d});
  if (o.first) return f(Sgd<V, true, true, false>{a, m, k, d});
  if (o.nesterov) return f(Sgd<V, true, false, true>{a, m, k, d});
  f(Sgd<V, true, false, false>{a, m, k, d});
}

}  // namespace ensemblayers
