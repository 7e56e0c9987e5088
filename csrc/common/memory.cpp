// Memory files and what a daemon does to headers.
#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "bank.h"
#include "barrier.h"
#include "cgroup.h"
#include "errors.h"
#include "sys.h"

namespace ep {

u64 available_bytes() {
  FILE* f = fopen("/proc/meminfo", "re");
  if (!f) return 0;
  char line[128];
  u64 kib = 0;
  while (fgets(line, sizeof line, f))
    if (sscanf(line, "MemAvailable: %llu kB", (unsigned long long*)&kib) == 1) break;
  fclose(f);
  return kib * 1024;
}

void wake_all(Header& h) {
  h.engine_wake.fetch_add(1);
  futex_wake(h.engine_wake);
  for (auto& wake : h.runner_wake) {
    wake.fetch_add(1);
    futex_wake(wake);
  }
}

Mapping::~Mapping() {
  if (base) munmap(base, bytes);
}

int Mapping::map(int fd, u64 expected, const char* what, bool more) {
  struct stat s;
  if (fstat(fd, &s)) return fail(-errno, "%s: %s", what, strerror(errno));
  if (more ? u64(s.st_size) < expected : u64(s.st_size) != expected)
    return fail(EP_EMISMATCH, "%s has %llu bytes, this version expects %llu; daemon and engine must be of one version and agree on the group's config",
                what, (unsigned long long)s.st_size, (unsigned long long)expected);
  void* p = mmap(nullptr, expected, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return fail(-errno, "mapping %s of %llu bytes: %s", what, (unsigned long long)expected, strerror(errno));
  base = static_cast<u8*>(p);
  bytes = expected;
  return 0;
}

int check_header(const Header& h, u64 digest) {
  if (h.magic != kHeaderMagic || h.abi != EP_ABI_VERSION)
    return fail(EP_EMISMATCH, "the header is of ABI %u, this library of %d; install one version everywhere", h.abi, EP_ABI_VERSION);
  if (h.digest != digest)
    return fail(EP_EMISMATCH, "layout digest %016llx of rank %u differs from ours, %016llx; engine and daemon disagree on geometry or exchanges",
                (unsigned long long)h.digest, h.rank, (unsigned long long)digest);
  return 0;
}

}  // namespace ep

using namespace ep;

int ep_memory_create(const char* name, uint64_t bytes) {
  if (bytes == 0) return fail(EP_EINVAL, "memory '%s' of 0 bytes", name);
  // Refused before the kernel would kill somebody for it.
  u64 free_bytes = available_bytes(), room = cgroup_room_bytes();
  const bool bounded = room < free_bytes;
  if (bounded) free_bytes = room;
  if ((free_bytes || bounded) && bytes > free_bytes)
    return fail(EP_ESHORT, "memory '%s' needs %llu bytes and %llu are available%s lower max_tokens, max_ranks or slots_per_rank", name,
                (unsigned long long)bytes, (unsigned long long)free_bytes, bounded ? " within the limit of its cgroup; raise that, or" : ";");
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return fail(-errno, "memfd '%s': %s", name, strerror(errno));
  if (ftruncate(fd, off_t(bytes)) || fallocate(fd, 0, 0, off_t(bytes))) {
    int error = errno;
    close(fd);
    return fail(error == ENOSPC || error == ENOMEM ? int(EP_ESHORT) : -error,
                "reserving %llu bytes for '%s': %s (%llu available); lower max_tokens, max_ranks or slots_per_rank",
                (unsigned long long)bytes, name, strerror(error), (unsigned long long)free_bytes);
  }
  fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  return fd;
}

void ep_memory_fence(void) { std::atomic_thread_fence(std::memory_order_acq_rel); }

int ep_header_format(int header_fd, const ep_geometry* geometry, uint32_t rank, const ep_timeouts* timeouts) {
  Layout layout;
  if (int bad = make_layout(*geometry, &layout)) return bad;
  if (rank >= geometry->max_ranks) return fail(EP_EINVAL, "rank %u is not below max_ranks %u", rank, geometry->max_ranks);
  Mapping m;
  if (int bad = m.map(header_fd, layout.header_bytes, "header")) return bad;
  auto h = reinterpret_cast<Header*>(m.base);
  memset(m.base, 0, m.bytes);
  h->abi = EP_ABI_VERSION;
  h->rank = rank;
  h->digest = layout.digest;
  h->timeouts = *timeouts;
  h->policy.store(geometry->serve_lost ? EP_POLICY_SERVE : 0);
  h->magic = kHeaderMagic;
  return 0;
}

struct ep_header_map {
  Mapping mapping;
  Header* header = nullptr;
};

ep_header_map* ep_header_open(int header_fd, uint64_t layout_digest) {
  auto m = new ep_header_map;
  if (m->mapping.map(header_fd, (sizeof(Header) + 4095) / 4096 * 4096, "header", true) == 0) {
    m->header = reinterpret_cast<Header*>(m->mapping.base);
    if (check_header(*m->header, layout_digest) == 0) return m;
  }
  delete m;
  return nullptr;
}

namespace ep {
Header* header_of(ep_header_map* map) { return map->header; }

void snapshot(const Header& h, ep_status* out) {
  *out = {};
  auto holder = [](const RobustLock& lock) {
    u32 word = lock.word.load();
    return word && !(word & FUTEX_OWNER_DIED) ? lock.pid.load() : 0u;
  };
  out->rank = h.rank;
  out->incarnation = h.incarnation.load();
  out->runner_pid = holder(h.runner);
  out->engine_pid = holder(h.engine);
  out->fenced = h.fenced.load();
  out->wait_phase = h.wait.phase.load();
  out->wait_exchange = h.wait.exchange.load();
  out->wait_rank = h.wait.rank.load();
  out->wait_since_ns = h.wait.since_ns.load();
  out->progress = h.progress.load();
  out->epoch = h.epoch.load();
  out->step = h.step.load();
  out->torn_steps = h.torn_steps.load();
  out->complete_steps = h.complete_steps.load();
  out->warmup = h.warmup.load();
  for (int i = 0; i < EP_BANKS; ++i) out->staged[i] = h.staged[i].load();
}
}  // namespace ep

void ep_header_close(ep_header_map* map) { delete map; }

int ep_header_status(ep_header_map* map, ep_status* out) {
  snapshot(*map->header, out);
  return 0;
}

int ep_header_grant(ep_header_map* map, uint32_t inc) {
  Header& h = *map->header;
  if (inc <= h.incarnation.load())
    return fail(EP_EINVAL, "rank %u already had incarnation %u; the next one must be higher than %u", h.rank, h.incarnation.load(), inc);
  for (RobustLock* lock : {&h.runner, &h.engine}) {
    u32 word = lock->word.load();
    if (word && !(word & FUTEX_OWNER_DIED))
      return fail(EP_EUSAGE, "rank %u is still held by process %u; end it before granting incarnation %u", h.rank, lock->pid.load(), inc);
  }
  for (RobustLock* lock : {&h.runner, &h.engine}) {
    lock->pid.store(0);
    lock->inc.store(0);
    lock->word.store(0);
    futex_wake(lock->word);
  }
  for (auto& s : h.staged) s.store(0);
  for (auto& c : h.command) {
    c.posted.store(c.done.load());
    c.cancelled.store(0);  // it may name a number that the next command has
  }
  h.epoch.store(0);
  h.wait.phase.store(0);
  h.wait.owner.store(0);
  h.warmup.store(0);
  h.incarnation.store(inc);
  wake_all(h);
  return 0;
}

int ep_header_mark_dead(ep_header_map* map, uint32_t rank, uint32_t inc) {
  if (rank >= EP_MAX_RANKS) return fail(EP_EINVAL, "rank %u is not below %d", rank, EP_MAX_RANKS);
  raise_to(map->header->dead[rank], inc);
  wake_all(*map->header);
  return 0;
}

int ep_header_failpoint(ep_header_map* map, uint32_t site, uint32_t action, uint32_t after) {
  if (site > EP_FAIL_STAGE || (site && (action < EP_FAIL_KILL || action > EP_FAIL_STOP)))
    return fail(EP_EINVAL, "failpoint site %u with action %u does not exist", site, action);
  Failpoint& f = map->header->failpoint;
  f.site.store(0);
  f.action.store(action);
  f.countdown.store(after ? after : 1);
  f.hits.store(0);
  f.site.store(site);
  return 0;
}

uint32_t ep_header_failpoint_hits(ep_header_map* map) { return map->header->failpoint.hits.load(); }

int ep_header_policy(ep_header_map* map, uint32_t policy) {
  if (policy > (EP_POLICY_SERVE | EP_POLICY_RENORMALISE)) return fail(EP_EINVAL, "policy %u is not known", policy);
  map->header->policy.store(policy);
  return 0;
}

int ep_header_fence(ep_header_map* map, uint32_t inc, uint64_t epoch, const char* text) {
  fence(*map->header, inc, epoch, text);
  return 0;
}

namespace ep {
void failpoint_hit(Failpoint& f) {
  if (f.countdown.fetch_sub(1) != 1) return;
  f.site.store(0);
  f.hits.fetch_add(1);
  raise(f.action.load() == EP_FAIL_KILL ? SIGKILL : SIGSTOP);
}

bool refused(const ep_message& answer, Header& h, u32 inc) {
  if (answer.type != EP_MSG_REFUSED) return false;
  if (answer.status == EP_EFENCED) fence(h, inc, 0, answer.text);
  return true;
}

void fence(Header& h, u32 inc, u64 epoch, const char* text) {
  if (h.fenced.load() < inc) {
    h.fenced_epoch.store(epoch);
    strncpy(h.fenced_text, text ? text : "", EP_TEXT - 1);
    raise_to(h.fenced, inc);
  }
  wake_all(h);
}
}  // namespace ep
