#include "link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.h"
#include "quiet.h"
#include "sys.h"

namespace ep {

namespace {

constexpr size_t kMaxBody = 64 * 1024;
constexpr int kAgainMs = 2000;  // for an answer to a hello that is said again
constexpr unsigned kDialAgainUs = 10'000;
constexpr int kMaxFds = 253;  // the kernel's limit for one message
constexpr char kRaise[] = "; raise the limit of this process (ulimit -n, LimitNOFILE=)";

void limit_sends(int fd, unsigned timeout_ms) {
  const timeval limit{time_t(timeout_ms / 1000), suseconds_t(timeout_ms % 1000 * 1000)};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// Of a stopped daemon's full backlog a blocking connect hears only when its time is over: this one looks at `stop`, too.
int connect_until(int fd, const sockaddr_un& address, uint64_t deadline, const std::atomic<bool>* stop) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  int error = 0;
  while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address)) {
    error = errno;
    if (error != EAGAIN || now_ns() >= deadline || (stop && stop->load())) break;
    error = 0;
    usleep(kDialAgainUs);
  }
  fcntl(fd, F_SETFL, flags);
  return error;
}

// A daemon that is stopped takes no connections and reads nothing: neither may hold its caller longer than this.
int dial(const std::string& path, unsigned timeout_ms, const std::atomic<bool>* stop = nullptr) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return fail(EP_EINVAL, "socket path '%s' is longer than %zu bytes; use a shorter socket directory", path.c_str(), sizeof address.sun_path - 1);
  memcpy(address.sun_path, path.c_str(), path.size());
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return fail(-errno, "no socket for the daemon at '%s': %s%s", path.c_str(), strerror(errno), errno == EMFILE ? kRaise : "");
  if (int error = connect_until(fd, address, now_ns() + uint64_t(timeout_ms) * 1'000'000, stop)) {
    ::close(fd);
    return fail(EP_EGONE, "no daemon answers at '%s' (%s); start `elasticep daemon` on this node", path.c_str(), strerror(error));
  }
  limit_sends(fd, timeout_ms);
  return fd;
}

bool send_message(int fd, const ep_message& m, const std::vector<int>& fds, int flags = 0) {
  iovec part{const_cast<ep_message*>(&m), sizeof m};
  msghdr h{};
  h.msg_iov = &part;
  h.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)];
  if (!fds.empty()) {
    memset(control, 0, sizeof control);
    h.msg_control = control;
    h.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
  }
  return sendmsg(fd, &h, MSG_NOSIGNAL | flags) == ssize_t(sizeof m);
}

ep_message hello(uint32_t role, const std::string& text) {
  ep_message m{};
  m.magic = EP_MSG_MAGIC;
  m.type = EP_MSG_HELLO;
  m.a = role;
  m.b = uint64_t(getpid());
  strncpy(m.text, text.c_str(), EP_TEXT - 1);
  return m;
}

// False on end of file or a message that is none of ours.
bool receive(int fd, Received* out) {
  std::vector<unsigned char> body(kMaxBody);
  iovec parts[2] = {{&out->head, sizeof out->head}, {body.data(), body.size()}};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMaxFds));
  msghdr h{};
  h.msg_iov = parts;
  h.msg_iovlen = 2;
  h.msg_control = control.data();
  h.msg_controllen = control.size();
  ssize_t n;
  do n = recvmsg(fd, &h, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  for (cmsghdr* c = n >= 0 ? CMSG_FIRSTHDR(&h) : nullptr; c; c = CMSG_NXTHDR(&h, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    size_t before = out->fds.size();
    out->fds.resize(before + count);
    memcpy(out->fds.data() + before, CMSG_DATA(c), count * sizeof(int));
  }
  out->cut = n >= 0 && h.msg_flags & MSG_CTRUNC;
  if (n < ssize_t(sizeof out->head) || out->head.magic != EP_MSG_MAGIC) return false;
  out->head.text[EP_TEXT - 1] = 0;
  body.resize(size_t(n) - sizeof out->head);
  out->body = std::move(body);
  return true;
}

bool readable(int fd, int stop_event, int timeout_ms) {
  pollfd p[2] = {{fd, POLLIN, 0}, {stop_event, POLLIN, 0}};
  const uint64_t begin = now_ns();
  for (int left = timeout_ms;;) {
    const int ready = poll(p, stop_event >= 0 ? 2 : 1, left);
    if (ready >= 0 || errno != EINTR) return ready > 0 && p[0].revents;
    // A signal of the engine's process is no answer of the daemon.
    if (timeout_ms >= 0) left = timeout_ms - int(std::min<uint64_t>((now_ns() - begin) / 1'000'000, uint64_t(timeout_ms)));
  }
}

}  // namespace

int cut_short(const Received& message) {
  return fail(-EMFILE, "of the daemon's file descriptors %zu came, the rest did not: this process may open no more%s", message.fds.size(), kRaise);
}

Received::~Received() { clear(); }

void Received::clear() {
  for (int fd : fds)
    if (fd >= 0) ::close(fd);
  fds.clear();
  body.clear();
  cut = false;
  head = {};
}

int Received::take(size_t i) {
  if (i >= fds.size()) return -1;
  int fd = fds[i];
  fds[i] = -1;
  return fd;
}

Link::~Link() { close(); }

int Link::open(const std::string& path, uint32_t role, const std::string& ticket, unsigned timeout_ms, Received* welcome) {
  path_ = path;
  role_ = role;
  int fd = dial(path, std::max(timeout_ms, 1u));
  if (fd < 0) return fd;
  ep_message m = hello(role, ticket);
  if (!send_message(fd, m, {}) || !readable(fd, -1, int(timeout_ms)) || !receive(fd, welcome)) {
    ::close(fd);
    return fail(EP_EGONE, "the daemon at '%s' did not answer within %u ms", path.c_str(), timeout_ms);
  }
  if (welcome->cut) {
    ::close(fd);
    return cut_short(*welcome);
  }
  if (welcome->head.type != EP_MSG_WELCOME || welcome->fds.size() != 2 || welcome->body.size() != sizeof(ep_geometry)) {
    ::close(fd);
    if (welcome->head.type == EP_MSG_REFUSED)
      return fail(welcome->head.status < 0 ? welcome->head.status : int(EP_EINVAL), "%s", welcome->head.text);
    return fail(EP_EMISMATCH, "the daemon at '%s' answered with message type %u; install one version everywhere", path.c_str(), welcome->head.type);
  }
  group = welcome->head.text;
  rank = welcome->head.rank;
  incarnation = uint32_t(welcome->head.a);
  takes_.store(uint32_t(welcome->head.d >> 32));
  limit_sends(fd, kAgainMs);  // an attach may have longer than what comes after it
  fd_.store(fd);
  return 0;
}

void Link::start(Handler handler, std::vector<int> own_fds) {
  handler_ = std::move(handler);
  own_fds_ = std::move(own_fds);
  stop_event_ = eventfd(0, EFD_CLOEXEC);  // -1: none is left; then the loop looks at `stop_` now and then
  thread_ = quiet_thread([this] { loop(); });
}

void Link::send(const ep_message& message) {
  std::lock_guard<std::mutex> guard(send_mutex_);
  int fd = fd_.load();
  // A lost one is said again after the reconnect, by status; a daemon that reads nothing is connected to anew, too.
  if (fd >= 0 && !send_message(fd, message, {})) shutdown(fd, SHUT_RDWR);
}

void Link::send_if_room(const ep_message& message) {
  std::unique_lock<std::mutex> lock(send_mutex_, std::try_to_lock);
  const int fd = lock ? fd_.load() : -1;
  if (fd >= 0) send_message(fd, message, {}, MSG_DONTWAIT);  // what is wrong with it a reader finds out
}

uint64_t Link::away_ns() const {
  uint64_t since = away_since_.load();
  return since ? now_ns() - since : 0;
}

bool Link::reconnect() {
  int fd = dial(path_, kAgainMs, &stop_);
  if (fd < 0) return false;
  ep_message m = hello(role_, group);
  m.rank = rank;
  m.c = incarnation;
  Received answer;
  if (!send_message(fd, m, own_fds_) || !readable(fd, stop_event_, kAgainMs) || !receive(fd, &answer)) {
    ::close(fd);
    return false;
  }
  if (answer.head.type != EP_MSG_WELCOME) {
    ::close(fd);
    if (answer.head.type == EP_MSG_REFUSED && answer.head.status != -EAGAIN) {
      handler_(answer);
      quit_.store(true);
    }
    return false;
  }
  std::lock_guard<std::mutex> guard(send_mutex_);
  takes_.store(uint32_t(answer.head.d >> 32));
  fd_.store(fd);
  away_since_.store(0);
  return true;
}

// Keeps peers for the STAGE that follows, which then has them all; false while it has not come.
bool Link::gather(Received& m) {
  const bool more = m.head.type == EP_MSG_PEERS;
  if (!more && m.head.type != EP_MSG_STAGE) return true;
  if (peers_.head.a != m.head.a) peers_.clear();  // of one that was never sent
  Received& into = more ? peers_ : m;
  Received& from = more ? m : peers_;
  into.head.a = m.head.a;
  into.cut |= from.cut;
  into.fds.insert(into.fds.end(), from.fds.begin(), from.fds.end());
  into.body.insert(into.body.end(), from.body.begin(), from.body.end());
  from.fds.clear();  // they are the other's now
  if (!more) peers_.clear();
  return !more;
}

void Link::loop() {
  while (!stop_.load() && !quit_.load()) {
    int fd = fd_.load();
    if (fd < 0) {
      if (reconnect()) continue;
      pollfd p{stop_event_, POLLIN, 0};  // one that is -1 is passed over
      poll(&p, 1, 50);
      continue;
    }
    if (!readable(fd, stop_event_, stop_event_ < 0 ? 50 : -1)) continue;
    Received message;
    if (!receive(fd, &message)) {
      drop();
      peers_.clear();
      away_since_.store(now_ns());
      continue;
    }
    if (message.head.type == EP_MSG_QUIT) quit_.store(true);
    if (gather(message)) handler_(message);
  }
}

// Closes the descriptor when no thread uses it any more: before that its number may not name anything else.
void Link::drop() {
  std::lock_guard<std::mutex> sends(send_mutex_);
  std::lock_guard<std::mutex> closes(close_mutex_);
  const int fd = fd_.exchange(-1);
  if (fd >= 0) ::close(fd);
}

void Link::close() {
  stop_.store(true);
  if (stop_event_ >= 0) {
    uint64_t one = 1;
    if (write(stop_event_, &one, sizeof one) < 0) {  // already signalled
    }
  }
  {
    // Wakes whoever waits for a daemon to take a message, the link's own thread too.
    std::lock_guard<std::mutex> guard(close_mutex_);
    const int fd = fd_.load();
    if (fd >= 0) shutdown(fd, SHUT_RDWR);
  }
  if (thread_.joinable()) thread_.join();
  if (stop_event_ >= 0) ::close(stop_event_);
  stop_event_ = -1;
  drop();
  for (int own : own_fds_) ::close(own);
  own_fds_.clear();
}

}  // namespace ep
