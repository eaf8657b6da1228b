// SGD with points ahead, on a CPU.
//
// SGD is linear in vertices and gradients. A full pass writes not the next point alone, but also
// those of the steps after it, as they would be without the gradients until then. Each of these
// steps subtracts what the gradients so far change of its point, and keeps its own gradient, which
// the next full pass applies to the vertices. With G_j the gradient taken at the point alpha_j, the
// point alpha_t is off by
//   sum_j h(t - 1 - j) <alpha_t, alpha_j> G_j.
// Positions count from a full pass: the point that it writes into the parameters is at 0, row t - 1
// of `points` is the one at t, and `kept` holds the gradients of the positions before the present.

#include "mix_next.h"

#include <torch/csrc/stable/library.h>

namespace {

using namespace ensemblayers;

// What a rule makes of w and m in k steps without gradients, and h(k): what a gradient of 1 takes
// from w in its own step and k more.
struct Response {
  double of_w, of_m, h;
};

Response response(const SgdOptions& options, bool moment, int64_t k) {
  Response out{};
  with_sgd<double>(options, moment, [&](const auto& rule) {
    double none = 0, m = 0, w = 0;
    const auto idle = [&] {
      for (int64_t i = 0; i < k; ++i) rule(w, m, none, 0.0);
      return w;
    };
    rule(w, m, none, 1.0);
    out.h = -idle();
    w = 1, m = 0;
    out.of_w = idle();
    w = 0, m = 1;
    out.of_m = idle();
  });
  return out;
}

// The points of a cycle, the present position in it, and how many gradients are kept.
struct Cycle {
  SgdOptions options;
  bool moment;
  int64_t n, position, pending, rows;
  std::vector<double> alphas;  // [positions, rows]

  Cycle(const SgdOptions& options, bool moment, const Tensor& alphas, int64_t n, int64_t position,
        int64_t pending)
      : options(options),
        moment(moment),
        n(n),
        position(position),
        pending(pending),
        rows(alphas.size(1)),
        alphas(weights<double>(alphas)) {}

  // The factors in what the point at t is off by, of the `count` gradients up to position `last`.
  template <class V>
  std::vector<V> factors(int64_t t, int64_t last, int64_t count) const {
    std::vector<V> out;
    for (int64_t j = last - count + 1; j <= last; ++j) {
      double dot = 0;
      for (int64_t i = 0; i < n; ++i) dot += alphas[t * rows + i] * alphas[j * rows + i];
      const double h = response(options, moment, t - 1 - j).h;
      out.push_back(static_cast<V>(options.maximize ? -h * dot : h * dot));
    }
    return out;
  }
};

template <class V>
void subtract(V* __restrict to, V factor, const V* __restrict from, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] -= factor * from[j];
}

// The vertices alone, stepped by gradients that were kept; `sum` is a block to write over.
template <class V, class Rule>
void apply_kept(const Rule& rule, const std::vector<Buffers<V>>& steps, const Rows<V>& kept, V* sum,
                int64_t column, int64_t count) {
  for (size_t k = 0; k < steps.size(); ++k) {
    const V* grad = kept.data + static_cast<int64_t>(k) * kept.stride + column;
    step_block<V, V>(rule, steps[k], grad, sum, column, count);
  }
}

// What steps by gradients that were taken at `count` rows of alphas, from the first on, touch.
template <class V>
std::vector<Buffers<V>> kept_steps(const Tensor& vertices, const std::optional<Tensor>& moment,
                                   const std::vector<double>& alphas, int64_t rows, int64_t n,
                                   int64_t first, int64_t count, bool maximize) {
  std::vector<Buffers<V>> out;
  for (int64_t k = first; k < first + count; ++k) {
    Buffers<V> b{Rows<V>(vertices), {}, {}, {}, std::vector<V>(n)};
    b.w.count = n;  // Frozen ones have no part in it.
    if (moment) b.m.emplace(*moment);
    for (int64_t i = 0; i < n; ++i) {
      const double a = alphas[k * rows + i];
      b.alpha.push_back(static_cast<V>(maximize ? -a : a));
    }
    out.push_back(std::move(b));
  }
  return out;
}

// A block of a full pass in the midst of cycles: N vertices, kMore gradients kept, as many points
// ahead. What step_group and the loops of sgd_cycle do one after the other, at once.
constexpr int kMore = 2;

template <int N, class V, class P, class Rule>
void cycle_block(Rule rule, const std::vector<Buffers<V>>& steps, const Buffers<V>& last,
                 const Rows<V>& kept, const Rows<V>& ahead, const V* of_w, const V* of_m,
                 const P* __restrict grad, P* __restrict point, int64_t column, int64_t count) {
  constexpr bool kMoment = Rule::kMoments > 0;
  V* w[N];
  V* m[N];
  V alpha[kMore + 1][N], next[N], a[kMore][N], b[kMore][N];
  for (int i = 0; i < N; ++i) {
    w[i] = last.w.data + i * last.w.stride + column;
    m[i] = last.moment(last.m, i, column);
    next[i] = last.next[i];
    alpha[kMore][i] = last.alpha[i];
    for (int k = 0; k < kMore; ++k) alpha[k][i] = steps[k].alpha[i];
    for (int k = 0; k < kMore; ++k) a[k][i] = of_w[k * N + i], b[k][i] = of_m[k * N + i];
  }
  const V* past[kMore];
  V* to[kMore];
  for (int k = 0; k < kMore; ++k) {
    past[k] = kept.data + k * kept.stride + column;
    to[k] = ahead.data + k * ahead.stride + column;
  }
  const auto element = [&](int64_t j) {
    V g[kMore + 1], sum = 0, later[kMore] = {}, none = 0;
#pragma GCC unroll 8
    for (int k = 0; k < kMore; ++k) g[k] = past[k][j];
    g[kMore] = static_cast<V>(grad[j]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      V wi = w[i][j], mi = 0;
      if constexpr (kMoment) mi = m[i][j];
#pragma GCC unroll 8
      for (int k = 0; k <= kMore; ++k) rule(wi, mi, none, alpha[k][i] * g[k]);
      w[i][j] = wi;
      if constexpr (kMoment) m[i][j] = mi;
      sum += next[i] * wi;
#pragma GCC unroll 8
      for (int k = 0; k < kMore; ++k) {
        later[k] += kMoment ? a[k][i] * wi + b[k][i] * mi : a[k][i] * wi;
      }
    }
    point[j] = static_cast<P>(sum);
#pragma GCC unroll 8
    for (int k = 0; k < kMore; ++k) to[k][j] = later[k];
  };
  const auto fetch = [&](int64_t j) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(w[i] + j, 1);
      if constexpr (kMoment) __builtin_prefetch(m[i] + j, 1);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kMore; ++k) {
      __builtin_prefetch(past[k] + j);
      __builtin_prefetch(to[k] + j, 1);
    }
  };
  for_lines<V>(count, fetch, element);
}

// A full pass: kept gradients, taken at all points of `taken` but the last, the present one, taken
// at the last, then the points `coming`: the first into the parameters, the others into `points`.
void sgd_cycle(Tensor vertices, std::optional<Tensor> momentum_buffer, std::vector<Tensor> params,
               std::vector<Tensor> grads, std::vector<int64_t> columns, Tensor kept, Tensor points,
               Tensor taken, Tensor coming, int64_t n, double lr, double momentum,
               double dampening, double weight_decay, bool nesterov, bool maximize) {
  const SgdOptions o{lr, momentum, dampening, weight_decay, nesterov, false, maximize};
  const int64_t rows = coming.size(1), pending = taken.size(0) - 1, more = coming.size(0) - 1;
  const std::vector<double> before = weights<double>(taken), after = weights<double>(coming);
  dispatch(vertices, params, [&](auto v, auto p) {
    using V = decltype(v);
    using P = decltype(p);
    auto steps = kept_steps<V>(vertices, momentum_buffer, before, taken.size(1), n, 0, pending + 1,
                               maximize);
    Buffers<V> last = std::move(steps.back());
    steps.pop_back();
    last.w.count = rows;
    last.next.assign(after.begin(), after.begin() + rows);
    // Points ahead are sums over the vertices and over their momentum.
    std::vector<V> of_w, of_m;
    for (int64_t k = 1; k <= more; ++k) {
      const Response r = response(o, momentum_buffer.has_value(), k);
      for (int64_t i = 0; i < rows; ++i) {
        const double a = after[k * rows + i];
        of_w.push_back(static_cast<V>(i < n ? r.of_w * a : a));
        of_m.push_back(static_cast<V>(i < n ? r.of_m * a : 0));
      }
    }
    const Rows<V> past(kept), ahead(points);
    with_sgd<V>(o, momentum_buffer.has_value(), [&](const auto& rule) {
      for_blocks(ranges(params, columns), [&](size_t k, int64_t column, int64_t offset,
                                              int64_t count) {
        const P* g = static_cast<const P*>(grads[k].const_data_ptr()) + offset;
        P* point = static_cast<P*>(params[k].mutable_data_ptr()) + offset;
        if (pending == kMore && more == kMore && rows == n) {
          const auto run = [&](auto size) {
            cycle_block<decltype(size)::value>(rule, steps, last, past, ahead, of_w.data(),
                                               of_m.data(), g, point, column, count);
          };
          switch (n) {
            case 3: return run(std::integral_constant<int, 3>{});
            case 4: return run(std::integral_constant<int, 4>{});
            case 5: return run(std::integral_constant<int, 5>{});
            case 6: return run(std::integral_constant<int, 6>{});
          }
        }
        V sum[kBlock];
        apply_kept(rule, steps, past, sum, column, count);
        step_block(rule, last, g, point, column, count);
        for (int64_t t = 0; t < more; ++t) {
          V* __restrict to = ahead.data + t * ahead.stride + column;
          std::fill(to, to + count, V(0));
          for (int64_t i = 0; i < rows; ++i) {
            const V* __restrict w = last.w.data + i * last.w.stride + column;
            const V* __restrict m = i < n ? last.moment(last.m, i, column) : nullptr;
            const V a = of_w[t * rows + i], b = of_m[t * rows + i];
            if (m) {
              for (int64_t j = 0; j < count; ++j) to[j] += a * w[j] + b * m[j];
            } else {
              for (int64_t j = 0; j < count; ++j) to[j] += a * w[j];
            }
          }
        }
      });
    });
  });
}

// A block of a step between, with N older gradients.
template <int N, class V, class P>
void follow_block(const V* __restrict from, const V* __restrict older, int64_t stride,
                  const P* __restrict grad, V* __restrict own, P* __restrict point,
                  const V* __restrict factors, int64_t count) {
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    const V g = static_cast<V>(grad[j]);
    own[j] = g;
    V sum = from[j];
    for (int k = 0; k < N; ++k) sum -= factors[k] * older[k * stride + j];
    sum -= factors[N] * g;
    point[j] = static_cast<P>(sum);
  }
}

// A step between: the next point is one of `points` less what the gradients take from it.
void sgd_follow(Tensor points, Tensor kept, std::vector<Tensor> params, std::vector<Tensor> grads,
                std::vector<int64_t> columns, Tensor alphas, int64_t n, int64_t position,
                int64_t pending, bool moment, double lr, double momentum, double dampening,
                double weight_decay, bool nesterov, bool maximize) {
  const SgdOptions o{lr, momentum, dampening, weight_decay, nesterov, false, maximize};
  const Cycle cycle(o, moment, alphas, n, position, pending);
  dispatch(points, params, [&](auto v, auto p) {
    using V = decltype(v);
    using P = decltype(p);
    const Rows<V> ahead(points), past(kept);
    const std::vector<V> factors = cycle.factors<V>(position + 1, position, pending + 1);
    for_blocks(ranges(params, columns), [&](size_t k, int64_t column, int64_t offset,
                                            int64_t count) {
      const P* g = static_cast<const P*>(grads[k].const_data_ptr()) + offset;
      P* point = static_cast<P*>(params[k].mutable_data_ptr()) + offset;
      const V* from = ahead.data + position * ahead.stride + column;
      V* own = past.data + pending * past.stride + column;
      const V* older = past.data + column;
      const auto run = [&](auto many) {
        constexpr int kMany = decltype(many)::value;
        follow_block<kMany>(from, older, past.stride, g, own, point, factors.data(), count);
      };
      switch (pending) {
        case 0: return run(std::integral_constant<int, 0>{});
        case 1: return run(std::integral_constant<int, 1>{});
      }
      STD_TORCH_CHECK(false, "expected at most one older gradient, as in cycles of 3 steps");
    });
  });
}

// The kept gradients applied to the vertices, and to the present point and those to come.
void sgd_settle(Tensor vertices, std::optional<Tensor> momentum_buffer, Tensor kept, Tensor points,
                Tensor alphas, int64_t n, int64_t position, int64_t pending, double lr,
                double momentum, double dampening, double weight_decay, bool nesterov,
                bool maximize) {
  const SgdOptions o{lr, momentum, dampening, weight_decay, nesterov, false, maximize};
  const bool moment = momentum_buffer.has_value();
  const Cycle cycle(o, moment, alphas, n, position, pending);
  dispatch(vertices, {vertices}, [&](auto v, auto) {
    using V = decltype(v);
    const auto steps = kept_steps<V>(vertices, momentum_buffer, cycle.alphas, cycle.rows, n,
                                     position - pending, pending, maximize);
    std::vector<std::vector<V>> factors;
    for (int64_t t = position; t <= points.size(0); ++t) {
      factors.push_back(cycle.factors<V>(t, position - 1, pending));
    }
    const Rows<V> ahead(points), past(kept);
    with_sgd<V>(o, moment, [&](const auto& rule) {
      const std::vector<Range> all{{0, 0, vertices.size(1)}};
      for_blocks(all, [&](size_t, int64_t column, int64_t, int64_t count) {
        V sum[kBlock];
        apply_kept(rule, steps, past, sum, column, count);
        for (int64_t t = position; t <= ahead.count; ++t) {
          for (int64_t j = 0; j < pending; ++j) {
            subtract<V>(ahead.data + (t - 1) * ahead.stride + column, factors[t - position][j],
                        past.data + j * past.stride + column, count);
          }
        }
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ensemblayers, m) {
  m.def(
      "sgd_cycle_(Tensor(a!) vertices, Tensor(b!)? momentum_buffer, Tensor(c!)[] params, "
      "Tensor[] grads, int[] columns, Tensor kept, Tensor(d!) points, Tensor taken, Tensor coming, "
      "int n, float lr, float momentum, float dampening, float weight_decay, bool nesterov, "
      "bool maximize) -> ()");
  m.def(
      "sgd_follow_(Tensor points, Tensor(a!) kept, Tensor(b!)[] params, Tensor[] grads, "
      "int[] columns, Tensor alphas, int n, int position, int pending, bool moment, float lr, "
      "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize) -> ()");
  m.def(
      "sgd_settle_(Tensor(a!) vertices, Tensor(b!)? momentum_buffer, Tensor kept, "
      "Tensor(c!) points, Tensor alphas, int n, int position, int pending, float lr, "
      "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ensemblayers, CPU, m) {
  m.impl("sgd_cycle_", TORCH_BOX(&sgd_cycle));
  m.impl("sgd_follow_", TORCH_BOX(&sgd_follow));
  m.impl("sgd_settle_", TORCH_BOX(&sgd_settle));
}
