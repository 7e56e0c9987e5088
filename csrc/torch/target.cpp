#include "target.h"

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "planes.h"

namespace ept {

namespace {

// Leaked on purpose: an operator may still be called while the process ends.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Target>> targets;
  int64_t next = 1;
};

Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

std::shared_ptr<Target> look_up(int64_t key) {
  Registry& all = registry();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.targets.find(key);
  return found == all.targets.end() ? nullptr : found->second;
}

}  // namespace

std::shared_ptr<Target> find(int64_t key) {
  auto target = look_up(key);
  if (!target)
    throw std::runtime_error("exchange " + std::to_string(key) +
                             " of a compiled graph is not open in this process: its session is detached, or the exchange cannot be "
                             "compiled; attach and compile again");
  return target;
}

void refuse(Target& target, int code, const std::string& text) {
  // What a handler of a signal raised is not forgotten over the errors of an engine that goes on.
  if (target.code != EP_EINTR) target.code = code, target.text = text;
  throw std::runtime_error(text);
}

}  // namespace ept

uint32_t ept_abi_version(void) { return EPT_ABI_VERSION; }

uint64_t ept_struct_size(const char* name) {
  const struct {
    const char* name;
    uint64_t size;
  } sizes[] = {{"exchange", sizeof(ept_exchange)},
               {"taken", sizeof(ept_taken)},
               {"cpu_calls", sizeof(ept_cpu_calls)},
               {"cuda_calls", sizeof(ept_cuda_calls)},
               {"python", sizeof(ept_python)}};
  for (const auto& s : sizes)
    if (!strcmp(name, s.name)) return s.size;
  return 0;
}

int64_t ept_exchange_open(const ept_exchange* exchange) {
  auto target = std::make_shared<ept::Target>();
  target->spec = *exchange;
  target->spec.name[EPT_NAME - 1] = 0;
  target->channels.resize(exchange->channels);
  target->noted.assign(size_t(exchange->channels) * exchange->layers, -1);
  int code = 0;
  target->plane = exchange->plane == EPT_CUDA ? ept::cuda_plane(*exchange, target->channels, &code) : ept::cpu_plane(*exchange);
  if (code) return code;
  auto& all = ept::registry();
  std::lock_guard<std::mutex> guard(all.mutex);
  all.targets[all.next] = std::move(target);
  return all.next++;
}

void ept_exchange_close(int64_t key) {
  auto& all = ept::registry();
  std::lock_guard<std::mutex> guard(all.mutex);
  all.targets.erase(key);
}

int ept_exchange_take(int64_t key, ept_taken* out, int32_t* tokens) {
  const auto target = ept::look_up(key);
  if (!target || !target->used) return 0;
  memset(out, 0, sizeof *out);
  out->code = target->code;
  target->text.copy(out->text, EPT_TEXT - 1);
  for (size_t c = 0; c < target->channels.size(); ++c) {
    if (target->channels[c].open) out->open |= 1u << c;
    target->channels[c].open = false;
  }
  memcpy(tokens, target->noted.data(), target->noted.size() * sizeof(int32_t));
  target->noted.assign(target->noted.size(), -1);
  target->used = false;
  target->code = 0;
  target->text.clear();
  return 1;
}

int ept_exchange_raise(int64_t key) {
  const auto target = ept::look_up(key);
  return target && target->plane->raise();
}
