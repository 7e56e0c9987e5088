#include "context.h"

#include <sys/mman.h>
#include <time.h>

#include <cstring>

#include "../common/barrier.h"
#include "../common/sys.h"
#include "ptx.cuh"

using namespace epc;

namespace {

__global__ void clock_kernel(u64* out) { *out = wall_ns(); }

}  // namespace

template <class T>
int epc_context::allocate(T** out, u64 count) {
  void* p = nullptr;
  const u64 bytes = (count ? count : 1) * sizeof(T);
  if (int bad = allocate_on(config.device, bytes, Words("the tables of rank %u", config.rank), &p)) return bad;
  allocations.push_back(p);
  EPC_TRY(cudaMemset(p, 0, bytes));
  *out = static_cast<T*>(p);
  return 0;
}

epc_context::~epc_context() {
  cudaSetDevice(int(config.device));
  cudaDeviceSynchronize();
  hold.release();
  for (void* p : allocations) cudaFree(p);
  if (side) cudaStreamDestroy(side);
  if (record) cudaFreeHost(record);
  if (header) {
    cudaHostUnregister(header);
    munmap(header, layout.base.header_bytes);
  }
  cudaGetLastError();  // of a device that failed, or of a context half made; nobody else's launch
}

int epc_context::check_formats() const {
  const ep_geometry& g = config.geometry;
  for (u32 i = 0; i < g.exchanges; ++i) {
    const ep_exchange_config& x = g.exchange[i];
    const bool places = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED || (x.layout == EP_LAYOUT_ARRIVAL && x.cpu_sync);
    if (places && g.slots > kMostSlots)
      return ep::fail(EP_EINVAL, "exchange %u places rows by %u slots; on a GPU a rank has at most %u, lower slots_per_rank", i, g.slots, kMostSlots);
    if (ep::row_payload_bytes(x.dispatch_dtype, g.hidden) % 16)
      return ep::fail(EP_EINVAL, "exchange %u has rows of %llu bytes; on a GPU they must be a multiple of 16, change hidden %u", i,
                      wide(ep::row_payload_bytes(x.dispatch_dtype, g.hidden)), g.hidden);
    if ((ep::row_payload_bytes(x.combine_dtype, g.hidden) + ep::row_scale_bytes(x.combine_dtype, g.hidden)) % 16)
      return ep::fail(EP_EINVAL, "exchange %u has outputs that are no multiple of 16 bytes; change hidden %u", i, g.hidden);
  }
  return 0;
}

int epc_context::open_memory(int data_fd, int header_fd) {
  const ep_geometry& g = config.geometry;
  if (int bad = make_gpu_layout(g, &layout)) return bad;
  void* h = mmap(nullptr, layout.base.header_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, header_fd, 0);
  if (h == MAP_FAILED) return ep::fail(-errno, "mapping the header: %s", strerror(errno));
  header = static_cast<ep::Header*>(h);
  if (header->magic != ep::kHeaderMagic || header->digest != layout.base.digest)
    return ep::fail(EP_EMISMATCH, "the header's layout digest %016llx differs from ours, %016llx; daemon and engine disagree on the group",
                    wide(header->digest), wide(layout.base.digest));
  if (int bad = pin(h, layout.base.header_bytes, Words("the header of rank %u", config.rank))) return bad;
  EPC_TRY(cudaHostGetDevicePointer(reinterpret_cast<void**>(&domain.header), h, 0));
  if (int bad = allocate_pinned(sizeof(Record), sizeof(Record), Words("the records of rank %u", config.rank), reinterpret_cast<void**>(&record))) return bad;
  memset(record, 0, sizeof *record);
  EPC_TRY(cudaHostGetDevicePointer(reinterpret_cast<void**>(&domain.record), record, 0));
  if (int bad = regions.reserve(config.device, g.max_ranks, layout.data_bytes)) return bad;
  return regions.map(config.rank, data_fd);
}

int epc_context::open_exchanges() {
  const ep_geometry& g = config.geometry;
  for (u32 i = 0; i < g.exchanges; ++i)
    for (u32 c = 0; c < g.exchange[i].channels; ++c) {
      const ep_exchange_config& from = g.exchange[i];
      Exchange& x = exchange[i][c];
      x.at = layout.base.channel[i][c];
      x.gpu = layout.channel[i][c];
      x.index = i;
      x.channel = c;
      x.copies = from.copies;
      x.layout = from.layout;
      x.dispatch_dtype = from.dispatch_dtype;
      x.combine_dtype = from.combine_dtype;
      x.reduce = from.reduce;
      x.cap = from.max_tokens;
      x.replicated = from.replicated;
      x.scale_layout = from.scale_layout;
      x.rows_per_token = from.copies == EP_COPIES_PER_EXPERT ? g.topk : 1;
      x.masked_room = from.masked_room ? from.masked_room : g.max_ranks * from.max_tokens;
      if (int bad = allocate(&x.route, u64(from.max_tokens) * g.topk)) return bad;
      if (int bad = allocate(&x.route_weights, u64(from.max_tokens) * g.topk)) return bad;
      ExpandArgs& e = expand[i][c];
      const u64 entries = u64(g.max_ranks) * x.at.source_rows * g.topk;
      const bool exact = from.layout == EP_LAYOUT_ARRIVAL && x.at.expanded_rows;
      const u32 runs = runs_of(domain, x);
      if (x.at.expanded_rows) {
        if (int bad = allocate(&e.relative, entries)) return bad;
        if (int bad = allocate(&e.totals, runs)) return bad;
      }
      if (x.at.expanded_rows && runs <= kPlaceRuns)
        if (int bad = allocate(&e.counted, u64(kPlaceBlocks) * runs)) return bad;
      if (from.layout == EP_LAYOUT_CONTIGUOUS) {
        if (int bad = allocate(&e.dirty, x.at.expanded_rows)) return bad;
        EPC_TRY(cudaMemset(e.dirty, 1, x.at.expanded_rows));  // whatever an earlier runner left in the region
      }
      if (exact) {
        if (int bad = allocate(&e.compact_ids, entries)) return bad;
        if (int bad = allocate(&e.compact_weights, entries)) return bad;
      }
      e.domain = domain;
      e.exchange = x;
      e.row_bytes = u32(x.at.row_bytes);
      e.scale_bytes = u32(x.at.scale_bytes);
      e.early = early;
    }
  return 0;
}

// What an earlier incarnation, or another group on the same regions, left in this one: the highest number that anything names,
// for the next barrier is past it, and marks, which are not for this incarnation. Doomed barriers leave marks and cells and no
// step in the header.
int epc_context::read_region(State* initial) {
  const u32 ranks = domain.ranks;
  const u8* own = domain.region(domain.me);
  std::vector<ep::Flag> marks(ranks);
  std::vector<u8> cells(2 * ranks * domain.cell_bytes);
  EPC_TRY(cudaMemcpy(marks.data(), own + domain.leave, ranks * sizeof(ep::Flag), cudaMemcpyDeviceToHost));
  EPC_TRY(cudaMemcpy(cells.data(), own + domain.cells, cells.size(), cudaMemcpyDeviceToHost));
  u64 last = header->step.load();
  auto note = [&last](u64 step) { last = step > last ? step : last; };
  for (u32 r = 0; r < ranks; ++r) {
    initial->past_marks[r] = marks[r].word;
    note(ep::leave_step(marks[r].word));
    for (u32 parity = 0; parity < 2; ++parity) note(reinterpret_cast<const ep::Cell*>(cells.data() + (parity * ranks + r) * domain.cell_bytes)->step);
  }
  initial->floor = last;
  initial->barrier = last + 1;
  return 0;
}

// Now: a first launch that loads code could wait for a kernel that waits for its peer.
int epc_context::load_kernels() const {
  const cudaError_t status = first_of({load_dispatch(), load_combine(), load_barrier(), load_step_end(), load_expand(), load_overlap(), load_fused(),
                                       load_replicated(), load_count_slots()});
  if (status == cudaSuccess) return 0;
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, int(config.device));
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, int(config.device));
  return check(status, Words("loading kernels on device %u, of compute capability %d.%d", config.device, major, minor));
}

int epc_context::size_grids() {
  const ep_geometry& g = config.geometry;
  int sm_count = 0;
  EPC_TRY(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, int(config.device)));
  sms = u32(sm_count);
  // Kernels that may wait on this GPU at the same time: two channels are for two batches under way, and ranks need not
  // start them in one order.
  u32 channels = 1;
  for (u32 i = 0; i < g.exchanges; ++i)
    if (g.exchange[i].channels > channels) channels = g.exchange[i].channels;
  const u32 sharing = (config.ranks_on_device ? config.ranks_on_device : 1) * channels;
  grid_cap = sms / sharing ? sms / sharing : 1;
  early = sharing == 1;  // a successor that waits on an SM must not keep a peer's kernel off it
  return 0;
}

void epc_context::describe_domain() {
  const ep_geometry& g = config.geometry;
  Domain& d = domain;
  d.base = regions.base();
  d.stride = regions.stride();
  d.me = config.rank;
  d.ranks = g.max_ranks;
  d.topk = g.topk;
  d.experts = g.experts;
  d.slots = g.slots;
  d.hidden = g.hidden;
  d.layers = g.layers;
  d.count_loads = config.count_loads;
  d.agreed = g.agreed;
  d.leave = layout.base.leave;
  d.cells = layout.base.cells;
  d.cell_bytes = layout.base.cell_bytes;
  d.loads = layout.base.loads;
  d.exchange_timeout_ns = header->timeouts.exchange_timeout_ns;
  d.step_timeout_ns = header->timeouts.step_timeout_ns;
  d.suspect_ns = header->timeouts.suspect_after_ns;
}

int epc_context::open_tables() {
  const ep_geometry& g = config.geometry;
  Domain& d = domain;
  Staged* staged = nullptr;
  Copies* maps = nullptr;
  u32* lists = nullptr;
  ep::Replica* replicas = nullptr;
  int* slot_banks = nullptr;
  if (int bad = allocate(&d.state, 1)) return bad;
  if (int bad = allocate(&staged, EP_BANKS)) return bad;
  if (int bad = allocate(&maps, u64(EP_BANKS) * g.layers * g.experts)) return bad;
  if (int bad = allocate(&lists, u64(EP_BANKS) * g.layers * g.experts)) return bad;
  if (int bad = allocate(&d.active, u64(g.layers) * g.experts)) return bad;
  if (int bad = allocate(&replicas, u64(EP_BANKS) * g.layers * g.max_ranks * g.slots)) return bad;
  if (int bad = allocate(&d.pending, u64(g.layers) * g.experts)) return bad;
  if (int bad = allocate(&slot_banks, u64(EP_BANKS) * g.layers * g.slots)) return bad;
  if (int bad = allocate(&slot_experts, u64(g.layers) * g.slots)) return bad;
  EPC_TRY(cudaMemset(slot_experts, 0xff, u64(g.layers) * g.slots * sizeof(int)));  // all empty
  if (int bad = allocate(&d.scratch, barrier_scratch_bytes(g.max_ranks))) return bad;
  if (int bad = allocate(&complete_flag, 1)) return bad;
  d.staged = staged;
  d.maps = maps;
  d.lists = lists;
  d.replicas = replicas;
  d.slot_banks = slot_banks;
  d.slot_experts = slot_experts;
  return 0;
}

int epc_context::open_state() {
  EPC_TRY(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  EPC_TRY(launch_block(clock_kernel, 1, side, &domain.record->at));
  EPC_TRY(cudaStreamSynchronize(side));
  record->offset = ep::now_ns() - record->at;
  State initial{};
  initial.torn = 1;
  initial.incarnation = config.incarnation;
  if (int bad = read_region(&initial)) return bad;
  EPC_TRY(cudaMemcpy(domain.state, &initial, sizeof initial, cudaMemcpyHostToDevice));
  return 0;
}

int epc_context::open(int data_fd, int header_fd, bool take_lock) {
  const ep_geometry& g = config.geometry;
  if (int bad = ep::check_geometry(g)) return bad;
  if (config.rank >= g.max_ranks) return ep::fail(EP_EINVAL, "rank %u is not below max_ranks %u", config.rank, g.max_ranks);
  if (config.incarnation == 0) return ep::fail(EP_EINVAL, "incarnation is 0; a seat's first incarnation is 1");
  if (int bad = check_formats()) return bad;
  if (int bad = need_driver()) return bad;
  if (int bad = use_device(config.device)) return bad;
  if (int bad = load_kernels()) return bad;
  if (int bad = open_memory(data_fd, header_fd)) return bad;
  if (int bad = size_grids()) return bad;
  describe_domain();
  if (int bad = open_tables()) return bad;
  if (int bad = open_state()) return bad;
  if (int bad = open_exchanges()) return bad;
  EPC_TRY(cudaDeviceSynchronize());
  return take_lock ? hold.take(header->runner, config.incarnation) : 0;
}

// The clocks of GPU and host drift apart, and the daemon is told in the host's when a wait began: it must not seem longer than
// it is. A difference that is read late is too large, never too small.
void epc_context::note_clock(bool at_once) {
  const u64 at = __atomic_load_n(&record->at, __ATOMIC_RELAXED);
  const long long kept = static_cast<long long>(record->offset), read = static_cast<long long>(ep::now_ns() - at);
  const long long next = read < kept ? read : at_once ? kept + (read - kept) / 16 : kept;
  if (next != kept) __atomic_store_n(&record->offset, u64(next), __ATOMIC_RELAXED);
}

int epc_context::copy_loads() {
  std::lock_guard<std::mutex> guard(staging);
  RelaxedCapture relaxed;
  if (int bad = use_device(config.device)) return bad;
  EPC_TRY(cudaMemcpyAsync(reinterpret_cast<u8*>(header) + layout.base.header_loads, domain.region(domain.me) + domain.loads,
                          u64(domain.layers) * domain.experts * 8, cudaMemcpyDeviceToHost, side));
  EPC_TRY(cudaStreamSynchronize(side));
  return 0;
}
