// What a runner holds: its region and its peers', the views staged for it, and the marks by which ranks leave one another
// (design: protocol, sections 1 and 3).
#include <cstring>
#include <thread>

#include "common/errors.h"
#include "common/sys.h"
#include "runner.h"

namespace ep {

int Region::open(const Layout& layout, int header_fd, int data_fd) {
  if (int bad = header_map.map(header_fd, layout.header_bytes, "a rank's header")) return bad;
  header = reinterpret_cast<Header*>(header_map.base);
  if (int bad = check_header(*header, layout.digest)) return bad;
  if (int bad = data_map.map(data_fd, layout.data_bytes, "a rank's data region")) return bad;
  data = data_map.base;
  return 0;
}

int Runner::open(const ep_geometry& geometry, u32 rank, u32 incarnation, int header_fd, int data_fd) {
  g_ = geometry;
  if (int bad = make_layout(g_, &layout_)) return bad;
  if (int bad = own_.open(layout_, header_fd, data_fd)) return bad;
  me_ = rank;
  inc_ = incarnation;
  floor_ = last_step_here();
  step_ = floor_ + 1;
  cells_.resize(g_.max_ranks);
  load_.resize(u64(g_.layers) * g_.experts);
  load_touched_.resize(g_.layers);
  for (u32 r = 0; r < g_.max_ranks; ++r) past_marks_[r] = leave_marks(own_.data)[r].word;
  prepare();
  // Spinning pays only where a waiting rank does not keep another from running.
  spins_ = std::thread::hardware_concurrency() > g_.max_ranks * 2 ? 4000 : 0;
  return 0;
}

// The highest step that anything in this region names. Barriers of doomed steps leave marks and no step in the header; a
// group that is formed anew on the same regions must be past them, or every step would be torn until it is.
u64 Runner::last_step_here() const {
  u32 by = 0;
  u64 last = own_.header->step.load();
  if (const u64 left = left_by(&by); left > last) last = left;
  for (u32 parity = 0; parity < 2; ++parity)
    for (u32 r = 0; r < g_.max_ranks; ++r)
      if (const u64 step = cell(own_.data, parity, r)->step; step > last) last = step;
  return last;
}

void Runner::next_barrier() {
  ++step_;
  pass_floor();
  cells_posted_ = false;
}

// A joiner's region may name steps beyond the group's: flags and marks of these would tear every step. So it is ahead of them
// at once, and the others, who wait for it, follow. By an even number: cells of the barrier before stay until all are past it.
void Runner::pass_floor() {
  if (step_ <= floor_) step_ += (floor_ - step_) / 2 * 2 + 2;
}

void Runner::wake() {
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) ring(own_.header->runner_wake[c], own_.header->runner_asleep[c]);
}

int Runner::stage(u64 epoch, const std::vector<u32>& ranks, std::vector<int> fds) {
  if (fds.size() != 1 + 2 * ranks.size()) return fail(EP_EINVAL, "stage of epoch %llu came with %zu descriptors for %zu peers", (unsigned long long)epoch, fds.size(), ranks.size());
  Mapping image;
  if (int bad = image.map(fds[0], layout_.bank_bytes, "a view's tables")) return bad;
  BankTables tables(layout_, image.base);
  if (tables.head->epoch != epoch) return fail(EP_EINVAL, "stage of epoch %llu came with the tables of epoch %llu", (unsigned long long)epoch, (unsigned long long)tables.head->epoch);
  failpoint(*own_.header, EP_FAIL_STAGE);
  const u64 running = own_.header->epoch.load();
  bool known;
  {
    std::lock_guard<std::mutex> guard(views_mutex_);
    known = views_[epoch % EP_BANKS].epoch == epoch;
  }
  const bool again = known && epoch == running;
  if (running && !again && (epoch <= running || epoch >= running + EP_BANKS))
    return fail(EP_EINVAL, "epoch %llu cannot be staged while this rank runs epoch %llu: only the next %d have a bank", (unsigned long long)epoch, (unsigned long long)running, EP_BANKS - 1);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] >= g_.max_ranks || ranks[i] == me_) return fail(EP_EINVAL, "stage names peer %u", ranks[i]);
    auto region = std::make_shared<Region>();
    if (int bad = region->open(layout_, fds[1 + 2 * i], fds[2 + 2 * i])) return bad;
    regions_[ranks[i]] = region;
  }
  StagedView v;
  v.epoch = epoch;
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    if (!tables.head->incarnation[r] || r == me_) continue;
    if (!regions_[r]) return fail(EP_EINVAL, "epoch %llu has rank %u, whose region never came", (unsigned long long)epoch, r);
    v.peer[r] = regions_[r];
  }
  u8* bank = own_.data + layout_.banks + epoch % EP_BANKS * layout_.bank_bytes;
  {
    std::lock_guard<std::mutex> guard(views_mutex_);
    const StagedView& held = views_[epoch % EP_BANKS];
    if (held.epoch == epoch) {
      // Said again, as after a restart of the daemon. It may be adopted at any moment, or has been, so its bank is not written twice.
      if (held.tables.head->digest == tables.head->digest) return 0;
      return fail(EP_EINVAL, "epoch %llu is staged with digest %016llx and came again with %016llx; an epoch has one view", (unsigned long long)epoch,
                  (unsigned long long)held.tables.head->digest, (unsigned long long)tables.head->digest);
    }
    memcpy(bank, image.base, layout_.bank_bytes);
    v.tables = BankTables(layout_, bank);
    views_[epoch % EP_BANKS] = std::move(v);
    own_.header->staged[epoch % EP_BANKS].store(epoch);
    staged_version_.fetch_add(1);
  }
  wake();
  return 0;
}

Cell* Runner::cell(u8* data, u64 step, u32 source) const {
  return reinterpret_cast<Cell*>(data + layout_.cells + ((step & 1) * g_.max_ranks + source) * layout_.cell_bytes);
}

void Runner::ring_peer(const StagedView& view, u32 rank, u32 channel) const {
  Header& h = *view.peer[rank]->header;
  ring(h.runner_wake[channel], h.runner_asleep[channel]);
}

void Runner::leave(const StagedView& view, u32 rank, u64 epoch, LeaveWhy why) {
  if (left_step_[rank] < step_) left_step_[rank] = step_;
  auto mark = reinterpret_cast<std::atomic<u64>*>(&leave_marks(view.peer[rank]->data)[me_].word);
  mark->store(make_leave(left_step_[rank], epoch, why));
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) ring_peer(view, rank, c);
}

// The highest step that anyone's leave mark names.
u64 Runner::left_by(u32* rank) const {
  if (!kFaultChecks) return 0;
  u64 highest = 0;
  const Flag* marks = leave_marks(own_.data);
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    u64 step = leave_step(reinterpret_cast<const std::atomic<u64>*>(&marks[r].word)->load(std::memory_order_acquire));
    if (step > highest) {
      highest = step;
      *rank = r;
    }
  }
  return highest;
}

// The epoch in which somebody went on without this rank, or 0. Marks of earlier epochs were for an earlier incarnation;
// they have only the low bits of theirs and stay for good, so each is remembered before it could look like a later one. So was
// one, written late, of an epoch whose view is staged here, with this incarnation in it.
u64 Runner::left_behind() {
  if (!kFaultChecks) return 0;
  const Flag* marks = leave_marks(own_.data);
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    u64 mark = reinterpret_cast<const std::atomic<u64>*>(&marks[r].word)->load(std::memory_order_acquire);
    if ((mark & 0xff) != kLeaveExpelled || mark == past_marks_[r]) continue;
    int16_t ahead = int16_t(u16(mark >> 8) - u16(view_->epoch));
    if (ahead > 0 && !staged_with_me(view_->epoch + u64(ahead))) return view_->epoch + u64(ahead);
    past_marks_[r] = mark;
  }
  return 0;
}

bool Runner::staged_with_me(u64 epoch) {
  std::lock_guard<std::mutex> guard(views_mutex_);
  for (const auto& v : views_)
    if (v.epoch == epoch) return v.tables.head->incarnation[me_] == inc_;
  return false;
}

}  // namespace ep
