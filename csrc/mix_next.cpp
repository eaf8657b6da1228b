// The fused pass of the subspace optimizers on a CPU: update n vertices from one gradient and write
// the next point of the simplex into the parameters, each element touched once.
//
// Vertices lie in one buffer [n + frozen, P]; a parameter is a range of its columns. The arithmetic
// is the vertices' (float for half-precision parameters), element by element:
//   d_i = alpha_i g + weight_decay W_i;   W_i -= step(d_i);   p = sum_i next_i W_i
// Built at first use through libtorch's stable ABI: see ensemblayers/ops/native.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

namespace {

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

std::vector<Range> ranges(const std::vector<Tensor>& params, const std::vector<int64_t>& columns) {
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

// ---------------------------------------------------------------------------------------------- mix

template <class V, class P>
void mix_impl(const Tensor& vertices, const Tensor& alpha, const std::vector<Tensor>& params,
              const std::vector<int64_t>& columns) {
  using Sum = std::conditional_t<std::is_same_v<V, double>, double, float>;
  const Rows<V> w(vertices);
  const std::vector<Sum> a = weights<Sum>(alpha);
  for_blocks(ranges(params, columns), [&](size_t k, int64_t column, int64_t offset, int64_t count) {
    Sum sum[kBlock] = {};
    for (int64_t i = 0; i < w.count; ++i) {
      const V* __restrict row = w.data + i * w.stride + column;
      const Sum ai = a[i];
      for (int64_t j = 0; j < count; ++j) sum[j] += ai * static_cast<Sum>(row[j]);
    }
    store(sum, static_cast<P*>(params[k].mutable_data_ptr()) + offset, count);
  });
}

// -------------------------------------------------------------------------------------------- steps
//
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

template <class V>
struct AdamW {
  static constexpr int kMoments = 2;
  V rate, shrink, beta1, rest1, beta2, rest2, root, eps;

  void operator()(V& w, V& m, V& s, V g) const {
    m = beta1 * m + rest1 * g;
    s = beta2 * s + rest2 * g * g;
    w = shrink * w - rate * m / (std::sqrt(s) / root + eps);
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
  // So many streams are more than processors foresee: each line is asked for a few lines ahead.
  constexpr int64_t kLine = 64 / sizeof(V), kAhead = 4 * kLine;
  int64_t j = 0;
  for (; j + kLine <= count; j += kLine) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(w[i] + j + kAhead, 1);
      if constexpr (Rule::kMoments > 0) __builtin_prefetch(m[i] + j + kAhead, 1);
      if constexpr (Rule::kMoments > 1) __builtin_prefetch(s[i] + j + kAhead, 1);
    }
#pragma GCC ivdep
    for (int64_t k = j; k < j + kLine; ++k) element(k);
  }
  for (; j < count; ++j) element(j);
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

template <class V, class P, class Rule>
void step_impl(const Rule& rule, const Buffers<V>& b, const std::vector<Tensor>& params,
               const std::vector<Tensor>& grads, const std::vector<int64_t>& columns) {
  for_blocks(ranges(params, columns), [&](size_t k, int64_t column, int64_t offset, int64_t count) {
    const P* g = static_cast<const P*>(grads[k].const_data_ptr()) + offset;
    P* p = static_cast<P*>(params[k].mutable_data_ptr()) + offset;
    step_block(rule, b, g, p, column, count);
  });
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

void mix(Tensor vertices, Tensor alpha, std::vector<Tensor> params, std::vector<int64_t> columns) {
  // A layer's stack may itself be in half precision, an optimizer's vertices may not.
  if (vertices.scalar_type() == ScalarType::BFloat16) {
    using V = torch::headeronly::BFloat16;
    return mix_impl<V, V>(vertices, alpha, params, columns);
  }
  if (vertices.scalar_type() == ScalarType::Half) {
    using V = torch::headeronly::Half;
    return mix_impl<V, V>(vertices, alpha, params, columns);
  }
  dispatch(vertices, params, [&](auto v, auto p) {
    mix_impl<decltype(v), decltype(p)>(vertices, alpha, params, columns);
  });
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

void sgd_step(Tensor vertices, std::optional<Tensor> momentum_buffer, std::vector<Tensor> params,
              std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor alpha, Tensor next,
              double lr, double momentum, double dampening, double weight_decay, bool nesterov,
              bool first, bool maximize) {
  dispatch(vertices, params, [&](auto v, auto p) {
    using V = decltype(v);
    using P = decltype(p);
    const auto b = buffers<V>(vertices, momentum_buffer, {}, alpha, next, maximize);
    const V a = static_cast<V>(lr), m = static_cast<V>(momentum), k = static_cast<V>(1 - dampening);
    const V d = static_cast<V>(weight_decay);
    const auto run = [&](const auto& rule) { step_impl<V, P>(rule, b, params, grads, columns); };
    if (!momentum_buffer) return run(Sgd<V, false, false, false>{a, m, k, d});
    if (first && nesterov) return run(Sgd<V, true, true, true>{a, m, k, d});
    if (first) return run(Sgd<V, true, true, false>{a, m, k, d});
    if (nesterov) return run(Sgd<V, true, false, true>{a, m, k, d});
    run(Sgd<V, true, false, false>{a, m, k, d});
  });
}

void adamw_step(Tensor vertices, Tensor exp_avg, Tensor exp_avg_sq, std::vector<Tensor> params,
                std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor alpha, Tensor next,
                double lr, double beta1, double beta2, double eps, double weight_decay,
                double correction1, double correction2, bool maximize) {
  dispatch(vertices, params, [&](auto v, auto p) {
    using V = decltype(v);
    using P = decltype(p);
    // Differences and quotients in double: in float, 1 - beta2 has few digits left.
    const auto cast = [](double x) { return static_cast<V>(x); };
    const AdamW<V> rule{cast(lr / correction1),  cast(1 - lr * weight_decay), cast(beta1),
                        cast(1 - beta1),         cast(beta2),                 cast(1 - beta2),
                        cast(std::sqrt(correction2)), cast(eps)};
    const auto b = buffers<V>(vertices, exp_avg, exp_avg_sq, alpha, next, maximize);
    step_impl<V, P>(rule, b, params, grads, columns);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ensemblayers, m) {
  m.def("mix_(Tensor vertices, Tensor alpha, Tensor(a!)[] params, int[] columns) -> ()");
  m.def(
      "sgd_step_(Tensor(a!) vertices, Tensor(b!)? momentum_buffer, Tensor(c!)[] params, "
      "Tensor[] grads, int[] columns, Tensor alpha, Tensor next, float lr, float momentum, "
      "float dampening, float weight_decay, bool nesterov, bool first, bool maximize) -> ()");
  m.def(
      "adamw_step_(Tensor(a!) vertices, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!)[] params, Tensor[] grads, int[] columns, Tensor alpha, Tensor next, float lr, "
      "float beta1, float beta2, float eps, float weight_decay, float correction1, "
      "float correction2, bool maximize) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ensemblayers, CPU, m) {
  m.impl("mix_", TORCH_BOX(&mix));
  m.impl("sgd_step_", TORCH_BOX(&sgd_step));
  m.impl("adamw_step_", TORCH_BOX(&adamw_step));
}
