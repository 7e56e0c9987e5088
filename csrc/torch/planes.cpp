#include "planes.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>

#include "signals.h"

namespace ept {

namespace {

// ep_received and epc_received have these fields in common.
template <class Received>
Landing landing_of(const Received& r) {
  Landing l;
  l.rows = r.rows;
  l.scales = r.scales;
  l.ids = r.ids;
  l.weights = r.weights;
  l.counts = r.slot_counts;
  l.offsets = r.slot_offsets;
  l.places = r.places;
  l.row_slots = r.row_slots;
  l.out = r.out;
  l.row_count = r.rows_count;
  l.id_rows = r.id_rows;
  l.scale_lead = r.scale_lead;
  l.scale_columns = r.scale_columns;
  return l;
}

struct Source {
  uint64_t tag;
  uint32_t tokens, layer;
  float global_scale;
  uint32_t pad[11];
};
static_assert(sizeof(Source) == kSourceBytes, "as GPUs have it in their regions");

class Cpu final : public Plane {
 public:
  explicit Cpu(const ept_exchange& spec)
      : session_(static_cast<ep_session*>(spec.rank)), number_(spec.number), calls_(*static_cast<const ept_cpu_calls*>(spec.calls)), signals_(calls_.python),
        sources_(spec.ranks) {}

  int dispatch(const Input& in, Channel& channel) override {
    const ep_rows rows{in.x, in.scales, in.x_dtype, in.global_scale};
    if (int bad = calls_.send(session_, number_, in.channel, in.layer, &rows, in.ids, in.ids_bytes, in.weights, in.tokens)) return bad;
    if (int bad = again([&] { return calls_.receive(session_, number_, in.channel, &received_, in.lost); })) return bad;
    channel.landing = landing_of(received_);
    for (size_t r = 0; r < sources_.size(); ++r) sources_[r] = {0, received_.tokens[r], in.layer, received_.global_scale[r], {}};
    channel.landing.sources = sources_.data();
    return 0;
  }

  int combine(uint32_t number, const Channel&, void* out, uint32_t out_dtype) override {
    return again([&] { return calls_.combine(session_, number_, number, out, out_dtype); });
  }

  const char* last_error() const override { return calls_.last_error(); }
  bool raise() override { return signals_.raise(); }

 private:
  // Until it is answered, or a handler of a signal has raised.
  template <class Call>
  int again(Call&& call) {
    int status;
    while ((status = call()) == EP_EINTR)
      if (signals_.raised()) break;
    return status;
  }

  ep_session* session_;
  uint32_t number_;
  ept_cpu_calls calls_;
  Signals signals_;
  ep_received received_{};
  std::vector<Source> sources_;
};

class Cuda final : public Plane {
 public:
  Cuda(const ept_exchange& spec, std::vector<Channel>& channels, int* code)
      : context_(static_cast<epc_context*>(spec.rank)),
        number_(spec.number),
        device_(spec.device),
        num_sms_(spec.num_sms),
        sms_(spec.sms),
        calls_(*static_cast<const ept_cuda_calls*>(spec.calls)) {
    for (uint32_t c = 0; c < spec.channels && !*code; ++c) {
      epc_received received{};
      *code = calls_.received_of(context_, number_, c, &received);
      channels[c].landing = landing_of(received);
      channels[c].landing.sources = const_cast<void*>(received.arrivals);
    }
  }

  int dispatch(const Input& in, Channel&) override {
    use_sms();
    epc_dispatch_args args{};
    args.exchange = number_;
    args.channel = in.channel;
    args.layer = in.layer;
    args.tokens = in.tokens;
    args.x_dtype = in.x_dtype;
    args.ids_bytes = in.ids_bytes;
    args.x = in.x;
    args.x_scales = in.scales;
    args.ids = in.ids;
    args.weights = in.weights;
    args.lost = in.lost;
    args.global_scale = in.global_scale;
    void* on = nullptr;
    if (int bad = stream(&on)) return bad;
    return calls_.dispatch(context_, &args, on);
  }

  int combine(uint32_t number, const Channel& channel, void* out, uint32_t out_dtype) override {
    use_sms();
    void* on = nullptr;
    if (int bad = stream(&on)) return bad;
    return calls_.combine(context_, number_, number, channel.tokens, out, out_dtype, on);
  }

  const char* last_error() const override { return trouble_.empty() ? calls_.last_error() : trouble_.c_str(); }

 private:
  void use_sms() {
    if (*sms_ == num_sms_) return;
    calls_.tune(context_, 0, num_sms_);
    *sms_ = num_sms_;
  }

  int stream(void** out) {
    int32_t current = device_;
    if (device_ >= 0 && aoti_torch_get_current_device_index(&current)) return trouble("the current device cannot be asked for");
    if (current != device_)
      return trouble("this rank's memory is on cuda:" + std::to_string(device_) + " and the current device is cuda:" + std::to_string(current) +
                     "; call torch.cuda.set_device(session.device)");
    if (calls_.stream(device_, out)) return trouble("the current stream of cuda:" + std::to_string(device_) + " cannot be asked for");
    trouble_.clear();
    return 0;
  }

  int trouble(const std::string& text) {
    trouble_ = text;
    return EP_EUSAGE;
  }

  epc_context* context_;
  uint32_t number_;
  int32_t device_;
  uint32_t num_sms_;
  uint32_t* sms_;
  ept_cuda_calls calls_;
  std::string trouble_;  // of this class's own checks
};

}  // namespace

std::unique_ptr<Plane> cpu_plane(const ept_exchange& spec) { return std::make_unique<Cpu>(spec); }

std::unique_ptr<Plane> cuda_plane(const ept_exchange& spec, std::vector<Channel>& channels, int* code) {
  return std::make_unique<Cuda>(spec, channels, code);
}

}  // namespace ept
