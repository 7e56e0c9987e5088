// Dispatch and combine as torch operators on libtorch's stable ABI: no Python.h, no C++ types of torch cross the boundary, so
// one binary serves every Python and every torch >= 2.11. Graphs of torch.compile call them; an eager call goes straight to
// the C ABI (elasticep/client/exchange.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "target.h"

namespace {

using ept::Channel;
using ept::Target;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Named {
  const char* name;
  const Tensor& tensor;
};

std::string shape(const std::vector<int64_t>& sizes) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  out << ']';
  return out.str();
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

[[noreturn]] void wrong(Target& t, const char* name, const std::string& has, const std::string& needs) {
  ept::refuse(t, EP_EINVAL, std::string(name) + " of exchange '" + t.spec.name + "' has " + has + "; it needs " + needs);
}

void check_dtype(Target& t, Named n, bool fits, const char* needs) {
  if (!fits) wrong(t, n.name, std::string("dtype ") + torch::headeronly::toString(n.tensor.scalar_type()), needs);
}

// Shape, device and layout of a tensor whose address is handed on.
void check_memory(Target& t, Named n, const std::vector<int64_t>& sizes) {
  if (sizes_of(n.tensor) != sizes) wrong(t, n.name, "shape " + shape(sizes_of(n.tensor)), shape(sizes));
  const int32_t device = t.spec.device;
  if (device < 0 ? !n.tensor.is_cpu() : !n.tensor.is_cuda() || n.tensor.get_device_index() != device)
    wrong(t, n.name, "another device", device < 0 ? "the CPU" : "cuda:" + std::to_string(device));
  if (!n.tensor.is_contiguous()) wrong(t, n.name, "gaps in memory", "a contiguous tensor");
}

// The dtype of full rows as the C ABI counts them, -1: they are not full.
int full_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return EP_FP32;
    case ScalarType::Half:
      return EP_FP16;
    case ScalarType::BFloat16:
      return EP_BF16;
    default:
      return -1;
  }
}

// Checks x and its scales; gives the dtype of x as the C ABI counts it.
uint32_t check_rows(Target& t, const Tensor& x, const std::optional<Tensor>& scales) {
  const ept_exchange& spec = t.spec;
  if (x.dim() != 2) wrong(t, "x", "shape " + shape(sizes_of(x)), "[tokens, " + std::to_string(spec.hidden) + "]");
  const int64_t tokens = x.size(0);
  const ScalarType type = x.scalar_type();
  if (!scales) {
    const int code = full_dtype(type);
    check_dtype(t, {"x", x}, code >= 0 && (spec.block || uint32_t(code) == spec.wire), "that of the dispatch, or a full one where rows are quantised");
    check_memory(t, {"x", x}, {tokens, spec.hidden});
    return uint32_t(code);
  }
  if (!spec.block) wrong(t, "x_scales", "scales", "none: rows are not quantised");
  check_dtype(t, {"x", x}, type == (spec.wire == EP_NVFP4 ? ScalarType::Byte : ScalarType::Float8_e4m3fn), "the dispatch dtype's");
  check_memory(t, {"x", x}, {tokens, spec.width});
  const ScalarType of_scale = spec.float_scale ? ScalarType::Float : ScalarType::Byte;
  check_dtype(t, {"x_scales", *scales}, scales->scalar_type() == of_scale, spec.float_scale ? "float32" : "uint8");
  check_memory(t, {"x_scales", *scales}, {tokens, spec.hidden / spec.block});
  return spec.wire;
}

Channel& channel_of(Target& t, int64_t channel) {
  if (channel < 0 || channel >= int64_t(t.channels.size()))
    ept::refuse(t, EP_EUSAGE, "exchange '" + std::string(t.spec.name) + "' has no channel " + std::to_string(channel) + "; it has " +
                                  std::to_string(t.channels.size()));
  return t.channels[size_t(channel)];
}

void run(Target& t, int code) {
  if (code >= 0) return;
  if (code == EP_EINTR) ept::refuse(t, code, "a handler of a signal raised while exchange '" + std::string(t.spec.name) + "' was waited for");
  const char* const text = t.plane->last_error();
  ept::refuse(t, code, text && *text ? text : "error " + std::to_string(code));
}

// A tensor of the size and dtype of `like` over memory of the exchange.
Tensor over(Target& t, const char* name, void* memory, const Tensor& like, uint64_t bytes, const std::vector<int64_t>& strides) {
  if (uint64_t(like.numel()) * like.element_size() != bytes)
    wrong(t, name, std::to_string(uint64_t(like.numel()) * like.element_size()) + " bytes", std::to_string(bytes));
  return torch::stable::from_blob(memory, like.sizes(), strides, like.device(), like.scalar_type());
}

std::vector<int64_t> dense_strides(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; --i) strides[i - 2] = strides[i - 1] * sizes[i - 1];
  return strides;
}

// What arrived, for a caller whose tensor is not the exchange's own memory: a compiler may hand over copies.
void copy_out(Target& t, const char* name, const Tensor& given, void* real, uint64_t bytes, const std::vector<int64_t>* strides = nullptr) {
  if (!real || !given.numel() || given.data_ptr() == real) return;
  Tensor to = given;
  torch::stable::copy_(to, over(t, name, real, given, bytes, strides ? *strides : dense_strides(given)));
}

void copy_out(Target& t, const char* name, const std::optional<Tensor>& given, void* real, uint64_t bytes) {
  if (given) copy_out(t, name, *given, real, bytes);
}

void copy_scales(Target& t, const Tensor& given, const ept::Landing& l) {
  if (!t.spec.by_column) return copy_out(t, "scales", given, l.scales, l.row_count * t.spec.scale_bytes);
  // [..., rows, columns] over [..., columns][lead]
  std::vector<int64_t> strides{1, int64_t(l.scale_lead)};
  if (given.dim() == 3) strides.insert(strides.begin(), int64_t(l.scale_columns * l.scale_lead));
  copy_out(t, "scales", given, l.scales, l.row_count * l.scale_columns * 4, &strides);
}

void exchange_dispatch(const Tensor& rows, const std::optional<Tensor>& scales, const Tensor& ids, const Tensor& weights, const Tensor& counts,
                       const std::optional<Tensor>& offsets, const std::optional<Tensor>& places, const std::optional<Tensor>& row_slots,
                       const Tensor& lost, const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                       const std::optional<Tensor>& x_scales, int64_t exchange, int64_t channel, int64_t layer, double global_scale,
                       const std::optional<Tensor>& sources) {
  const auto target = ept::find(exchange);
  Target& t = *target;
  const ept_exchange& spec = t.spec;
  t.used = true;
  Channel& c = channel_of(t, channel);
  if (layer < 0 || layer >= int64_t(spec.layers))
    ept::refuse(t, EP_EUSAGE, "layer " + std::to_string(layer) + " is outside 0.." + std::to_string(spec.layers - 1));
  const uint32_t x_dtype = check_rows(t, x, x_scales);
  const int64_t tokens = x.size(0);
  const ScalarType id = topk_ids.scalar_type();
  check_dtype(t, {"topk_ids", topk_ids}, id == ScalarType::Long || id == ScalarType::Int, "int64 or int32");
  check_dtype(t, {"topk_weights", topk_weights}, topk_weights.scalar_type() == ScalarType::Float, "float32");
  check_memory(t, {"topk_ids", topk_ids}, {tokens, spec.topk});
  check_memory(t, {"topk_weights", topk_weights}, {tokens, spec.topk});
  if (!(global_scale > 0)) wrong(t, "global_scale", "value " + std::to_string(global_scale), "one above 0");
  check_dtype(t, {"lost", lost}, lost.scalar_type() == ScalarType::Byte, "uint8");
  check_memory(t, {"lost", lost}, {spec.max_tokens});
  if (tokens > int64_t(spec.max_tokens))
    ept::refuse(t, EP_ECAP, std::to_string(tokens) + " tokens for exchange '" + spec.name + "', whose cap is " + std::to_string(spec.max_tokens) +
                                " per rank; split the batch, or create the group with a larger max_tokens");
  run(t, t.plane->dispatch({uint32_t(channel), uint32_t(layer), uint32_t(tokens), x_dtype, id == ScalarType::Long ? 8u : 4u, x.data_ptr(),
                            x_scales ? x_scales->data_ptr() : nullptr, topk_ids.data_ptr(), static_cast<const float*>(topk_weights.data_ptr()),
                            tokens ? static_cast<uint8_t*>(lost.data_ptr()) : nullptr, float(global_scale)},
                           c));
  c.tokens = uint32_t(tokens);
  c.open = true;
  t.noted[size_t(channel) * spec.layers + size_t(layer)] = int32_t(tokens);
  const ept::Landing& l = c.landing;
  const uint64_t pairs = l.id_rows * spec.topk * 4;
  copy_out(t, "rows", rows, l.rows, l.row_count * spec.row_bytes);
  if (scales) copy_scales(t, *scales, l);
  copy_out(t, "ids", ids, l.ids, pairs);
  copy_out(t, "weights", weights, l.weights, pairs);
  copy_out(t, "counts", counts, l.counts, uint64_t(spec.slots) * 4);
  copy_out(t, "offsets", offsets, l.offsets, uint64_t(spec.slots + 1) * 4);
  copy_out(t, "places", places, l.places, pairs);
  copy_out(t, "row_slots", row_slots, l.row_slots, l.row_count * 4);
  copy_out(t, "sources", sources, l.sources, spec.ranks * ept::kSourceBytes);
}

// `rows` are given up by it: it is there for the compiler, which must not read them afterwards.
void exchange_combine(const Tensor& out, const Tensor& rows, const Tensor& y, int64_t exchange, int64_t channel, int64_t layer) {
  (void)rows;
  (void)layer;
  const auto target = ept::find(exchange);
  Target& t = *target;
  t.used = true;
  Channel& c = channel_of(t, channel);
  const int out_dtype = full_dtype(out.scalar_type());
  check_dtype(t, {"out", out}, out_dtype >= 0, "float32, float16 or bfloat16");
  check_memory(t, {"out", out}, {c.tokens, t.spec.hidden});
  if (c.landing.out && y.data_ptr() != c.landing.out) {
    Tensor real = over(t, "y", c.landing.out, y, c.landing.row_count * t.spec.out_bytes, dense_strides(y));
    torch::stable::copy_(real, y);
  }
  c.open = false;
  run(t, t.plane->combine(uint32_t(channel), c, out.data_ptr(), uint32_t(out_dtype)));
}

}  // namespace

STABLE_TORCH_LIBRARY(elasticep, m) {
  m.def(
      "exchange_dispatch(Tensor(a!) rows, Tensor(b!)? scales, Tensor(c!) ids, Tensor(d!) weights, Tensor(e!) counts, Tensor(f!)? offsets, "
      "Tensor(g!)? places, Tensor(h!)? row_slots, Tensor(i!) lost, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? x_scales, "
      "int exchange, int channel, int layer, float global_scale=1.0, Tensor(j!)? sources=None) -> ()");
  m.def("exchange_combine(Tensor(a!) out, Tensor(b!) rows, Tensor y, int exchange, int channel, int layer) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(elasticep, CPU, m) {
  m.impl("exchange_dispatch", TORCH_BOX(&exchange_dispatch));
  m.impl("exchange_combine", TORCH_BOX(&exchange_combine));
}

STABLE_TORCH_LIBRARY_IMPL(elasticep, CUDA, m) {
  m.impl("exchange_dispatch", TORCH_BOX(&exchange_dispatch));
  m.impl("exchange_combine", TORCH_BOX(&exchange_combine));
}
