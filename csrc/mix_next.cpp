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
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 1024;       // Elements whose sums stay in the first-level cache.
constexpr int64_t kGrain = 16 * 1024;  // Elements that are worth a thread.

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

template <class V, class P>
const V* load(const P* __restrict from, V* __restrict room, int64_t count) {
  for (int64_t j = 0; j < count; ++j) room[j] = static_cast<V>(from[j]);
  return room;
}

template <class V>
const V* load(const V* from, V*, int64_t) { return from; }

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

struct Dims {
  int64_t rows;     // n + frozen
  int64_t columns;  // P
};

Dims dims(const Tensor& vertices) { return {vertices.size(0), vertices.size(1)}; }

// ---------------------------------------------------------------------------------------------- mix

template <class V, class P>
void mix_impl(const Tensor& vertices, const Tensor& alpha, const std::vector<Tensor>& params,
              const std::vector<int64_t>& columns) {
  const auto [rows, width] = dims(vertices);
  const V* w = static_cast<const V*>(vertices.const_data_ptr());
  const std::vector<V> a = weights<V>(alpha);
  for_blocks(ranges(params, columns), [&, rows = rows, width = width](
                                          size_t k, int64_t column, int64_t offset, int64_t count) {
    V sum[kBlock] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const V* __restrict row = w + i * width + column;
      const V ai = a[i];
      for (int64_t j = 0; j < count; ++j) sum[j] += ai * row[j];
    }
    store(sum, static_cast<P*>(params[k].mutable_data_ptr()) + offset, count);
  });
}

// -------------------------------------------------------------------------------------------- steps

struct Sgd {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first, maximize;

  template <class V>
  void update(V* __restrict w, V* __restrict m, V*, const V* __restrict g, V a, int64_t count) const {
    const V rate = static_cast<V>(lr), mu = static_cast<V>(momentum);
    const V decay = static_cast<V>(weight_decay);
    const V keep = first ? V(1) : static_cast<V>(1 - dampening), old = first ? V(0) : mu;
    if (maximize) a = -a;
    if (m == nullptr) {
      for (int64_t j = 0; j < count; ++j) w[j] -= rate * (a * g[j] + decay * w[j]);
    } else if (first) {  // The buffer may hold anything.
      const V scale = nesterov ? 1 + mu : V(1);
      for (int64_t j = 0; j < count; ++j) {
        const V d = a * g[j] + decay * w[j];
        m[j] = d;
        w[j] -= rate * scale * d;
      }
    } else if (nesterov) {
      for (int64_t j = 0; j < count; ++j) {
        const V d = a * g[j] + decay * w[j];
        const V v = old * m[j] + keep * d;
        m[j] = v;
        w[j] -= rate * (d + mu * v);
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const V v = old * m[j] + keep * (a * g[j] + decay * w[j]);
        m[j] = v;
        w[j] -= rate * v;
      }
    }
  }
};

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay, correction1, correction2;
  bool maximize;

  template <class V>
  void update(V* __restrict w, V* __restrict m, V* __restrict s, const V* __restrict g, V a,
              int64_t count) const {
    const V b1 = static_cast<V>(beta1), b2 = static_cast<V>(beta2);
    const V c1 = static_cast<V>(1 - beta1), c2 = static_cast<V>(1 - beta2);
    const V rate = static_cast<V>(lr / correction1), keep = static_cast<V>(1 - lr * weight_decay);
    const V root = static_cast<V>(std::sqrt(correction2)), epsilon = static_cast<V>(eps);
    if (maximize) a = -a;
    for (int64_t j = 0; j < count; ++j) {
      const V d = a * g[j];
      const V first = b1 * m[j] + c1 * d;
      const V second = b2 * s[j] + c2 * d * d;
      m[j] = first;
      s[j] = second;
      w[j] = keep * w[j] - rate * first / (std::sqrt(second) / root + epsilon);
    }
  }
};

template <class V, class P, class Rule>
void step_impl(const Rule& rule, const Tensor& vertices, const std::optional<Tensor>& first_moment,
               const std::optional<Tensor>& second_moment, const std::vector<Tensor>& params,
               const std::vector<Tensor>& grads, const std::vector<int64_t>& columns,
               const Tensor& alpha, const Tensor& next) {
  const auto [rows, width] = dims(vertices);
  const int64_t n = alpha.numel();
  V* w = static_cast<V*>(vertices.mutable_data_ptr());
  V* m = first_moment ? static_cast<V*>(first_moment->mutable_data_ptr()) : nullptr;
  V* s = second_moment ? static_cast<V*>(second_moment->mutable_data_ptr()) : nullptr;
  const std::vector<V> a = weights<V>(alpha), b = weights<V>(next);
  for_blocks(ranges(params, columns), [&, rows = rows, width = width](
                                          size_t k, int64_t column, int64_t offset, int64_t count) {
    V room[kBlock];
    V sum[kBlock] = {};
    const V* g = load(static_cast<const P*>(grads[k].const_data_ptr()) + offset, room, count);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * width + column;
      V* __restrict row = w + at;
      if (i < n) rule.update(row, m ? m + at : nullptr, s ? s + at : nullptr, g, a[i], count);
      const V bi = b[i];
      for (int64_t j = 0; j < count; ++j) sum[j] += bi * row[j];
    }
    store(sum, static_cast<P*>(params[k].mutable_data_ptr()) + offset, count);
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
  dispatch(vertices, params, [&](auto v, auto p) {
    mix_impl<decltype(v), decltype(p)>(vertices, alpha, params, columns);
  });
}

void sgd_step(Tensor vertices, std::optional<Tensor> momentum_buffer, std::vector<Tensor> params,
              std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor alpha, Tensor next,
              double lr, double momentum, double dampening, double weight_decay, bool nesterov,
              bool first, bool maximize) {
  const Sgd rule{lr, momentum, dampening, weight_decay, nesterov, first, maximize};
  dispatch(vertices, params, [&](auto v, auto p) {
    step_impl<decltype(v), decltype(p)>(rule, vertices, momentum_buffer, std::nullopt, params,
                                        grads, columns, alpha, next);
  });
}

void adamw_step(Tensor vertices, Tensor exp_avg, Tensor exp_avg_sq, std::vector<Tensor> params,
                std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor alpha, Tensor next,
                double lr, double beta1, double beta2, double eps, double weight_decay,
                double correction1, double correction2, bool maximize) {
  const AdamW rule{lr, beta1, beta2, eps, weight_decay, correction1, correction2, maximize};
  dispatch(vertices, params, [&](auto v, auto p) {
    step_impl<decltype(v), decltype(p)>(rule, vertices, exp_avg, exp_avg_sq, params, grads,
                                        columns, alpha, next);
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
