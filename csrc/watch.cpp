#include "watch.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "text.h"

namespace zerocompile {

namespace {

constexpr auto kDied = "its process has died", kClosed = "it has ended its part of this run";
constexpr auto kNonsense = "it has sent what no rank sends";
// A record ends with a zero. Its first letter says what it is.
constexpr char kText = 't', kLeft = 'l', kGone = 'g', kNewsLeft = 'L', kNewsGone = 'G', kEnds = 'c';
constexpr size_t kLongest = 1 << 20;        // bytes of a record
constexpr size_t kLongestReason = 4000;     // bytes of a reason; what an exception says first is what matters
constexpr size_t kUnsent = 64 << 20;        // bytes that may wait for a rank that does not read
constexpr size_t kInbox = 4096;             // texts that may wait for Python
using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr milliseconds kTogether(50);  // news of so long are told together: at a run's end all ranks say that they end
constexpr milliseconds kRound(500);    // how often the thread looks when nobody says anything
constexpr seconds kTokenWithin(3), kHangUpWithin(2);
constexpr seconds kMayStillEnd(4);     // so long after a rank is gone, what it has started may still come to its end
constexpr seconds kDeviceStands(3), kPythonStands(5);  // after that they count as standing

std::optional<int64_t> number(std::string_view digits) {
  int64_t found = -1;
  const auto end = digits.data() + digits.size();
  const auto [at, error] = std::from_chars(digits.data(), end, found);
  return error == std::errc() && at == end && found >= 0 ? std::optional(found) : std::nullopt;
}

void keep_alive(int file) {
  const auto set = [file](int level, int name, int value) { ::setsockopt(file, level, name, &value, sizeof value); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

void close_file(std::atomic<int>& file) {
  if (const int open = file.exchange(-1); open >= 0) ::close(open);
}

// For event files.
void notify(int file) {
  const uint64_t one = 1;
  (void)!::write(file, &one, sizeof one);
}

void clear(int file) {
  uint64_t count;
  (void)!::read(file, &count, sizeof count);
}

// What is handed on is UTF-8 also where it was cut.
std::string cut(std::string text, size_t bytes) {
  std::replace(text.begin(), text.end(), '\0', ' ');
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes) + " ...";
}

}  // namespace

Watch::Watch(int64_t world, int64_t rank, double timeout)
    : world_(world),
      rank_(rank),
      timeout_(timeout),
      slots_(2 * std::max<int64_t>(world, 1)),
      connections_(std::make_unique<Connection[]>(slots_)),
      wakes_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      comes_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  TORCH_CHECK(0 <= rank && rank < world, text("zerocompile: rank ", rank, " of ", world, " ranks"));
}

Watch::~Watch() {
  close();
  for (auto* file : {&listener_, &wakes_, &comes_}) close_file(*file);
}

void Watch::start(int file, std::string asks, std::string answers, double listens) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!thread_.joinable(), "zerocompile: the watch has started already");
  asks_ = std::move(asks);
  answers_ = std::move(answers);
  if (file >= 0 && rank_ == 0) {
    ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) | O_NONBLOCK);
    listener_ = file;
    listens_until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration<double>(listens));
  } else if (file >= 0) {
    keep_alive(file);
    connections_[0].rank = 0;
    connections_[0].file = file;
    if (const auto own = left_.find(rank_); own != left_.end()) put(connections_[0], kLeft + own->second);
  }
  sigset_t all, before;  // signals are for Python's main thread
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(&Watch::run, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Watch::close() {
  if (forked_) return;
  std::thread ends;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    ends.swap(thread_);
  }
  notify(comes_);
  notify(wakes_);
  if (ends.joinable()) ends.join();
  close_file(wakes_);
}

void Watch::close_copies() {
  forked_ = true;
  for (size_t i = 0; i < slots_; ++i) close_file(connections_[i].file);
  for (auto* file : {&listener_, &wakes_, &comes_}) close_file(*file);
  if (thread_.joinable()) thread_.detach();  // it is the parent's
}

void Watch::send(int64_t rank, std::string text) {
  if (forked_) return;
  std::lock_guard lock(mutex_);
  if (rank == rank_) {
    inbox_.emplace_back(rank, std::move(text));
    notify(comes_);
    return;
  }
  for (size_t i = 0; i < slots_; ++i) {
    if (connections_[i].file >= 0 && connections_[i].rank == rank) put(connections_[i], kText + cut(text, kLongest / 2));
  }
  notify(wakes_);
}

std::optional<std::vector<std::pair<int64_t, std::string>>> Watch::take() {
  std::lock_guard lock(mutex_);
  clear(comes_);
  listening_ = true;
  python_came_ = Clock::now();
  if (closing_) {
    close_file(comes_);  // the reader does it, which may be waiting for this file until here
    return std::nullopt;
  }
  std::vector<std::pair<int64_t, std::string>> taken(inbox_.begin(), inbox_.end());
  inbox_.clear();
  return taken;
}

void Watch::refuse(int64_t rank) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < slots_; ++i) {
    if (connections_[i].file >= 0 && connections_[i].rank == rank) drop(connections_[i], kNonsense);
  }
  notify(wakes_);
}

void Watch::leave(std::string reason) {
  if (forked_) return;
  std::lock_guard lock(mutex_);
  reason = cut(std::move(reason), kLongestReason);
  note(rank_, /*is_gone=*/false, reason);
  for (size_t i = 0; i < slots_; ++i) {
    if (rank_ != 0 && connections_[i].file >= 0) put(connections_[i], kLeft + reason);
  }
  notify(wakes_);
}

std::optional<std::string> Watch::gone(int64_t rank) const {
  std::lock_guard lock(mutex_);
  const auto found = gone_.find(rank);
  return found == gone_.end() ? std::nullopt : std::optional(found->second);
}

std::map<int64_t, std::string> Watch::left() const {
  std::lock_guard lock(mutex_);
  return left_locked();
}

std::map<int64_t, std::string> Watch::left_locked() const {
  auto found = left_;
  for (const auto& [rank, reason] : gone_) {
    if (reason != kClosed) found.emplace(rank, reason);
  }
  return found;
}

// ---- the thread ----

void Watch::run() {
  pthread_setname_np(pthread_self(), "zc-watch");
  while (round()) {
  }
}

bool Watch::round() {
  bool news;
  {
    std::lock_guard lock(mutex_);
    news = !news_.empty();
  }
  wait_for_files(news);
  std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  accept();
  for (size_t i = 0; i < slots_; ++i) {
    auto& one = connections_[i];
    if (one.file >= 0) read(one);
    if (one.file >= 0 && one.rank < 0 && now - one.since > kTokenWithin) close_file(one.file);
  }
  if (listener_ >= 0 && now > listens_until_) close_file(listener_);
  if (rank_ == 0) tell_news(now);
  if (closing_) hang_up(now);
  for (size_t i = 0; i < slots_; ++i) {
    if (connections_[i].file >= 0) write(connections_[i]);
  }
  if (!closing_) look(now);
  for (size_t i = 0; closed_ && i < slots_; ++i) close_file(connections_[i].file);
  return !closed_;
}

void Watch::wait_for_files(bool news) {
  std::vector<pollfd> polled{{wakes_, POLLIN, 0}};
  bool free = false;
  {
    std::lock_guard lock(mutex_);
    int64_t pending = 0;
    for (size_t i = 0; i < slots_; ++i) {
      const auto& one = connections_[i];
      const short events = POLLIN | (one.out.empty() ? 0 : POLLOUT);
      if (one.file >= 0) polled.push_back({one.file, events, 0});
      pending += one.file >= 0 && one.rank < 0;
    }
    free = pending < world_;
  }
  if (listener_ >= 0 && free) polled.push_back({listener_, POLLIN, 0});
  ::poll(polled.data(), polled.size(), static_cast<int>((news ? kTogether : kRound).count()));
  clear(wakes_);
}

// At most `world` connections wait for their token at a time; further ones wait in the kernel's queue.
void Watch::accept() {
  if (listener_ < 0) return;
  const auto pending = std::count_if(connections_.get(), connections_.get() + slots_,
                                     [](const Connection& one) { return one.file >= 0 && one.rank < 0; });
  for (int64_t more = world_ - pending; more > 0; --more) {
    const auto slot = std::find_if(connections_.get(), connections_.get() + slots_,
                                   [](const Connection& one) { return one.file < 0; });
    if (slot == connections_.get() + slots_) return;
    const int file = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (file < 0) {
      // No more files: further ranks are not watched.
      if (errno == EMFILE || errno == ENFILE) close_file(listener_);
      return;
    }
    keep_alive(file);
    slot->rank = -1;
    slot->since = Clock::now();
    slot->in.clear();
    slot->out.clear();
    slot->file = file;
  }
}

void Watch::read(Connection& connection) {
  char bytes[1 << 14];
  bool open = true;
  for (int pass = 0; pass < 64 && open; ++pass) {  // not for ever, if one rank sends without end
    const auto count = ::recv(connection.file, bytes, sizeof bytes, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) break;
    open = count > 0;
    if (open) connection.in.append(bytes, count);
  }
  size_t begin = 0;
  for (size_t end; (end = connection.in.find('\0', begin)) != std::string::npos; begin = end + 1) {
    if (!hear(connection, connection.in.substr(begin, end - begin))) return;
  }
  connection.in.erase(0, begin);
  const auto most = connection.rank < 0 ? asks_.size() + 32 : kLongest;
  if (connection.in.size() > most) {
    drop(connection, kNonsense);
  } else if (!open) {
    drop(connection, kDied);
  }
}

bool Watch::hear(Connection& connection, const std::string& record) {
  if (connection.rank < 0) return recognise(connection, record);
  const char kind = record.empty() ? ' ' : record[0];
  const auto rest = record.substr(std::min<size_t>(1, record.size()));
  if (kind == kText) {
    inbox_.emplace_back(connection.rank, rest);
    if (inbox_.size() > kInbox) inbox_.pop_front();
    notify(comes_);
    return true;
  }
  if (kind == kEnds) {
    drop(connection, kClosed);
    return false;
  }
  if (kind == kLeft && rank_ == 0) {
    note(connection.rank, /*is_gone=*/false, cut(rest, kLongestReason));
    return true;
  }
  const auto space = rest.find(' ');
  if ((kind == kNewsLeft || kind == kNewsGone) && rank_ != 0 && space != std::string::npos) {
    size_t begin = 0;
    while (begin < space) {
      const auto end = std::min(space, rest.find(',', begin));
      if (const auto rank = number(std::string_view(rest).substr(begin, end - begin)); rank && *rank < world_) {
        note(*rank, kind == kNewsGone, rest.substr(space + 1));
      }
      begin = end + 1;
    }
    return true;
  }
  drop(connection, kNonsense);
  return false;
}

// Whoever does not know the token is no rank.
bool Watch::recognise(Connection& connection, const std::string& record) {
  const auto space = record.find(' ');
  const auto rank = number(std::string_view(record).substr(0, std::min(space, record.size())));
  const auto taken = [&](const Connection& one) { return one.file >= 0 && one.rank == *rank; };
  if (!rank || *rank == 0 || *rank >= world_ || record.substr(space + 1) != asks_ || gone_.count(*rank) > 0 ||
      std::any_of(connections_.get(), connections_.get() + slots_, taken)) {
    close_file(connection.file);
    return false;
  }
  connection.rank = *rank;
  put(connection, answers_);
  for (const auto& [other, reason] : left_) put(connection, text(std::string(1, kNewsLeft), other, " ", reason));
  for (const auto& [other, reason] : gone_) put(connection, text(std::string(1, kNewsGone), other, " ", reason));
  const auto come = std::count_if(connections_.get(), connections_.get() + slots_,
                                  [](const Connection& one) { return one.file >= 0 && one.rank >= 0; });
  if (come + static_cast<int64_t>(gone_.size()) == world_ - 1) close_file(listener_);
  return true;
}

void Watch::put(Connection& connection, const std::string& record) {
  if (connection.out.size() + record.size() > kUnsent) return;
  connection.out += record;
  connection.out += '\0';
}

void Watch::write(Connection& connection) {
  while (!connection.out.empty()) {
    const auto count = ::send(connection.file, connection.out.data(), connection.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count < 0) connection.out.clear();  // `read` finds that it has failed
    connection.out.erase(0, std::max<ssize_t>(count, 0));
  }
  if (hangs_up_) ::shutdown(connection.file, SHUT_WR);
}

void Watch::drop(Connection& connection, const std::string& reason) {
  close_file(connection.file);
  connection.out.clear();
  if (connection.rank >= 0 && !hangs_up_) note(connection.rank, /*is_gone=*/true, reason);
}

void Watch::note(int64_t rank, bool is_gone, const std::string& reason) {
  if (!(is_gone ? gone_ : left_).emplace(rank, reason).second) return;
  if (rank_ == 0) news_[(is_gone ? kNewsGone : kNewsLeft) + reason].push_back(rank);
}

void Watch::tell_news(Time now) {
  if (news_.empty() || (!closing_ && now - told_ < kTogether)) return;
  told_ = now;
  for (const auto& [what, ranks] : news_) {
    std::string record(1, what[0]);
    for (const auto rank : ranks) record += (record.size() == 1 ? "" : ",") + std::to_string(rank);
    record += " " + what.substr(1);
    for (size_t i = 0; i < slots_; ++i) {
      if (connections_[i].file >= 0 && connections_[i].rank >= 0) put(connections_[i], record);
    }
  }
  news_.clear();
}

// A connection that is closed while something that has arrived on it is unread is reset, and what still waits to be sent
// on it is lost. "Closed" could be lost, and this rank would be taken for a dead one. So this rank reads until the other
// ends hang up, too.
void Watch::hang_up(Time now) {
  bool open = false;
  for (size_t i = 0; i < slots_; ++i) {
    auto& one = connections_[i];
    if (one.file >= 0 && one.rank < 0) close_file(one.file);
    if (one.file >= 0 && !hangs_up_) put(one, std::string(1, kEnds));
    open = open || one.file >= 0;
  }
  if (!hangs_up_) hangs_up_until_ = now + kHangUpWithin;
  hangs_up_ = true;
  closed_ = !open || now > hangs_up_until_;
}

// ---- the device ----

void Watch::add_barriers(std::shared_ptr<DeviceBarriers> barriers) {
  std::lock_guard lock(mutex_);
  barriers_.push_back({std::move(barriers), 0, Clock::now()});
}

void Watch::set_groups(std::vector<std::string> names) {
  std::lock_guard lock(mutex_);
  groups_ = std::move(names);
}

std::string Watch::standing() const {
  std::lock_guard lock(mutex_);
  for (const auto& one : barriers_) {
    if (one.words->stands() != 0) return one.words->where();
  }
  return "";
}

void Watch::look(Time now) {
  const Barriers* longest = nullptr;
  for (auto& one : barriers_) {
    const auto number = one.words->stands();
    if (number != one.number) one.number = number, one.since = now;
    if (number != 0 && (longest == nullptr || one.since < longest->since)) longest = &one;
  }
  if (has_ended_) return;
  const auto reason = in_vain(longest, now);
  if (reason.empty()) return;
  std::fprintf(stderr, "%s\n", reason.c_str());  // Python may not come to say it
  end_locked(reason);
}

std::string Watch::in_vain(const Barriers* longest, Time now) {
  for (const auto& one : barriers_) {
    if (const auto apart = one.words->apart(); !apart.empty()) return text("zerocompile: rank ", rank_, ": ", apart);
  }
  if (longest != nullptr && now - longest->since >= duration<double>(timeout_)) {
    const auto limit = static_cast<long>(timeout_);
    char waited[32];
    std::snprintf(waited, sizeof waited, "%ld:%02ld:%02ld", limit / 3600, limit / 60 % 60, limit % 60);
    return text("zerocompile: rank ", rank_, "'s device has waited for ", std::string(waited), " in ",
                longest->words->where(), ". Another rank has died, hangs, or does not run the same step.");
  }
  auto left = left_locked();
  left.erase(rank_);
  if (!lost_) lost_since_ = now;
  lost_ = !left.empty();
  if (!lost_ || now - lost_since_ < kMayStillEnd) return "";
  const bool python_stands = listening_ && now - python_came_ >= kPythonStands && !groups_.empty();
  const bool device_stands = longest != nullptr && now - longest->since >= kDeviceStands;
  if (!python_stands && !device_stands) return "";
  const auto& [rank, reason] = *left.begin();
  return text("zerocompile: rank ", rank_, " waits for rank ", rank, ", which has ended: ", reason,
              longest == nullptr ? "" : text(", its device in ", longest->words->where()));
}

bool Watch::end(std::string reason) {
  std::lock_guard lock(mutex_);
  if (has_ended_) return false;
  end_locked(std::move(reason));
  return true;
}

std::optional<std::string> Watch::ended() const {
  if (!has_ended_) return std::nullopt;
  std::lock_guard lock(mutex_);
  return ended_;
}

void Watch::end_locked(std::string reason) {
  ended_ = std::move(reason);
  has_ended_ = true;
  for (const auto& one : barriers_) one.words->end();
  // All at once: the end of one group may wait for the device, where kernels of another one still wait.
  for (const auto& name : groups_) {
    std::thread([name] {
      try {
        const auto group = *new auto(c10d::resolve_process_group(name));  // kept for ever, see [Note: ended groups]
        group->abort();
      } catch (...) {  // it has failed or ended before
      }
    }).detach();
  }
}

}  // namespace zerocompile
