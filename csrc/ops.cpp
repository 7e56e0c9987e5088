// Torch operators on libtorch's stable ABI: no Python.h, no C++ types of torch cross the boundary,
// so one binary serves every Python and every torch >= 2.11.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename Id>
void count(const Tensor& ids, int64_t* counts, int64_t num_experts) {
  const Id* const begin = ids.const_data_ptr<Id>();
  for (const Id* id = begin; id != begin + ids.numel(); ++id) {
    STD_TORCH_CHECK(*id >= -1 && *id < num_experts, "expert_counts: id ", *id, " at position ",
                    id - begin, " is outside -1..", num_experts - 1,
                    "; pass logical expert ids, and -1 for an unused choice");
    if (*id >= 0) ++counts[*id];
  }
}

// Load of every expert: how many of `ids` name it. -1 marks an unused choice and counts nowhere.
Tensor expert_counts(const Tensor& ids, int64_t num_experts) {
  STD_TORCH_CHECK(ids.is_cpu() && ids.is_contiguous(),
                  "expert_counts: ids must be a contiguous CPU tensor; call .contiguous() or .cpu()");
  STD_TORCH_CHECK(num_experts > 0, "expert_counts: num_experts is ", num_experts, ", must be >= 1");
  const ScalarType type = ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int,
                  "expert_counts: ids must be int32 or int64");
  Tensor counts = torch::stable::new_zeros(ids, {num_experts}, ScalarType::Long);
  int64_t* const out = counts.mutable_data_ptr<int64_t>();
  if (type == ScalarType::Long) {
    count<int64_t>(ids, out, num_experts);
  } else {
    count<int32_t>(ids, out, num_experts);
  }
  return counts;
}

}  // namespace

STABLE_TORCH_LIBRARY(elasticep, m) {
  m.def("expert_counts(Tensor ids, int num_experts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(elasticep, CPU, m) {
  m.impl("expert_counts", TORCH_BOX(&expert_counts));
}
