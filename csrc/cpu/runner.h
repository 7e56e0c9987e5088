// Whoever runs a rank's kernels on the CPU: the worker under `service`, the engine's process under `inline`.
//
// One thread per channel calls dispatch and combine, channel 0 also the barrier; the link's thread stages views.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/bank.h"
#include "common/barrier.h"
#include "common/memory.h"
#include "common/robust.h"
#include "common/sys.h"
#include "convert.h"

namespace ep {

struct Region {
  Mapping header_map, data_map;
  Header* header = nullptr;
  u8* data = nullptr;

  int open(const Layout& layout, int header_fd, int data_fd);
};

// A staged view: its tables and the regions it writes to and reads from.
struct StagedView {
  u64 epoch = 0;
  BankTables tables;
  std::shared_ptr<Region> peer[EP_MAX_RANKS];  // [me] and non-members: null
};

// Where one (token, k) pair went.
struct Route {
  int32_t rank;  // -1: no expert
  int32_t slot;
};

// One exchange on its way through a channel. All of its memory is there before the first one.
struct Flight {
  enum Phase { kIdle, kSent, kReceived, kReady } phase = kIdle;
  u32 exchange = 0, layer = 0, tokens = 0;
  u64 tag = 0;
  u64 waits_since = 0;         // of a wait that a signal interrupted, 0: none was
  std::vector<int32_t> ids;    // [cap * topk] as checked: what the engine handed over is shared memory
  std::vector<Route> routes;   // [cap * topk]
  std::vector<float> weights;  // [cap * topk]
  std::vector<u64> owed;       // [cap][2] ranks that owe an output, as bits
  std::vector<u64> bitmaps;    // [R][bitmap words] rows that go to each reader
  std::vector<float> wide;     // [H] a row in fp32
  std::vector<u8> wire;        // a row as it travels, and its scales
};

// What a channel's receiving side keeps from one dispatch to the next.
struct Landing {
  std::vector<u32> filled;     // [R] rows of recv_ids that may name a slot
  std::vector<int32_t> tally;  // [1 + S] rows per slot; [0] takes what is for nobody here
  std::vector<u32> starts;     // [S + 1] first row of each slot
  std::vector<u32> next;       // [S] where a slot's next row goes
  std::vector<u64> written;    // contiguous: rows that may not be zero, as bits
  u64 labelled = 0;            // contiguous: rows of row_slots that may not be -1
  u64 arrived = 0;
};

// Where an engine's rows and their scales lie when nothing has to be copied for a dispatch: in the rank's own rows where
// they are in the wire's format, else where service launch hands them over. nullptr: nowhere (inline launch converts).
struct Staging {
  u8 *rows, *scales;
};
Staging staging(const ep_geometry& geometry, const Layout& layout, u32 exchange, u32 channel, u32 rank, u32 x_dtype, u8* data);

// A value in memory that another process can write too: what was checked is what is used.
template <class T>
inline T read_once(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_RELAXED);
}

// Whether readers take rows from where the sender has them: those that put them into an order of their own anyway. Others
// are sent copies.
inline bool pulls(const ChannelLayout& l) { return l.expanded_rows != 0; }

class Runner {
 public:
  int open(const ep_geometry& geometry, u32 rank, u32 incarnation, int header_fd, int data_fd);

  // Link thread. fds: bank, then header+data of each rank in `ranks`.
  int stage(u64 epoch, const std::vector<u32>& ranks, std::vector<int> fds);
  void wake();

  int barrier(u32 tokens, u64 timeout_ns, ep_step_info* out);
  // A barrier that answered EP_EINTR is not tried again: nobody waits at it any more.
  void leave_barrier();
  int end_step(u32* complete);
  void tear(const char* why);

  struct Dispatch {
    u32 exchange, channel, layer, tokens, sequence, x_dtype;
    const void* x;
    const int32_t* ids;
    const float* weights;
    u8* lost;
    const void* scales = nullptr;  // of rows that are quantised already
    float global_scale = 1.0f;
  };
  int dispatch_send(const Dispatch& d);
  int dispatch_recv(u32 exchange, u32 channel, u64* arrived, u32* source_tokens);
  int combine_send(u32 exchange, u32 channel);
  int combine_recv(u32 exchange, u32 channel, void* out, u32 out_dtype);
  Staging staging(u32 exchange, u32 channel, u32 x_dtype) const { return ep::staging(g_, layout_, exchange, channel, me_, x_dtype, own_.data); }

  const Layout& layout() const { return layout_; }
  const ep_geometry& geometry() const { return g_; }
  Header& header() { return *own_.header; }
  u8* data() { return own_.data; }
  u32 rank() const { return me_; }
  u32 incarnation() const { return inc_; }
  // Called when a view was adopted, on the barrier's thread.
  std::function<void(u64 epoch, u64 step)> on_adopted;
  // How a wait ends before its time: a worker's when the engine gives the command up; an engine's own returns EP_EINTR.
  bool serves = false;
  Atomic<bool> interrupts{false};

 private:
  struct Wait;
  Cell* cell(u8* data, u64 step, u32 source) const;
  u8* data_of(u32 rank) const { return rank == me_ ? own_.data : view_->peer[rank]->data; }
  Flag* leave_marks(u8* data) const { return reinterpret_cast<Flag*>(data + layout_.leave); }
  void leave(const StagedView& view, u32 rank, u64 epoch, LeaveWhy why);
  u64 left_by(u32* rank) const;
  u64 left_behind();
  bool staged_with_me(u64 epoch);
  bool is_dead(u32 rank, u32 inc) const { return kFaultChecks && own_.header->dead[rank].load(std::memory_order_acquire) >= inc; }
  void ring_peer(const StagedView& view, u32 rank, u32 channel) const;
  u64 last_step_here() const;
  void next_barrier();
  void pass_floor();

  int join(BarrierInput& in, BarrierDecision* decision);
  void post_cells(u32 tokens);
  void read_cells(u64 step);
  u64 higher_barrier();
  bool heard_all();
  void adopt(const BarrierDecision& d);
  void fill_info(ep_step_info* out) const;
  void agree(const BarrierDecision& d, ep_step_info* out);
  u64 least_done(u64 epoch);
  int expelled(const BarrierDecision& d);

  bool called_off(u32 channel) const {
    const Command& c = own_.header->command[channel];
    return serves && c.cancelled.load(std::memory_order_acquire) == c.posted.load(std::memory_order_relaxed);
  }
  // Whether it is time to let signals be seen to, in a wait that began or went on at `since`.
  bool signals_wait(bool signalled, u64 since, u64 now) const { return interrupts.load(std::memory_order_relaxed) && (signalled || now - since >= kSignalLook); }
  int wait_flags(const Wait& wait);
  bool came_to_a_later_barrier(u32 rank);
  void forget_wait(u32 channel);
  // Step by step, one file each: route.cpp, push.cpp, receive.cpp, combine.cpp.
  void prepare();
  int route(const Dispatch& d, Flight& f);
  void push_rows(const Dispatch& d, Flight& f);
  void keep_rows(const Dispatch& d, Flight& f);
  void announce(u32 to, const Dispatch& d, const Flight& f);
  int take_rows(Flight& f, u32 channel, u64* arrived, u32* source_tokens);
  int check_arrivals(const Flight& f, u32 channel, u32* source_tokens);
  void take_tails(const ep_exchange_config& x, const ChannelLayout& l, Landing& landing, const u32* source_tokens);
  int lay_out(const Flight& f, const ChannelLayout& l, Landing& landing, const u32* source_tokens);
  void take_replicated(const Flight& f, const ChannelLayout& l, Landing& landing);
  void finish_outputs(Flight& f, u32 channel);
  u32 addends_of(const Flight& f, const ChannelLayout& l, u32 token, Addend* out) const;
  int sum_outputs(const Flight& f, u32 channel, void* out, u32 out_dtype);
  int torn_status();

  ep_geometry g_{};
  Layout layout_{};
  Region own_;
  u32 me_ = 0, inc_ = 0;

  std::mutex views_mutex_;
  StagedView views_[EP_BANKS];
  std::shared_ptr<Region> regions_[EP_MAX_RANKS];  // latest region of each peer
  Atomic<u64> staged_version_{0};

  // Barrier thread only (the other channel reads view_ and step_ between begin and end).
  StagedView* view_ = nullptr;
  u64 step_ = 1;
  u64 floor_ = 0;  // the highest step that anything named in this region when this runner came
  u64 done_ = 0;  // agreed completion: works complete here
  Atomic<u32> exchanged_{0};  // the running step had an exchange, so it is a work
  bool in_step_ = false, cells_posted_ = false;
  u32 announced_ = 0;  // tokens that the posted cells name
  // The last wait at a barrier: whoever tries again there, after a time-out, waits on.
  struct { u64 step = 0, since_ns = 0; u32 rank = 0; } barrier_wait_;
  u64 word_by_ = 0;             // left behind: until when the daemon's word is waited for
  bool barrier_shown_ = false;  // its wait record stands, though a signal interrupted it
  struct Known {
    KnownView view;
    u32 incarnation[EP_MAX_RANKS];
  };
  std::vector<Known> snapshot_;  // running view first, as written in the cells
  std::vector<CellCopy> cells_;
  u64 left_step_[EP_MAX_RANKS] = {};
  u64 past_marks_[EP_MAX_RANKS] = {};  // leave marks that were for an earlier incarnation
  Atomic<u32> torn_{0};
  std::mutex tear_mutex_;
  std::string tear_reason_;

  Flight flights_[EP_MAX_CHANNELS];
  Landing landings_[EP_MAX_EXCHANGES][EP_MAX_CHANNELS];
  std::vector<u32> load_;          // [layers * experts] of the running step
  std::vector<u8> load_touched_;   // [layers]
  std::mutex load_mutex_;
  u32 spins_ = 0;

 public:
  std::string tear_reason();
};

}  // namespace ep
