// An exchange as the torch operators know it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "elasticep_ops.h"

namespace ept {

// What a region has of each source's dispatch (ep::Arrival): tokens, layer and global scale from byte 8 on.
constexpr uint64_t kSourceBytes = 64;

// Where a dispatch delivers to, on either plane.
struct Landing {
  void *rows = nullptr, *scales = nullptr, *ids = nullptr, *weights = nullptr, *counts = nullptr, *offsets = nullptr, *places = nullptr,
       *row_slots = nullptr, *out = nullptr, *sources = nullptr;  // sources: [ranks] of kSourceBytes
  uint64_t row_count = 0, id_rows = 0, scale_lead = 0, scale_columns = 0;
};

struct Input {
  uint32_t channel, layer, tokens, x_dtype, ids_bytes;
  const void *x, *scales, *ids;
  const float* weights;
  uint8_t* lost;
  float global_scale;
};

struct Channel {
  uint32_t tokens = 0;
  bool open = false;
  Landing landing;
};

// The calls of one plane. They return 0 or a negative code, whose sentence is in last_error(). EP_EINTR: a handler of a signal
// raised, and the call is given up.
class Plane {
 public:
  virtual ~Plane() = default;
  virtual int dispatch(const Input& input, Channel& channel) = 0;
  virtual int combine(uint32_t number, const Channel& channel, void* out, uint32_t out_dtype) = 0;
  virtual const char* last_error() const = 0;
  // Raises in Python what a handler of a signal raised; see Signals.
  virtual bool raise() { return false; }
};

struct Target {
  ept_exchange spec;
  std::unique_ptr<Plane> plane;
  std::vector<Channel> channels;
  std::vector<int32_t> noted;  // [channels * layers] tokens of dispatches since the last take, -1 = none
  bool used = false;
  int code = 0;
  std::string text;
};

// Throws std::runtime_error if nobody has this number.
std::shared_ptr<Target> find(int64_t key);

// Keeps code and sentence for the session, which knows the type of error for it, and throws std::runtime_error.
[[noreturn]] void refuse(Target& target, int code, const std::string& text);

}  // namespace ept
