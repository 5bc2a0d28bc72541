// Which ranks are gone, and the end of what waits for them: a thread that needs neither Python nor the driver.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "barriers.h"

namespace zerocompile {

// [Note: liveness] A store keeps a process's messages after its death, so a wait in the store notices nothing. A
// connection notices the death itself, since the kernel closes it. A process that computes for minutes, that is stopped,
// or whose Python stands, is not mistaken for a dead one, and nothing has to be sent while all is well. Each rank holds
// one connection, to rank 0, which tells the others which ranks it has lost. Keep-alive packets, which the kernel
// answers, find a host that has vanished. Where rank 0 cannot be reached, a wait ends at `timeout`.
//
// [Note: ended groups] On a device a collective that another rank never comes to blocks its stream. It blocks the host
// as soon as the host reads a number from the device, or has filled the device's queue. In a launch from compiled code
// the host then holds the interpreter lock, so no thread of Python can do anything about it. Only the end of the
// communicator frees the host, and for barriers of mapped memory a word in the host's memory ([Note: device barriers]).
// So this thread ends both when a rank is gone and this one waits in vain: its device stands in a barrier, or its Python
// has stood for some seconds. Barriers are ended first, since the end of a communicator frees memory, and so waits for
// whatever reads numbers. Torch keeps a group that has ended, and each later collective in it raises on this rank at
// once. This class keeps it, too: its destructor would wait for NCCL's watchdog, which sleeps for a minute after it has
// seen a dead rank, and ends the process after that.
class Watch {
 public:
  // `timeout`: seconds that a device may stand in one barrier.
  Watch(int64_t world, int64_t rank, double timeout);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Starts the thread. `file`: on rank 0 a socket that listens for the others, on the others a connection to rank 0; -1:
  // there is none. On rank 0 a rank is whoever sends its number, a space and `asks` at once; the answer is `answers`.
  // Rank 0 listens until all ranks have come, `listens` seconds at most. The socket is this object's from here on.
  void start(int file, std::string asks, std::string answers, double listens);

  // Tells the others that this rank has ended its part, and ends the thread and the connections.
  void close();
  // In a forked child, whose copies would keep the connections of its dead parent open.
  void close_copies();

  // Sends one rank's Python a text: any rank to rank 0, rank 0 to any. Does not wait, and does not raise.
  void send(int64_t rank, std::string text);
  // What the ranks' Python has sent since the last call: the senders and their texts. None: this object is closed. It
  // is to be called about once a second: Python stands if it is not.
  std::optional<std::vector<std::pair<int64_t, std::string>>> take();
  // A file that can be read when `take` has something. Python waits for it by itself: a thread that waited in here would
  // end the process if it came back while the interpreter ends.
  int file() const { return comes_; }
  // Ends the connection of a rank that has sent what no rank sends.
  void refuse(int64_t rank);

  // Tells the others why this rank ends in the middle of its run.
  void leave(std::string reason);
  // Why a rank will say nothing more (`kDied`, `kClosed`); none: as far as is known it is there.
  std::optional<std::string> gone(int64_t rank) const;
  // Why other ranks, and this one, have ended in the middle of their run, or that they have died.
  std::map<int64_t, std::string> left() const;

  void add_barriers(std::shared_ptr<DeviceBarriers> barriers);
  // The process groups, by name, that are aborted.
  void set_groups(std::vector<std::string> names);
  // What this rank's device stands in; "": in no barrier.
  std::string standing() const;
  // See [Note: ended groups]. Only the first call counts; returns whether this was it. It does not wait.
  bool end(std::string reason);
  // Why barriers and groups have ended; none: they have not.
  std::optional<std::string> ended() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  struct Connection {
    std::atomic<int> file = -1;  // -1: free
    int64_t rank = -1;           // -1: it has not said whose it is
    Time since;
    std::string in, out;
  };
  struct Barriers {
    std::shared_ptr<DeviceBarriers> words;
    int64_t number = 0;  // as `stands` said at the last look
    Time since;
  };

  void run();
  bool round();  // whether another one follows
  void wait_for_files(bool news);
  void accept();
  void read(Connection& connection);
  bool hear(Connection& connection, const std::string& record);  // whether the connection stays
  bool recognise(Connection& connection, const std::string& record);
  void write(Connection& connection);
  void put(Connection& connection, const std::string& record);
  void drop(Connection& connection, const std::string& reason);
  void note(int64_t rank, bool is_gone, const std::string& reason);
  void tell_news(Time now);
  void hang_up(Time now);
  void look(Time now);
  void end_locked(std::string reason);
  std::map<int64_t, std::string> left_locked() const;
  // Why this rank waits in vain, or computes what is wrong; "": as far as is known it does neither.
  std::string in_vain(const Barriers* longest, Time now);

  const int64_t world_, rank_;
  const double timeout_;
  const size_t slots_;
  const std::unique_ptr<Connection[]> connections_;  // never moved, so that a forked child can close them
  std::atomic<int> listener_ = -1, wakes_, comes_;  // the last two: event files
  std::string asks_, answers_;
  Time listens_until_, hangs_up_until_, told_, python_came_, lost_since_;
  std::thread thread_;

  mutable std::mutex mutex_;  // guards all that follows, and the connections' fields but for `file`
  std::deque<std::pair<int64_t, std::string>> inbox_;
  std::map<int64_t, std::string> gone_, left_;
  std::map<std::string, std::vector<int64_t>> news_;  // what rank 0 has still to tell, and of which ranks
  std::vector<Barriers> barriers_;
  std::vector<std::string> groups_;
  std::string ended_;
  std::atomic<bool> has_ended_ = false;
  bool closing_ = false, hangs_up_ = false, closed_ = false, listening_ = false, lost_ = false;
  bool forked_ = false;
};

}  // namespace zerocompile
