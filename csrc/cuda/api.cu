// The C ABI of a context but for its exchanges (exchange.cu).
#include <cstring>
#include <string>

#include "../common/errors.h"
#include "context.h"

using namespace epc;

uint32_t epc_abi_version(void) { return EPC_ABI_VERSION; }
const char* epc_last_error(void) { return ep_last_error(); }

uint64_t epc_struct_size(const char* name) {
  if (!strcmp(name, "config")) return sizeof(epc_config);
  if (!strcmp(name, "step_info")) return sizeof(epc_step_info);
  if (!strcmp(name, "received")) return sizeof(epc_received);
  if (!strcmp(name, "dispatch_args")) return sizeof(epc_dispatch_args);
  if (!strcmp(name, "fault")) return sizeof(epc_fault);
  if (!strcmp(name, "counts")) return sizeof(epc_counts);
  if (!strcmp(name, "weights")) return sizeof(epc_weights);
  if (!strcmp(name, "copied")) return sizeof(epc_copied);
  return 0;
}

int epc_device_count(uint32_t* count) {
  int n = 0;
  const cudaError_t status = cudaGetDeviceCount(&n);
  *count = status == cudaSuccess ? u32(n) : 0;
  return check(status == cudaSuccess && n == 0 ? cudaErrorNoDevice : status, "counting GPUs");
}

int epc_context_create(const epc_config* config, int data_fd, int header_fd, uint32_t hold, epc_context** out) {
  auto c = new epc_context;
  c->config = *config;
  if (int bad = c->open(data_fd, header_fd, hold != 0)) {
    const std::string text = ep_last_error();
    delete c;
    return ep::fail(bad, "%s", text.c_str());
  }
  *out = c;
  return 0;
}

void epc_context_destroy(epc_context* context) { delete context; }

int epc_peer_map(epc_context* c, uint32_t rank, int data_fd) {
  if (int bad = use_device(c->config.device)) return bad;
  return c->regions.map(rank, data_fd);
}
int epc_peer_drop(epc_context* c, uint32_t rank) {
  if (int bad = use_device(c->config.device)) return bad;
  EPC_TRY(cudaDeviceSynchronize());
  return c->regions.drop(rank);
}

int epc_stage(epc_context* c, const ep_view* view) {
  std::vector<u64> image((c->layout.base.bank_bytes + 7) / 8);
  auto bytes = reinterpret_cast<u8*>(image.data());
  if (view->epoch == 0) return ep::fail(EP_EINVAL, "epoch is 0; views start at 1");
  if (int bad = ep::write_bank(c->config.geometry, c->layout.base, *view, bytes)) return bad;
  return c->stage(bytes);
}
int epc_stage_bank(epc_context* c, const void* image, uint64_t bytes) {
  if (bytes < c->layout.base.bank_bytes)
    return ep::fail(EP_EMISMATCH, "a bank of %llu bytes; this group's have %llu", wide(bytes),
                    wide(c->layout.base.bank_bytes));
  return c->stage(static_cast<const u8*>(image));
}

int epc_step_begin(epc_context* c, uint32_t tokens, void* stream) {
  EPC_TRY(launch_step_begin(c->domain, tokens, 0, static_cast<cudaStream_t>(stream)));
  return 0;
}
int epc_step_end(epc_context* c, void* stream) {
  EPC_TRY(launch_step_end(c->domain, c->complete_flag, static_cast<cudaStream_t>(stream)));
  return 0;
}
int epc_tear(epc_context* c, void* stream) {
  EPC_TRY(launch_tear(c->domain, static_cast<cudaStream_t>(stream)));
  return 0;
}

int epc_tune(epc_context* c, uint32_t pinned_plan, uint32_t num_sms) {
  c->config.pinned_plan = pinned_plan;
  c->config.num_sms = num_sms;
  return 0;
}

int epc_step_result(epc_context* c, epc_step_info* info, epc_fault* fault) {
  memcpy(info, &c->record->info, sizeof *info);
  if (fault) memcpy(fault, &c->record->fault, sizeof *fault);
  return 0;
}
int epc_complete_flag(epc_context* c, void** device_pointer) {
  *device_pointer = c->complete_flag;
  return 0;
}
int epc_loads(epc_context* c, uint64_t* loads) {
  EPC_TRY(cudaDeviceSynchronize());
  const u64 bytes = u64(c->domain.layers) * c->domain.experts * 8;
  EPC_TRY(cudaMemcpy(loads, c->domain.region(c->domain.me) + c->domain.loads, bytes, cudaMemcpyDeviceToHost));
  return 0;
}
