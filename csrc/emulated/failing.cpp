// Calls of the CUDA runtime and driver that fail on a test's word, which a process may have from its beginning, in
// ELASTICEP_EMULATED_FAILING: "cuMemCreate=2".
#include <cstdlib>
#include <map>
#include <string>

#include "device.h"

namespace epe {

namespace {

struct Order {
  cudaError_t status;
  uint32_t skip;
};
std::mutex& mutex() {
  static auto m = new std::mutex;
  return *m;
}
std::map<std::string, Order>* from_environment() {
  auto all = new std::map<std::string, Order>;
  const char* text = getenv("ELASTICEP_EMULATED_FAILING");
  const std::string told = text ? text : "";
  if (const size_t at = told.find('='); at != std::string::npos) (*all)[told.substr(0, at)] = {cudaError_t(atoi(told.c_str() + at + 1)), 0};
  return all;
}
std::map<std::string, Order>& orders() {
  static auto all = from_environment();
  return *all;
}

}  // namespace

cudaError_t failing(const char* call) {
  std::lock_guard<std::mutex> guard(mutex());
  auto at = orders().find(call);
  if (at == orders().end()) return cudaSuccess;
  if (!at->second.skip) return at->second.status;
  --at->second.skip;
  return cudaSuccess;
}

void fail_call(const char* call, cudaError_t status, uint32_t skip) {
  std::lock_guard<std::mutex> guard(mutex());
  if (status == cudaSuccess) orders().erase(call);
  else orders()[call] = {status, skip};
}

}  // namespace epe
