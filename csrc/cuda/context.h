// A rank's context on its GPU: what is mapped, what is allocated, and what every launch is given.
#pragma once
#include <mutex>
#include <vector>

#include "../common/robust.h"
#include "kernels.h"
#include "memory.h"

namespace epc {
// A staging thread may run while the engine captures a graph: its calls are on a stream of its own.
struct RelaxedCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};
}  // namespace epc

struct epc_context {
  epc_config config{};
  epc::GpuLayout layout{};
  epc::RegionMap regions;
  epc::Domain domain{};
  epc::Exchange exchange[EP_MAX_EXCHANGES][EP_MAX_CHANNELS]{};
  epc::ExpandArgs expand[EP_MAX_EXCHANGES][EP_MAX_CHANNELS]{};
  ep::Header* header = nullptr;  // mapped here
  epc::Record* record = nullptr;
  epc::u32* complete_flag = nullptr;
  cudaStream_t side = nullptr;   // staging
  std::mutex staging;
  struct { epc::u64 epoch, digest; } held[EP_BANKS] = {};  // what `stage` wrote
  epc::u32 sms = 0, grid_cap = 0;
  epc::u64 counted[EP_MAX_EXCHANGES][EP_MAX_CHANNELS] = {};  // tickets of dispatches with cpu_sync; 0: none
  epc::u64 tickets = 0;
  cudaStream_t count_stream = nullptr;  // of the last of them
  bool early = false;            // programmatic dependent launch
  int* slot_experts = nullptr;   // Domain::slot_experts
  ep::RobustHold hold;
  std::vector<void*> allocations;

  ~epc_context();
  int open(int data_fd, int header_fd, bool take_lock);
  int stage(const epc::u8* image);
  int copy_loads();               // to the header, for the daemon
  void note_clock(bool at_once);  // a barrier or step end was seen; at_once: as it happened

 private:
  template <class T>
  int allocate(T** out, epc::u64 count);
  int load_kernels() const;
  int open_memory(int data_fd, int header_fd);
  int size_grids();
  void describe_domain();
  int open_tables();
  int open_state();
  int open_exchanges();
  int read_region(epc::State* initial);
  int check_formats() const;
  int check_view(const ep::Bank& head) const;
};
