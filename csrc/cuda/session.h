// What an engine holds under inline launch: its seat at the daemon and the context that runs its kernels.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../common/link.h"
#include "../common/sys.h"
#include "context.h"
#include "mirror.h"

namespace epc {
constexpr u64 kMs = 1'000'000;
}  // namespace epc

// Its functions are in session.cu, what the C ABI makes of it in session_api.cu.
struct epc_session {
  using u32 = ep::u32;
  using u64 = ep::u64;

  ep::Link link;
  ep::RobustHold engine_hold;
  std::unique_ptr<epc_context> context;
  std::unique_ptr<epc::WeightsMirror> weights;  // of a group whose daemons keep them
  ep_geometry geometry{};
  pid_t pid = getpid();

  // Of each rank: the memfd that names its memory, and the highest staged view that uses it.
  struct Peer {
    dev_t device = 0;
    ino_t inode = 0;
    bool mapped = false;
    u64 used_by = 0;
  } peer[epc::kMaxRanks];
  struct Tables {
    u64 epoch = 0;
    std::vector<int32_t> slots;
  } tables[EP_BANKS];
  std::mutex mutex;
  std::condition_variable changed;
  std::thread reporter, stager;
  std::deque<std::unique_ptr<ep::Received>> handed;  // views that wait for the stager
  std::condition_variable handed_changed;
  std::atomic<u64> newest{0};     // the highest epoch that was handed over
  u64 staged = 0, staged_at = 0;  // highest epoch, and when
  u64 enter_by = 0;               // deadline of the last epc_session_enter
  u64 ticket = 0;                 // of the last barrier that was put on a stream
  std::atomic<bool> stop{false};

  ep::Header& header() { return *context->header; }

  int check_fenced() {
    ep::Header& h = header();
    if (!ep::is_fenced(h) && h.incarnation.load() == link.incarnation) return 0;
    return ep::fail(EP_EFENCED, "rank %u incarnation %u was expelled: %s", link.rank, link.incarnation, h.fenced_text);
  }
  int check_usable() {
    if (getpid() != pid)
      return ep::fail(EP_EUSAGE, "this session belongs to process %d; attach again in the forked process %d", pid, getpid());
    return check_fenced();
  }

  int open(const char* socket_path, const char* ticket, u32 timeout_ms, u32 num_sms, const epc_weights* from);
  int stage(u64 epoch, const std::vector<u32>& ranks, const std::vector<int>& fds);
  int take_region(u32 rank, int header_fd, int data_fd);
  int take_weights(const ep::BankTables& view);
  u64 view_naming(u32 layer, u32 slot, u64 but);
  void on_message(ep::Received& message);
  void stage_in_turn();
  void answer(const ep::Received& message);
  void report();
  void tell_headway(epc::WeightsMirror::Headway* told);
  void tell(u32 type, u64 a, u64 b, int status, const char* text);
  void close();
};
