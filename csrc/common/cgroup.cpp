// Limits of cgroups, version 1 and 2. memfd pages are charged to them, and who goes beyond one is killed.
#include "cgroup.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>

namespace ep {

namespace {
constexpr u64 kNone = ~0ull;

struct Names {
  const char *limit, *used, *cache[2];
};
constexpr Names kV2{"/memory.max", "/memory.current", {"inactive_file", "active_file"}};
constexpr Names kV1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

u64 number(const std::string& path) {  // kNone: no such file, or "max"
  u64 value = kNone;
  if (FILE* f = fopen(path.c_str(), "re")) {
    if (fscanf(f, "%llu", (unsigned long long*)&value) != 1) value = kNone;
    fclose(f);
  }
  return value;
}

// Files' pages that are charged to the cgroup and that the kernel lets go of when it needs room, such as a checkpoint's.
u64 cache_bytes(const std::string& folder, const Names& names) {
  FILE* f = fopen((folder + "/memory.stat").c_str(), "re");
  if (!f) return 0;
  char line[128], name[64];
  u64 sum = 0, bytes = 0;
  while (fgets(line, sizeof line, f)) {
    if (sscanf(line, "%63s %llu", name, (unsigned long long*)&bytes) != 2) continue;
    for (const char* wanted : names.cache)
      if (!strcmp(name, wanted)) sum += bytes;
  }
  fclose(f);
  return sum;
}

u64 room_of(const std::string& folder, const Names& names) {
  u64 limit = number(folder + names.limit), used = number(folder + names.used);
  if (limit == kNone || used == kNone) return kNone;
  used -= std::min(used, cache_bytes(folder, names));
  return limit > used ? limit - used : 0;
}

// From the process's own cgroup up. In a container the path may be one of the host's, of which only the root is seen here.
u64 tightest(const std::string& root, std::string path, const Names& names) {
  u64 room = kNone;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    room = std::min(room, room_of(root + path, names));
    if (path.empty()) return room;
    path.resize(std::min(path.size(), path.rfind('/')));
  }
}
}  // namespace

u64 cgroup_room_bytes() {
  FILE* f = fopen("/proc/self/cgroup", "re");
  if (!f) return kNone;
  u64 room = kNone;
  char line[4352];  // "4:memory:/path", "0::/path"
  while (fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char* controllers = strchr(line, ':');
    char* path = controllers ? strchr(controllers + 1, ':') : nullptr;
    if (!path) continue;
    *path++ = 0;
    ++controllers;
    if (!strcmp(controllers, "memory"))
      room = std::min(room, tightest("/sys/fs/cgroup/memory", path, kV1));
    else if (!*controllers)
      for (const char* root : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) room = std::min(room, tightest(root, path, kV2));
  }
  fclose(f);
  return room;
}

}  // namespace ep
