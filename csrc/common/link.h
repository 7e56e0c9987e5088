// A runner's or engine's connection to its daemon: SEQPACKET messages with file descriptors, reconnected when the
// daemon was restarted. Nothing on the data path goes through it.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../elasticep.h"

namespace ep {

struct Received {
  ep_message head{};
  std::vector<unsigned char> body;
  std::vector<int> fds;  // owned; closed by the destructor unless taken
  bool cut = false;      // of its descriptors some are missing: this process may open no more

  Received() = default;
  Received(const Received&) = delete;
  ~Received();
  void clear();
  int take(size_t i);
};

// The failure for a message whose descriptors did not all come.
int cut_short(const Received& message);

class Link {
 public:
  using Handler = std::function<void(Received&)>;

  ~Link();
  // Connects and says hello; *welcome is the answer. EP_EGONE when nobody answers, or the daemon's refusal.
  int open(const std::string& path, uint32_t role, const std::string& ticket, unsigned timeout_ms, Received* welcome);
  // From now on a thread handles messages; after a lost connection it reconnects and offers these fds again. A REFUSED then is
  // the last message.
  void start(Handler handler, std::vector<int> own_fds);
  void send(const ep_message& message);
  // Never waits, and may lose the message: for news that will come again.
  void send_if_room(const ep_message& message);
  // Whether the daemon takes this kind of news (ep_takes); the next one, after a restart, may be of another version.
  bool takes(uint32_t what) const { return takes_.load() & what; }
  bool quit() const { return quit_.load(); }
  // Nanoseconds since the daemon went away, 0 while connected.
  uint64_t away_ns() const;
  void close();

  std::string group;
  uint32_t rank = 0, incarnation = 0;

 private:
  void loop();
  bool reconnect();
  void drop();
  bool gather(Received& message);

  std::string path_;
  uint32_t role_ = 0;
  Handler handler_;
  std::vector<int> own_fds_;
  Received peers_;  // of PEERS whose STAGE has not come yet
  std::mutex send_mutex_;
  std::mutex close_mutex_;  // taken after send_mutex_: the descriptor is closed, or shut down from elsewhere
  std::atomic<int> fd_{-1};
  std::atomic<uint32_t> takes_{0};
  std::atomic<bool> stop_{false}, quit_{false};
  std::atomic<uint64_t> away_since_{0};
  int stop_event_ = -1;
  std::thread thread_;
};

}  // namespace ep
