// BatchEnsemble's linear layer on a CPU: y = (x * r_m) W^T and y * s_m + bias_m for the rows of each
// member m, and the gradients of all of it in the time of a plain layer's products.
//
// With g the gradient of y and h_m = g_m^T x_m [out, in] over the member's rows,
//   dW = sum_m r_m h_m (by columns),   dr_m = the column sums of W * h_m.
// The h_m exist only as tiles in registers, and dr needs no gradient of x.
// Built at first use through libtorch's stable ABI: see ensemblayers/ops/native.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tile is kRows x kVectors vectors: the registers hold one of h and one of dW.
#ifdef __AVX512F__
constexpr int kBytes = 64, kVectors = 2;
#else
constexpr int kBytes = 32, kVectors = 1;
#endif
constexpr int kRows = 6;
constexpr int64_t kCache = 256 * 1024, kGroup = 32;  // Bytes, panels.
constexpr int64_t kRowsAtOnce = 256;  // A thread's: with fewer a product is slower.
constexpr int64_t kGrain = 16 * 1024;  // Elements that are worth a thread.

template <class V>
struct Simd {
  static constexpr int kLanes = kBytes / sizeof(V);
  static constexpr int kColumns = kVectors * kLanes;  // Of a tile.
  typedef V Vector __attribute__((vector_size(kBytes), aligned(sizeof(V)), may_alias));

  static Vector& at(V* p, int v) { return reinterpret_cast<Vector*>(p)[v]; }
  static const Vector& at(const V* p, int v) { return reinterpret_cast<const Vector*>(p)[v]; }
};

template <class V>
const V* data(const Tensor& t) {
  return static_cast<const V*>(t.const_data_ptr());
}

template <class V>
V* mutable_data(const Tensor& t) {
  return static_cast<V*>(t.mutable_data_ptr());
}

template <class V>
std::unique_ptr<V[]> uninitialized(int64_t count) {
  return std::unique_ptr<V[]>(new V[count]);
}

// The columns [first, first + kColumns) of a row, zero beyond the last.
template <class V>
void load(V* to, const V* row, int64_t first, int64_t columns) {
  const int64_t count = std::min<int64_t>(Simd<V>::kColumns, columns - first);
  std::memcpy(to, row + first, count * sizeof(V));
  std::fill(to + count, to + Simd<V>::kColumns, V(0));
}

// dW's rows [top, top + kRows) and columns [first, first + kColumns), and what they add to dr.
// Member m has the rows m * each and on of g [n * each, kRows] and x [n * each, kColumns], and one
// of r and sums [n, kColumns].
template <class V>
void tile_of_weights(const V* g, const V* x, const V* r, V* sums, const V* w, V* dw, int64_t n,
                     int64_t each, int64_t out, int64_t in, int64_t top, int64_t first) {
  using S = Simd<V>;
  using Vector = typename S::Vector;
  constexpr int64_t kColumns = S::kColumns;
  const int64_t valid = std::min<int64_t>(kRows, out - top);
  const int64_t count = std::min(kColumns, in - first);
  const V* rows[kRows];
  V padded[kRows * kColumns];
  for (int q = 0; q < kRows; ++q) {
    rows[q] = w + std::min<int64_t>(top + q, out - 1) * in + first;
    if (count < kColumns) {
      load(padded + q * kColumns, rows[q] - first, first, in);
      rows[q] = padded + q * kColumns;
    }
    const int64_t next = std::min<int64_t>(top + kRows + q, out - 1) * in + first;
    for (int64_t c = 0; c < count; c += 64 / sizeof(V)) {
      __builtin_prefetch(w + next + c);
      __builtin_prefetch(dw + next + c, 1);
    }
  }
  Vector d[kRows][kVectors] = {};
  for (int64_t m = 0; m < n; ++m, r += kColumns, sums += kColumns) {
    Vector h[kRows][kVectors] = {};
    for (int64_t j = 0; j < each; ++j, g += kRows, x += kColumns) {
      Vector row[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) row[v] = S::at(x, v);
#pragma GCC unroll 8
      for (int q = 0; q < kRows; ++q) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) h[q][v] += g[q] * row[v];
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vector rv = S::at(r, v);
      Vector sum = S::at(sums, v);
#pragma GCC unroll 8
      for (int q = 0; q < kRows; ++q) {
        d[q][v] += rv * h[q][v];
        sum += S::at(rows[q], v) * h[q][v];
      }
      S::at(sums, v) = sum;
    }
  }
  for (int q = 0; q < kRows && q < valid; ++q) {
    V whole[kColumns];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) S::at(whole, v) = d[q][v];
    std::memcpy(dw + (top + q) * in + first, whole, count * sizeof(V));
  }
}

template <class V>
void weights_impl(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& r,
                  const Tensor& d_weight, const Tensor& d_r) {
  constexpr int64_t kColumns = Simd<V>::kColumns;
  const int64_t n = r.size(0), out = weight.size(0), in = weight.size(1), rows = x.size(0);
  const int64_t each = rows / n, tiles = (out + kRows - 1) / kRows;
  const V *g = data<V>(grad), *xs = data<V>(x), *w = data<V>(weight), *rs = data<V>(r);
  V *dw = mutable_data<V>(d_weight), *dr = mutable_data<V>(d_r);

  // g by tiles of kRows outputs: [tiles, rows, kRows].
  const auto packed = uninitialized<V>(tiles * rows * kRows);
  torch::stable::parallel_for(0, tiles, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      V* to = packed.get() + t * rows * kRows;
      const int64_t count = std::min<int64_t>(kRows, out - t * kRows);
      for (int64_t j = 0; j < rows; ++j, to += kRows) {
        const V* from = g + j * out + t * kRows;
        for (int64_t q = 0; q < kRows; ++q) to[q] = q < count ? from[q] : V(0);
      }
    }
  });

  // Panels of kColumns inputs, side by side as long as their rows of x fit into the second-level
  // cache: the longer the runs of W's rows, the fewer pages are looked up.
  const int64_t panels = (in + kColumns - 1) / kColumns;
  const int64_t fit = kCache / (rows * kColumns * static_cast<int64_t>(sizeof(V)));
  const int64_t group = std::clamp<int64_t>(fit, 1, kGroup);
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    const auto x_panels = uninitialized<V>(group * rows * kColumns);
    std::vector<V> r_panels(group * n * kColumns), sums(group * n * kColumns);
    for (int64_t p = begin; p < end; p += group) {
      const int64_t here = std::min(group, end - p);
      for (int64_t k = 0; k < here; ++k) {
        const int64_t first = (p + k) * kColumns;
        V* to = &x_panels[k * rows * kColumns];
        for (int64_t j = 0; j < rows; ++j) load(to + j * kColumns, xs + j * in, first, in);
        for (int64_t m = 0; m < n; ++m) {
          load(&r_panels[(k * n + m) * kColumns], rs + m * in, first, in);
        }
      }
      std::fill(sums.begin(), sums.end(), V(0));
      for (int64_t t = 0; t < tiles; ++t) {
        for (int64_t k = 0; k < here; ++k) {
          tile_of_weights<V>(packed.get() + t * rows * kRows, &x_panels[k * rows * kColumns],
                             &r_panels[k * n * kColumns], &sums[k * n * kColumns], w, dw, n, each,
                             out, in, t * kRows, (p + k) * kColumns);
        }
      }
      for (int64_t k = 0; k < here; ++k) {
        const int64_t first = (p + k) * kColumns, count = std::min(kColumns, in - first);
        for (int64_t m = 0; m < n; ++m) {
          std::memcpy(dr + m * in + first, &sums[(k * n + m) * kColumns], count * sizeof(V));
        }
      }
    }
  });
}

// The rows [first, last) of a batch, each with the scale (and shift) of its member, of which there
// are `each`: to = from * scale + shift. `from` and `to` begin with row first.
template <class V>
void scale_rows(const V* from, const V* scale, const V* shift, V* to, int64_t first, int64_t last,
                int64_t each, int64_t columns) {
  const int64_t grain = 1 + kGrain / (columns + 1);
  torch::stable::parallel_for(first, last, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const V* in = from + (j - first) * columns;
      const V* __restrict s = scale + j / each * columns;
      const V* __restrict b = shift ? shift + j / each * columns : nullptr;
      V* out = to + (j - first) * columns;
      if (b) {
        for (int64_t c = 0; c < columns; ++c) out[c] = in[c] * s[c] + b[c];
      } else {
        for (int64_t c = 0; c < columns; ++c) out[c] = in[c] * s[c];
      }
    }
  });
}

// Of y * s + bias: d_y = g * s, d_s the sums of g * y, d_bias those of g, in one pass.
template <class V>
void scales_impl(const V* grad, const V* y, const V* s, V* d_y, V* d_s, V* d_bias, int64_t rows,
                 int64_t n, int64_t out) {
  using S = Simd<V>;
  constexpr int64_t kColumns = 2 * S::kLanes;
  const int64_t each = rows / n, blocks = (out + kColumns - 1) / kColumns;
  const int64_t grain = 1 + kGrain / (each * kColumns + 1);
  torch::stable::parallel_for(0, n * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t m = k / blocks, first = k % blocks * kColumns;
      const int64_t count = std::min(kColumns, out - first), own = m * out + first;
      V products[kColumns] = {}, sums[kColumns] = {};
      const auto row = [&](int64_t j, int64_t columns) {
        const V* g = grad + j * out + first;
        const V* ys = y + j * out + first;
        V* to = d_y + j * out + first;
        for (int64_t c = 0; c < columns; ++c) {
          const V value = g[c];
          products[c] += value * ys[c];
          sums[c] += value;
          to[c] = value * s[own + c];
        }
      };
      for (int64_t j = m * each; j < (m + 1) * each; ++j) {
        count == kColumns ? row(j, kColumns) : row(j, count);
      }
      std::copy(products, products + count, d_s + own);
      std::copy(sums, sums + count, d_bias + own);
    }
  });
}

// Calls f with a value of the tensors' type.
template <class F>
void dispatch(const Tensor& like, const F& f) {
  if (like.scalar_type() == ScalarType::Double) return f(double{});
  STD_TORCH_CHECK(like.scalar_type() == ScalarType::Float, "expected float32 or float64");
  f(float{});
}

Tensor empty(const Tensor& like, int64_t rows, int64_t columns) {
  return torch::stable::new_empty(like, {rows, columns});
}

// A call of torch's that changes nothing costs as much as a small product.
Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// Rows [first, first + count).
Tensor part(Tensor& t, int64_t first, int64_t count) {
  return count == t.size(0) ? t : torch::stable::narrow(t, 0, first, count);
}

// out = a b.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // Takes over the reference to out.
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, Tensor r, Tensor s,
                                   std::optional<Tensor> bias) {
  const Tensor xs = dense(x), rs = dense(r);
  const Tensor ss = dense(s);
  std::optional<Tensor> bs;
  if (bias) bs = dense(*bias);
  const int64_t rows = xs.size(0), in = xs.size(1), n = rs.size(0), out = weight.size(0);
  // So many rows at a time that what is scaled stays in the cache.
  const int64_t most = kRowsAtOnce * std::max<int64_t>(1, torch::stable::get_num_threads());
  Tensor scaled = empty(xs, std::min(rows, most), in), y = empty(xs, rows, out);
  const Tensor shifted = empty(xs, rows, out), transposed = torch::stable::transpose(weight, 0, 1);
  dispatch(xs, [&](auto v) {
    using V = decltype(v);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t last = std::min(rows, first + most), count = last - first;
      scale_rows<V>(data<V>(xs) + first * in, data<V>(rs), nullptr, mutable_data<V>(scaled), first,
                    last, rows / n, in);
      multiply(part(y, first, count), part(scaled, 0, count), transposed);
      scale_rows<V>(data<V>(y) + first * out, data<V>(ss), bs ? data<V>(*bs) : nullptr,
                    mutable_data<V>(shifted) + first * out, first, last, rows / n, out);
    }
  });
  return {shifted, y};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad, Tensor x, Tensor weight, Tensor r,
                                                    Tensor s, Tensor y,
                                                    std::optional<Tensor> d_weight, bool of_x) {
  const Tensor g = dense(grad), xs = dense(x);
  const Tensor rs = dense(r), ss = dense(s);
  const int64_t rows = xs.size(0), in = xs.size(1), n = rs.size(0), out = weight.size(0);
  const Tensor d_y = empty(g, rows, out), d_s = empty(g, n, out), d_bias = empty(g, n, out);
  const Tensor d_r = empty(g, d_weight ? n : 0, in);
  Tensor d_x = d_r;
  dispatch(xs, [&](auto v) {
    using V = decltype(v);
    scales_impl<V>(data<V>(g), data<V>(y), data<V>(ss), mutable_data<V>(d_y),
                   mutable_data<V>(d_s), mutable_data<V>(d_bias), rows, n, out);
    if (of_x) {
      d_x = torch::stable::matmul(d_y, weight);
      V* own = mutable_data<V>(d_x);
      scale_rows<V>(own, data<V>(rs), nullptr, own, 0, rows, rows / n, in);
    }
    if (d_weight) weights_impl<V>(d_y, xs, weight, rs, *d_weight, d_r);
  });
  return {d_x, d_r, d_s, d_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ensemblayers, m) {
  m.def(
      "batch_ensemble_forward(Tensor x, Tensor weight, Tensor r, Tensor s, Tensor? bias) "
      "-> (Tensor, Tensor)");
  m.def(
      "batch_ensemble_backward(Tensor grad, Tensor x, Tensor weight, Tensor r, Tensor s, Tensor y, "
      "Tensor(a!)? d_weight, bool of_x) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ensemblayers, CPU, m) {
  m.impl("batch_ensemble_forward", TORCH_BOX(&forward));
  m.impl("batch_ensemble_backward", TORCH_BOX(&backward));
}
