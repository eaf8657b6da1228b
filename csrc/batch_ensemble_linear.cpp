// BatchEnsemble's linear layer on a CPU: y = (x * r_m) W^T and y * s_m + bias_m for the rows of
// each member m, and the gradients of all of it with as many products as a plain layer's.
//
// With g the gradient of y and h_m = g_m^T x_m [out, in] over the member's rows,
//   dW = sum_m r_m h_m (by columns),   dr_m = the column sums of W * h_m.
// The h_m exist only as tiles in registers, and dr needs no gradient of x. If they are to be its
// own, the other products are product.h's, scaled as they are loaded and stored. Else they are the
// library's between passes that scale, and where x's gradient is asked for, dr_m are the sums of
// x_m * (g_m W), and dW = g^T (x * r) is the library's too.
// Built at first use through libtorch's stable ABI: see ensemblayers/ops/native.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>

#include "product.h"

namespace {

using namespace ensemblayers;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 1024;  // Rows of g and x at once.
constexpr int64_t kCache = 512 * 1024, kGroup = 32;  // Bytes, panels.
constexpr int64_t kPacked = 8;  // Rows side by side that the first-level cache holds.
constexpr int64_t kStreamed = 512 * 1024;  // Bytes of a gradient that no near cache holds.
constexpr int64_t kRowsAtOnce = 1024;  // A thread's: with fewer a product is slower.
constexpr int64_t kGrain = 16 * 1024;  // Elements that are worth a thread.

template <class V>
const V* data(const Tensor& t) {
  return static_cast<const V*>(t.const_data_ptr());
}

template <class V>
V* mutable_data(const Tensor& t) {
  return static_cast<V*>(t.mutable_data_ptr());
}

// What rows [begin, end) of all add to a tile of dW and, times the tile of W, to dr. They are in
// g [end - begin, kRows] and x [end - begin, kColumns]; w and dw are [kRows, kColumns], r and sums
// [n, kColumns], and `each` rows are a member's.
template <class V>
void add_to_tile(const V* g, const V* x, const V* r, V* sums, const V* w, V* dw, int64_t begin,
                 int64_t end, int64_t each) {
  using S = Simd<V>;
  using Vector = typename S::Vector;
  for (int64_t j = begin; j < end;) {
    const bool fresh = j == 0;  // dw holds nothing yet.
    const int64_t m = j / each, last = std::min(end, (m + 1) * each);
    Vector h[kRows][kVectors] = {};
    add_product<V, 1, kRows>(g, x, last - j, h);
    g += (last - j) * kRows;
    x += (last - j) * S::kColumns;
    j = last;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vector rv = S::at(r + m * S::kColumns, v);
      Vector sum[2] = {};  // Two chains of additions.
#pragma GCC unroll 16
      for (int q = 0; q < kRows; ++q) sum[q % 2] += S::at(w + q * S::kColumns, v) * h[q][v];
      S::at(sums + m * S::kColumns, v) += sum[0] + sum[1];
      if (fresh) {
#pragma GCC unroll 16
        for (int q = 0; q < kRows; ++q) S::at(dw + q * S::kColumns, v) = rv * h[q][v];
      } else {
#pragma GCC unroll 16
        for (int q = 0; q < kRows; ++q) S::at(dw + q * S::kColumns, v) += rv * h[q][v];
      }
    }
  }
}

template <class V>
void weights_impl(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& r,
                  const Tensor& d_weight, const Tensor& d_r) {
  constexpr int64_t kColumns = Simd<V>::kColumns, kTile = kRows * kColumns;
  const int64_t n = r.size(0), out = weight.size(0), in = weight.size(1), rows = x.size(0);
  const int64_t each = rows / n, tiles = (out + kRows - 1) / kRows;
  const V *g = data<V>(grad), *xs = data<V>(x), *w = data<V>(weight), *rs = data<V>(r);
  V *dw = mutable_data<V>(d_weight), *dr = mutable_data<V>(d_r);

  // g by blocks of rows, and in them by tiles of kRows outputs: [rows, kRows] each.
  const int64_t blocks = (rows + kBlock - 1) / kBlock, block = (rows + blocks - 1) / blocks;
  const auto packed = uninitialized<V>(tiles * rows * kRows);
  const auto tile_of_g = [&](int64_t first, int64_t last, int64_t t) {
    return packed.get() + (first * tiles + (last - first) * t) * kRows;
  };
  torch::stable::parallel_for(0, tiles, 8, [&](int64_t begin, int64_t end) {
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t last = std::min(rows, first + block);
      for (int64_t some = first; some < last; some += kPacked) {
        for (int64_t t = begin; t < end; ++t) {
          V* to = tile_of_g(first, last, t) + (some - first) * kRows;
          for (int64_t j = some; j < std::min(last, some + kPacked); ++j, to += kRows) {
            load<V, kRows>(to, g + j * out + t * kRows, out - t * kRows);
          }
        }
      }
    }
  });

  // Panels of kColumns inputs, side by side as long as a block's rows of x fit into the cache: the
  // longer the runs of W's rows, the fewer pages are looked up, and the less often g is read.
  const int64_t panels = (in + kColumns - 1) / kColumns;
  const int64_t fit = kCache / (block * kColumns * static_cast<int64_t>(sizeof(V)));
  const int64_t group = std::clamp<int64_t>(fit, 1, kGroup);
  const bool streamed =
      out * in * static_cast<int64_t>(sizeof(V)) >= kStreamed && streams(dw, in);
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    const auto x_panels = uninitialized<V>(group * block * kColumns);
    const auto r_panels = uninitialized<V>(group * n * kColumns);
    const auto sums = uninitialized<V>(group * n * kColumns);
    const auto w_tile = uninitialized<V>(kTile), dw_tile = uninitialized<V>(kTile);
    for (int64_t p = begin; p < end; p += group) {
      const int64_t here = std::min(group, end - p);
      for (int64_t k = 0; k < here; ++k) {
        const int64_t c = (p + k) * kColumns;
        for (int64_t m = 0; m < n; ++m) {
          load<V, kColumns>(&r_panels[(k * n + m) * kColumns], rs + m * in + c, in - c);
        }
      }
      std::fill(sums.get(), sums.get() + here * n * kColumns, V(0));
      for (int64_t first = 0; first < rows; first += block) {
        const int64_t last = std::min(rows, first + block);
        for (int64_t some = first; some < last; some += kPacked) {
          for (int64_t k = 0; k < here; ++k) {
            const int64_t c = (p + k) * kColumns;
            V* to = &x_panels[(k * block + some - first) * kColumns];
            for (int64_t j = some; j < std::min(last, some + kPacked); ++j, to += kColumns) {
              load<V, kColumns>(to, xs + j * in + c, in - c);
            }
          }
        }
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t height = std::min<int64_t>(kRows, out - t * kRows);
          const int64_t below = std::min<int64_t>(kRows, out - (t + 1) * kRows);
          for (int64_t k = 0; k < here; ++k) {
            const int64_t c = (p + k) * kColumns, width = std::min(kColumns, in - c);
            const V* from = w + t * kRows * in + c;
            V* to = dw + t * kRows * in + c;
            for (int64_t q = 0; q < below; ++q) {
              for (int64_t b = 0; b < width; b += kLine / sizeof(V)) {
                __builtin_prefetch(from + (kRows + q) * in + b, 0, 2);
              }
            }
            if (height < kRows) std::fill_n(w_tile.get(), kTile, V(0));
            for (int64_t q = 0; q < height; ++q) {
              load<V, kColumns>(&w_tile[q * kColumns], from + q * in, width);
              if (first) load<V, kColumns>(&dw_tile[q * kColumns], to + q * in, width);
            }
            add_to_tile<V>(tile_of_g(first, last, t), &x_panels[k * block * kColumns],
                           &r_panels[k * n * kColumns], &sums[k * n * kColumns], w_tile.get(),
                           dw_tile.get(), first, last, each);
            for (int64_t q = 0; q < height; ++q) {
              if (streamed && width == kColumns) {
                stream(to + q * in, &dw_tile[q * kColumns]);
              } else {
                std::memcpy(to + q * in, &dw_tile[q * kColumns], width * sizeof(V));
              }
            }
          }
        }
      }
      for (int64_t k = 0; k < here; ++k) {
        const int64_t c = (p + k) * kColumns, width = std::min(kColumns, in - c);
        for (int64_t m = 0; m < n; ++m) {
          std::memcpy(dr + m * in + c, &sums[(k * n + m) * kColumns], width * sizeof(V));
        }
      }
    }
    end_of_stream();
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

// Of y * s + bias: d_y = g * s, d_s the sums of g * y, d_bias those of g, in one pass, and y * s
// again. d_y may be g; d_bias and y_s may be nothing.
template <class V>
void scales_impl(const V* grad, const V* y, const V* s, V* d_y, V* d_s, V* d_bias, V* y_s,
                 int64_t rows, int64_t n, int64_t out) {
  using S = Simd<V>;
  using Vector = typename S::Vector;
  constexpr int kWide = 4;  // Vectors.
  constexpr int64_t kColumns = kWide * S::kLanes;
  const int64_t each = rows / n, blocks = (out + kColumns - 1) / kColumns;
  const int64_t grain = 1 + kGrain / (each * kColumns + 1);
  torch::stable::parallel_for(0, n * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t m = k / blocks, first = k % blocks * kColumns;
      const int64_t count = std::min(kColumns, out - first), own = m * out + first;
      const int64_t top = m * each * out + first, bottom = top + each * out;
      if (count == kColumns) {
        Vector scale[kWide], products[kWide] = {}, sums[kWide] = {};
        for (int v = 0; v < kWide; ++v) scale[v] = S::at(s + own, v);
        for (int64_t j = top; j < bottom; j += out) {
#pragma GCC unroll 8
          for (int v = 0; v < kWide; ++v) {
            const Vector g = S::at(grad + j, v), ys = S::at(y + j, v);
            products[v] += g * ys;
            sums[v] += g;
            S::at(d_y + j, v) = g * scale[v];
            if (y_s) S::at(y_s + j, v) = ys * scale[v];
          }
        }
        std::memcpy(d_s + own, products, sizeof(products));
        if (d_bias) std::memcpy(d_bias + own, sums, sizeof(sums));
        continue;
      }
      V products[kColumns] = {}, sums[kColumns] = {};
      for (int64_t j = top; j < bottom; j += out) {
        for (int64_t c = 0; c < count; ++c) {
          const V g = grad[j + c];
          products[c] += g * y[j + c];
          sums[c] += g;
          d_y[j + c] = g * s[own + c];
          if (y_s) y_s[j + c] = y[j + c] * s[own + c];
        }
      }
      std::copy(products, products + count, d_s + own);
      if (d_bias) std::copy(sums, sums + count, d_bias + own);
    }
  });
}

// A panel's row: to = from * scale + shift; `shift` may be nothing.
template <class V>
void scale_part(const V* from, const V* scale, const V* shift, V* to, int64_t count) {
  using S = Simd<V>;
  if (count >= S::kColumns) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const typename S::Vector y = S::at(from, v) * S::at(scale, v);
      S::at(to, v) = shift ? y + S::at(shift, v) : y;
    }
    return;
  }
  for (int64_t k = 0; k < count; ++k) to[k] = from[k] * scale[k] + (shift ? shift[k] : V(0));
}

// y = (x * r) W^T, unless it may be nothing, and y * s + bias.
template <class V>
void forward_impl(const V* x, const V* w, const V* r, const V* s, const V* bias, V* y, V* shifted,
                  int64_t rows, int64_t n, int64_t in, int64_t out) {
  constexpr int64_t kColumns = Simd<V>::kColumns;
  const int64_t each = rows / n;
  const auto load_x = [&](int64_t j, int64_t first, int64_t count, V* __restrict to) {
    const V* from = x + j * in + first;
    const V* scale = r + j / each * in + first;
    for (int64_t k = 0; k < count; ++k) to[k] = from[k] * scale[k];
  };
  const auto pack_w = [&](int64_t c, V* to) {
    transposed_panel(w + c * in, to, std::min(kColumns, out - c), in);
  };
  const auto store_y = [&](int64_t j, int64_t c, const V* h) {
    const int64_t own = j / each * out + c, count = std::min(kColumns, out - c);
    if (y) std::memcpy(y + j * out + c, h, count * sizeof(V));
    scale_part(h, s + own, bias ? bias + own : nullptr, shifted + j * out + c, count);
  };
  product<V>(rows, in, out, load_x, pack_w, store_y);
}

// d_x = (d_y W) * r
template <class V>
void inputs_impl(const V* d_y, const V* w, const V* r, V* d_x, int64_t rows, int64_t n, int64_t in,
                 int64_t out) {
  constexpr int64_t kColumns = Simd<V>::kColumns;
  const int64_t each = rows / n;
  const auto load_y = [&](int64_t j, int64_t first, int64_t count, V* to) {
    std::memcpy(to, d_y + j * out + first, count * sizeof(V));
  };
  const auto pack_w = [&](int64_t c, V* to) {
    for (int64_t k = 0; k < out; ++k) {
      load<V, kColumns>(to + k * kColumns, w + k * in + c, in - c);
    }
  };
  const auto store_x = [&](int64_t j, int64_t c, const V* h) {
    const V *scale = r + j / each * in + c, *none = nullptr;
    scale_part(h, scale, none, d_x + j * in + c, std::min(kColumns, in - c));
  };
  product<V>(rows, out, in, load_y, pack_w, store_x);
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
                                   std::optional<Tensor> bias, bool own, bool keep_y) {
  const Tensor xs = dense(x), rs = dense(r);
  const Tensor ss = dense(s);
  std::optional<Tensor> bs;
  if (bias) bs = dense(*bias);
  const int64_t rows = xs.size(0), in = xs.size(1), n = rs.size(0), out = weight.size(0);
  Tensor y = empty(xs, own && !keep_y ? 0 : rows, out);
  const Tensor shifted = empty(xs, rows, out);
  dispatch(xs, [&](auto v) {
    using V = decltype(v);
    const V *from = data<V>(xs), *scale = data<V>(ss), *shift = bs ? data<V>(*bs) : nullptr;
    V* to = mutable_data<V>(shifted);
    if (own) {
      V* kept = keep_y ? mutable_data<V>(y) : nullptr;
      return forward_impl<V>(from, data<V>(weight), data<V>(rs), scale, shift, kept, to, rows, n,
                             in, out);
    }
    // So many rows at a time that what is scaled stays in the cache.
    const int64_t most = kRowsAtOnce * std::max<int64_t>(1, torch::stable::get_num_threads());
    Tensor scaled = empty(xs, std::min(rows, most), in);
    const Tensor transposed = torch::stable::transpose(weight, 0, 1);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t last = std::min(rows, first + most), count = last - first;
      scale_rows<V>(from + first * in, data<V>(rs), nullptr, mutable_data<V>(scaled), first, last,
                    rows / n, in);
      multiply(part(y, first, count), part(scaled, 0, count), transposed);
      scale_rows<V>(data<V>(y) + first * out, scale, shift, to + first * out, first, last, rows / n,
                    out);
    }
  });
  return {shifted, y};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad, Tensor x, Tensor weight, Tensor r,
                                                    Tensor s, Tensor y,
                                                    std::optional<Tensor> d_weight, bool of_scaled,
                                                    bool own) {
  const Tensor g = dense(grad), xs = dense(x);
  const Tensor rs = dense(r), ss = dense(s);
  const int64_t rows = xs.size(0), in = xs.size(1), n = rs.size(0), out = weight.size(0);
  const auto is = [&](const Tensor& t, int64_t height, int64_t width) {
    return t.scalar_type() == g.scalar_type() && t.dim() == 2 && t.size(0) == height &&
           t.size(1) == width;
  };
  STD_TORCH_CHECK(is(g, rows, out) && is(xs, rows, in) && is(rs, n, in) && is(ss, n, out) &&
                      is(y, rows, out) && is(weight, out, in) && weight.is_contiguous() &&
                      (!d_weight || (is(*d_weight, out, in) && d_weight->is_contiguous())),
                  "x, weight, r or s got another dtype, shape or order since the forward pass");
  const Tensor d_y = empty(g, rows, out), d_s = empty(g, n, out), d_bias = empty(g, n, out);
  const Tensor d_r = empty(g, d_weight || of_scaled ? n : 0, in);
  Tensor d_x = empty(g, of_scaled ? rows : 0, in);
  dispatch(xs, [&](auto v) {
    using V = decltype(v);
    scales_impl<V>(data<V>(g), data<V>(y), data<V>(ss), mutable_data<V>(d_y),
                   mutable_data<V>(d_s), mutable_data<V>(d_bias), nullptr, rows, n, out);
    if (d_weight && (own || !of_scaled)) weights_impl<V>(d_y, xs, weight, rs, *d_weight, d_r);
    if (!of_scaled) return;
    if (d_weight && own) {
      return inputs_impl<V>(data<V>(d_y), data<V>(weight), data<V>(rs), mutable_data<V>(d_x), rows,
                            n, in, out);
    }
    // The gradient of x * r is at hand, and r's with it: the library's products are faster.
    multiply(d_x, d_y, weight);
    Tensor scaled = empty(xs, d_weight ? rows : 0, in);
    V* from = mutable_data<V>(d_x);
    scales_impl<V>(from, data<V>(xs), data<V>(rs), from, mutable_data<V>(d_r), nullptr,
                   d_weight ? mutable_data<V>(scaled) : nullptr, rows, n, in);
    if (d_weight) multiply(*d_weight, torch::stable::transpose(d_y, 0, 1), scaled);
  });
  return {d_x, d_r, d_s, d_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ensemblayers, m) {
  m.def(
      "batch_ensemble_forward(Tensor x, Tensor weight, Tensor r, Tensor s, Tensor? bias, bool own, "
      "bool keep_y) -> (Tensor, Tensor)");
  m.def(
      "batch_ensemble_backward(Tensor grad, Tensor x, Tensor weight, Tensor r, Tensor s, Tensor y, "
      "Tensor(a!)? d_weight, bool of_scaled, bool own) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ensemblayers, CPU, m) {
  m.impl("batch_ensemble_forward", TORCH_BOX(&forward));
  m.impl("batch_ensemble_backward", TORCH_BOX(&backward));
}
