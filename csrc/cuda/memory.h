// Regions in device memory: VMM allocations behind POSIX fds, mapped at addresses that never change.
#pragma once
#include "driver.h"
#include "failure.h"
#include "gpu_layout.h"

namespace epc {

u64 granular(u64 bytes);
// The device that holds the memory behind this fd, as this process counts devices.
int region_device(int fd, u32* device);

// Device memory for `what`, like "the tables of rank 3"; EP_ESHORT names the bytes wanted and free. The device is the current one.
int allocate_on(u32 device, u64 bytes, const char* what, void** out);
// Host memory that the GPU can reach, likewise: new, or some that is there. `all`: bytes of which these are a part.
int allocate_pinned(u64 bytes, u64 all, const char* what, void** out);
int pin(void* memory, u64 bytes, const char* what);

// Address space for the regions of all ranks, and what is mapped into it.
class RegionMap {
 public:
  ~RegionMap();
  int reserve(u32 device, u32 ranks, u64 bytes);
  int map(u32 rank, int fd);
  int drop(u32 rank);
  bool mapped(u32 rank) const { return mapped_[rank]; }
  u8* base() const { return reinterpret_cast<u8*>(base_); }
  u64 stride() const { return stride_; }

 private:
  CUdeviceptr base_ = 0;
  u64 stride_ = 0, bytes_ = 0;
  u32 device_ = 0, ranks_ = 0;
  bool mapped_[kMaxRanks] = {};
};

}  // namespace epc
