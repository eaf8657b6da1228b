// The fused pass of the subspace optimizers on a CPU: update n vertices from one gradient and write
// the next point of the simplex into the parameters, each element touched once.

#include "mix_next.h"

#include <torch/csrc/stable/library.h>

#include <cmath>

namespace {

using namespace ensemblayers;

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

// Of the same form as Sgd.
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

template <class V, class P, class Rule>
void step_impl(const Rule& rule, const Buffers<V>& b, const std::vector<Tensor>& params,
               const std::vector<Tensor>& grads, const std::vector<int64_t>& columns) {
  for_blocks(ranges(params, columns), [&](size_t k, int64_t column, int64_t offset, int64_t count) {
    const P* g = static_cast<const P*>(grads[k].const_data_ptr()) + offset;
    P* p = static_cast<P*>(params[k].mutable_data_ptr()) + offset;
    step_block(rule, b, g, p, column, count);
  });
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

void sgd_step(Tensor vertices, std::optional<Tensor> momentum_buffer, std::vector<Tensor> params,
              std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor alpha, Tensor next,
              double lr, double momentum, double dampening, double weight_decay, bool nesterov,
              bool first, bool maximize) {
  const SgdOptions o{lr, momentum, dampening, weight_decay, nesterov, first, maximize};
  dispatch(vertices, params, [&](auto v, auto p) {
    using V = decltype(v);
    using P = decltype(p);
    const auto b = buffers<V>(vertices, momentum_buffer, {}, alpha, next, maximize);
    with_sgd<V>(o, momentum_buffer.has_value(), [&](const auto& rule) {
      step_impl<V, P>(rule, b, params, grads, columns);
    });
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
