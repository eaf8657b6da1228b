// The gradient of a convolution's weights on a CPU, in one product: y's gradient [out, places]
// times x's patches [places, in * kh * kw], which exist as panels only. float32, dense.
// Built at first use through libtorch's stable ABI: see ensemblayers/ops/native.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "product.h"

namespace {

using namespace ensemblayers;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Where an image has the value of each element of the kernel at each place, [kh * kw, oh * ow]; -1
// in the padding.
std::vector<int64_t> sources(const Tensor& x, const Tensor& grad, const Tensor& d_weight,
                             const std::vector<int64_t>& stride,
                             const std::vector<int64_t>& padding,
                             const std::vector<int64_t>& dilation) {
  std::vector<int64_t> found;
  for (int64_t kernel_y = 0; kernel_y < d_weight.size(2); ++kernel_y) {
    for (int64_t kernel_x = 0; kernel_x < d_weight.size(3); ++kernel_x) {
      for (int64_t out_y = 0; out_y < grad.size(2); ++out_y) {
        for (int64_t out_x = 0; out_x < grad.size(3); ++out_x) {
          const int64_t in_y = out_y * stride[0] + kernel_y * dilation[0] - padding[0];
          const int64_t in_x = out_x * stride[1] + kernel_x * dilation[1] - padding[1];
          const bool inside = in_y >= 0 && in_y < x.size(2) && in_x >= 0 && in_x < x.size(3);
          found.push_back(inside ? in_y * x.size(3) + in_x : -1);
        }
      }
    }
  }
  return found;
}

void gradient(Tensor grad, Tensor x, Tensor d_weight, std::vector<int64_t> stride,
              std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  using V = float;
  constexpr int64_t kColumns = Simd<V>::kColumns;
  for (const Tensor& t : {grad, x, d_weight}) {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.dim() == 4,
                    "expected dense float32 tensors of four dimensions");
  }
  STD_TORCH_CHECK(grad.size(0) == x.size(0) && grad.size(1) == d_weight.size(0) &&
                      x.size(1) == d_weight.size(1),
                  "expected grad [B, out, oh, ow], x [B, in, h, w], d_weight [out, in, kh, kw]");
  const int64_t examples = x.size(0), in = x.size(1), out = grad.size(1);
  const int64_t pixels = x.size(2) * x.size(3), places = grad.size(2) * grad.size(3);
  const int64_t kernel = d_weight.size(2) * d_weight.size(3), columns = in * kernel;
  const std::vector<int64_t> from = sources(x, grad, d_weight, stride, padding, dilation);
  const V* g = static_cast<const V*>(grad.const_data_ptr());
  const V* xs = static_cast<const V*>(x.const_data_ptr());
  V* dw = static_cast<V*>(d_weight.mutable_data_ptr());

  const auto load_g = [&](int64_t j, int64_t first, int64_t count, V* to) {
    int64_t b = first / places, p = first % places;
    for (int64_t k = 0; k < count; ++k) {
      to[k] = g[(b * out + j) * places + p];
      if (++p == places) p = 0, ++b;
    }
  };
  const auto pack_x = [&](int64_t c, V* panel) {
    for (int64_t k = 0; k < kColumns; ++k) {
      const int64_t channel = (c + k) / kernel;
      const int64_t* own = &from[(c + k) % kernel * places];
      V* to = panel + k;
      for (int64_t b = 0; b < examples; ++b) {
        const V* image = xs + (b * in + channel) * pixels;
        for (int64_t p = 0; p < places; ++p, to += kColumns) {
          *to = channel < in && own[p] >= 0 ? image[own[p]] : V(0);
        }
      }
    }
  };
  const bool streamed = streams(dw, columns);
  const auto store_w = [&](int64_t j, int64_t c, const V* h) {
    V* to = dw + j * columns + c;
    if (streamed && columns - c >= kColumns) {
      stream(to, h);
    } else {
      std::memcpy(to, h, std::min(kColumns, columns - c) * sizeof(V));
    }
  };
  product<V>(out, examples * places, columns, load_g, pack_x, store_w);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ensemblayers, m) {
  m.def(
      "conv2d_weight_gradient(Tensor grad, Tensor x, Tensor(a!) d_weight, int[] stride, "
      "int[] padding, int[] dilation) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ensemblayers, CPU, m) {
  m.impl("conv2d_weight_gradient", TORCH_BOX(&gradient));
}
