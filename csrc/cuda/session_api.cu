// The C ABI of a session (elasticep_cuda.h).
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "../common/memory.h"
#include "session.h"

using namespace epc;

namespace {
constexpr u64 kSpin = kMs / 5;  // a wait for the stream polls so long before it sleeps in between
}  // namespace

int epc_session_open(const char* socket_path, const char* ticket, uint32_t timeout_ms, uint32_t num_sms, const epc_weights* weights,
                     epc_session** out) {
  auto s = new epc_session;
  int bad;
  try {
    bad = s->open(socket_path, ticket, timeout_ms, num_sms, weights);
  } catch (const std::exception& error) {
    bad = ep::fail(EP_ESHORT, "this process cannot have another thread or its memory (%s); look at its limits (ulimit -u, -v) and its cgroup's", error.what());
  }
  if (bad) {
    const std::string text = ep_last_error();
    s->close();
    delete s;
    return ep::fail(bad, "%s", text.c_str());
  }
  *out = s;
  return 0;
}

void epc_session_close(epc_session* s) {
  if (!s || getpid() != s->pid) return;  // a forked child has neither the threads nor the seat
  s->close();
  delete s;
}

epc_context* epc_session_context(epc_session* s) { return s->context.get(); }

int epc_session_geometry(epc_session* s, ep_geometry* out, uint32_t* device) {
  *out = s->geometry;
  *device = s->context->config.device;
  return 0;
}

int epc_session_status(epc_session* s, ep_status* out) {
  ep::snapshot(s->header(), out);
  out->incarnation = s->link.incarnation;  // the header's may be a successor's
  return 0;
}

int epc_session_fenced(epc_session* s, uint64_t* epoch, char* text, uint64_t text_size) {
  if (!s->check_fenced()) return 0;
  *epoch = s->header().fenced_epoch.load();
  snprintf(text, text_size, "%s", s->header().fenced_text);
  return 1;
}

int epc_session_warmup(epc_session* s, uint32_t on) {
  s->header().warmup.store(on ? 1 : 0);
  return 0;
}

int epc_session_policy(epc_session* s, uint32_t* policy) {
  *policy = s->header().policy.load();
  return 0;
}

int epc_session_slots(epc_session* s, uint64_t epoch, int32_t* slot_expert) {
  std::lock_guard<std::mutex> guard(s->mutex);
  const auto& kept = s->tables[epoch % EP_BANKS];
  if (epoch == 0 || kept.epoch != epoch)
    return ep::fail(EP_EINVAL, "the tables of epoch %llu are gone; only the running and staged views are kept", wide(epoch));
  memcpy(slot_expert, kept.slots.data(), kept.slots.size() * sizeof(int32_t));
  return 0;
}

int epc_session_enter(epc_session* s, uint64_t after, uint32_t timeout_ms, uint32_t again) {
  if (int bad = s->check_usable()) return bad;
  ep::Header& h = s->header();
  std::unique_lock<std::mutex> lock(s->mutex);
  if (s->staged > after) return 0;
  if (!again && !h.epoch.load()) {  // the daemon tells of a joiner that has come here
    h.wait.rank.store(s->link.rank);
    h.wait.since_ns.store(ep::now_ns());
  }
  const u64 limit = timeout_ms ? timeout_ms * kMs : h.timeouts.step_timeout_ns, began = ep::now_ns();
  if (!again) s->enter_by = began + limit;
  const u64 deadline = s->enter_by;
  while (s->staged <= after) {
    if (int bad = s->check_fenced()) return bad;
    const u64 now = ep::now_ns();
    if (now > deadline)
      return ep::fail(EP_ETIMEOUT, "no view after %llu came for rank %u within %llu ms", wide(after), s->link.rank,
                      wide(limit / kMs));
    if (now - began >= ep::kSignalLook) return EP_EINTR;
    const u64 nap = deadline - now < 20 * kMs ? deadline - now + 1000 : 20 * kMs;  // nobody wakes us for a fence
    s->changed.wait_for(lock, std::chrono::nanoseconds(nap));
  }
  return 0;
}

int epc_session_step_begin(epc_session* s, uint32_t tokens, uint32_t timeout_ms, void* stream) {
  if (int bad = s->check_usable()) return bad;
  Domain d = s->context->domain;
  if (timeout_ms) d.step_timeout_ns = timeout_ms * kMs;
  EPC_TRY(launch_step_begin(d, tokens, ++s->ticket, static_cast<cudaStream_t>(stream)));
  return 0;
}

int epc_session_call_off(epc_session* s) {
  if (getpid() == s->pid) __atomic_store_n(&s->context->record->called_off, s->ticket, __ATOMIC_RELAXED);
  return 0;
}

int epc_session_recount(epc_session* s, void* stream, uint64_t* steps) {
  if (int bad = s->check_usable()) return bad;
  EPC_TRY(cudaDeviceSynchronize());
  const Record& record = *s->context->record;
  if (record.begun > record.ended) {
    if (int bad = epc_session_call_off(s)) return bad;
    if (int bad = epc_tear(s->context.get(), stream)) return bad;
    if (int bad = epc_step_end(s->context.get(), stream)) return bad;
    EPC_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  }
  *steps = record.begun;
  return 0;
}

int epc_session_await_counts(epc_session* s, uint32_t exchange, uint32_t channel) {
  const epc_context& c = *s->context;
  if (exchange >= EP_MAX_EXCHANGES || channel >= EP_MAX_CHANNELS) return 0;  // epc_wait_counts says what is wrong
  const u64 ticket = c.counted[exchange][channel], began = ep::now_ns();
  u64 asked = began;
  while (__atomic_load_n(&c.record->counts[exchange][channel].ticket, __ATOMIC_ACQUIRE) < ticket) {
    const u64 now = ep::now_ns();
    if (now - asked < kMs) continue;
    asked = now;
    if (cudaStreamQuery(c.count_stream) != cudaErrorNotReady) return 0;  // it is there, or never comes
    if (now - began >= ep::kSignalLook) return EP_EINTR;
  }
  return 0;
}

int epc_session_wait(epc_session* s, uint32_t what, uint64_t count, void* stream) {
  const Record& record = *s->context->record;
  // Released by the kernel: what it wrote before is there, too.
  auto seen = [&] { return __atomic_load_n(what == EPC_WAIT_ENDED ? &record.ended : &record.begun, __ATOMIC_ACQUIRE); };
  const u64 began = ep::now_ns();
  u64 asked = began;
  bool watched = false;
  while (seen() < count) {
    watched = true;
    const u64 now = ep::now_ns();
    if (now - began > kSpin) usleep(20);
    if (now - asked < kMs) continue;
    asked = now;
    const cudaError_t status = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    if (seen() >= count) continue;
    if (status == cudaErrorNotReady) {
      if (now - began >= ep::kSignalLook) return EP_EINTR;
      continue;
    }
    if (status == cudaSuccess)
      return ep::fail(EP_EUSAGE, "the stream is idle and step %llu of this session has not run on it; wait on the stream that the step was put on",
                      wide(count));
    const u64 ended = __atomic_load_n(&record.ended, __ATOMIC_RELAXED);
    return ep::fail(EP_EDEVICE, "device %u of rank %u failed in or before step %llu, of which %llu have ended: %s. It is for this process to end; the others go on",
                    s->context->config.device, s->link.rank, wide(count), wide(ended), cudaGetErrorString(status));
  }
  s->context->note_clock(watched);
  return 0;
}

int epc_session_slot_experts(epc_session* s, void** device_pointer) {
  *device_pointer = s->context->slot_experts;
  return 0;
}

int epc_session_weights(epc_session* s, void** device_pointer) {
  *device_pointer = s->weights ? s->weights->base() : nullptr;
  return s->weights ? 0 : ep::fail(EP_EUSAGE, "this session was opened without weights");
}

int epc_session_weights_held(epc_session* s, uint32_t layer, int32_t* experts) {
  if (!s->weights || layer >= s->geometry.layers) return ep::fail(EP_EUSAGE, "no weights of layer %u in this session", layer);
  s->weights->held(layer, experts);
  return 0;
}

int epc_session_weights_copied(epc_session* s, epc_copied* out) {
  *out = s->weights ? s->weights->copied() : epc_copied{};
  return 0;
}
