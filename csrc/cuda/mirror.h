// The expert weights of a rank in the memory of its GPU: a copy of the tensors in the daemon's arena, at addresses that never
// change. A slot is copied when a view names it and the arena's label says that something else lies there by now.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "device.h"

namespace epc {

// What an arena says of a slot (elasticep/arena.py).
struct Label {
  u64 sequence = 0;
  int expert = -1;
  u32 state = 0;
  std::array<u8, 16> checksum{};

  bool holds(int wanted) const;
};

class WeightsMirror {
 public:
  ~WeightsMirror();
  // Maps the arena for reading, and takes everything that copying will need. EP_ESHORT names bytes wanted and free.
  int open(const epc_weights& weights, u32 rank, u32 device);

  struct Order {
    u64 epoch;
    const int* experts;                     // [layers][slots] of the view, -1 = empty
    std::function<u64()> overtaken_by;      // a later view, for which this copying is called off; asked all the time
    std::function<u64(u32, u32)> named_by;  // (layer, slot): a view that the rank runs or may still switch to; 0: none
  };
  // Copies what the view names and the GPU does not hold yet. One call at a time; legal while another thread captures a graph.
  int fill(const Order& order);

  // Which expert lies whole in each slot of a layer, -1: none.
  void held(u32 layer, int* experts) const;
  void* base() const { return base_; }
  epc_copied copied() const;
  // How far the copies of the view that is being filled are: what has arrived on the GPU; all zero while there are none.
  struct Headway {
    u64 epoch = 0, done = 0, total = 0;  // bytes
  };
  Headway headway() const;

 private:
  struct Held {
    int expert = -1;
    std::array<u8, 16> checksum{};
  };
  struct Task {
    u32 layer, slot;
    int expert;
  };
  // A thread that copies has two buffers, each with its stream: one is filled while the other is sent.
  struct Lane {
    u8* buffer[2] = {};
    cudaStream_t stream[2] = {};
    u64 sent[2] = {};  // bytes under way
    u32 next = 0;
  };
  struct Run;

  int map(const epc_weights& weights);
  int allocate();
  int look(u32 layer, u32 slot, int expert, Label* out) const;
  int plan(const Order& order, std::vector<Task>* out) const;
  int work(Run& run, Lane& lane);
  int copy(const Order& order, const Task& task, Lane& lane);
  int send(const Order& order, u64 at, u64 bytes, Lane& lane);
  int arrived(Lane& lane, u32 i);
  void set(const Task& task, int expert, const std::array<u8, 16>& checksum);
  u64 index(u32 layer, u32 slot) const { return u64(layer) * weights_.slots + slot; }

  epc_weights weights_{};
  u32 rank_ = 0, device_ = 0;
  bool device_set_ = false;
  const u8* arena_ = nullptr;
  u8* base_ = nullptr;
  std::vector<Lane> lanes_;
  mutable std::mutex mutex_;  // of what follows
  std::vector<Held> held_;
  epc_copied copied_{};
  Headway headway_{};
};

}  // namespace epc
