// Streams and events, with one interface for devices and the CPU. On a device they order work without blocking the
// host. On the CPU a wait is the collective's own wait. No CUDA header is included, so the same source serves every
// build of torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace zerocompile {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A point in a stream's work.
using Ready = std::shared_ptr<c10::Event>;

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

inline Ready mark(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

inline Ready mark(c10::Device device) { return mark(current_stream(device)); }

// The tensor's memory is not used again before what the stream holds now is done, without anybody waiting.
inline void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  if (!tensor.defined()) return;
  // Not through Python: an exception that a dispatch mode raised may be on its way out, and Python holds it already.
  const c10::impl::ExcludeDispatchKeyGuard no_python(c10::python_ks);
  tensor.record_stream(stream);
}

// What has been launched. On a device `wait` orders the current stream after it, once for each stream that asks. On the
// CPU `wait` blocks until the launch is done and what was to follow is done too. To call it again costs nothing. Copies
// stand for the same launch: on the CPU the first one that waits does it for all.
//
// `waited`, `awaited` and `unawaited` say who has waited. `running` says whether it may still be on its way; on the CPU
// it is until somebody has waited. `completed` is for the CPU only: whether a wait would return at once.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}
  Pending(std::vector<WorkPtr> works, std::vector<std::function<void()>> afterwards)
      : on_cpu_(std::make_shared<OnCpu>(OnCpu{std::move(works), std::move(afterwards)})) {}

  // On the CPU `goes_on`, if there is one, is asked about once a second whether to wait on. Returns false if it said
  // no; then nothing has changed.
  bool wait(c10::Device device, const std::function<bool()>& goes_on) {
    if (event_ != nullptr) {
      const auto here = current_stream(device);
      if (std::find(waited_.begin(), waited_.end(), here) == waited_.end()) {
        event_->block(here);
        waited_.push_back(here);
      }
    }
    if (on_cpu_ == nullptr) return true;
    for (auto& work : on_cpu_->works) {
      if (!finish(*work, goes_on)) return false;
    }
    on_cpu_->works.clear();
    auto& afterwards = on_cpu_->afterwards;
    while (!afterwards.empty()) {  // one that raises (out of memory) is done again by the next wait
      afterwards.front()();
      afterwards.erase(afterwards.begin());
    }
    on_cpu_.reset();
    return true;
  }

  // Orders a device's stream after it. It does not count as a wait.
  void order(const c10::Stream& stream) const {
    if (event_ != nullptr) event_->block(stream);
  }

  bool any() const { return event_ != nullptr || on_cpu_ != nullptr; }

  // Whether a wait would change nothing for the current stream.
  bool awaited(c10::Device device) const {
    if (on_cpu_ != nullptr) return false;
    if (event_ == nullptr) return true;
    return std::find(waited_.begin(), waited_.end(), current_stream(device)) != waited_.end();
  }

  // Whether nobody has waited for it yet.
  bool unawaited() const { return waited_.empty() && any(); }

  // The streams that have waited: what was launched may be in use on them.
  const std::vector<c10::Stream>& waited() const { return waited_; }

  // Whether something may still be on its way; it does not block.
  bool running() const noexcept {
    try {
      return (on_cpu_ != nullptr && !on_cpu_->works.empty()) || (event_ != nullptr && !event_->query());
    } catch (...) {  // the device has failed
      return true;
    }
  }

  // On the CPU: whether a wait would not block. What was to follow has not been done yet.
  bool completed() const {
    return on_cpu_ == nullptr || std::all_of(on_cpu_->works.begin(), on_cpu_->works.end(),
                                             [](const WorkPtr& work) { return work->isCompleted(); });
  }

  // Nobody will wait. On a device, memory that the launch reads or writes has to be kept until it is done: Lane::keep.
  void drop() { *this = Pending(); }

 private:
  // A work that is not done in time raises. So does a work that has failed, but that one is completed, or it raises at
  // once.
  static bool finish(c10d::Work& work, const std::function<bool()>& goes_on) {
    if (goes_on == nullptr) return work.wait();
    constexpr std::chrono::milliseconds kPatience(1000);
    while (true) {
      const auto start = std::chrono::steady_clock::now();
      try {
        work.wait(kPatience);
        return true;
      } catch (const c10::Error&) {
        if (work.isCompleted() || std::chrono::steady_clock::now() - start < kPatience / 2) throw;
      }
      if (!goes_on()) return false;
    }
  }

  struct OnCpu {
    std::vector<WorkPtr> works;
    std::vector<std::function<void()>> afterwards;
  };
  std::shared_ptr<OnCpu> on_cpu_;
  std::shared_ptr<c10::Event> event_;
  std::vector<c10::Stream> waited_;
};

// One communication stream. A `Launch` makes it current and orders it after the work that the caller's stream holds
// now; `finish` returns what to wait for. On the CPU there is no stream, and the collectives' own handles are kept.
//
// [Note: unfinished launches] An exception between two collectives of a launch (out of memory) leaves the first one on
// its way: it still reads and writes memory that the exception's way out would free. So a launch tells `started` what
// to wait for on every way out, and its owner keeps what that reads and writes.
class Lane {
 public:
  // torch has 32 streams, and gives them out in turn. Lanes that were made one after the other have different ones.
  explicit Lane(c10::Device device) : device_(device) {
    if (device.is_cpu()) return;
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }

  // See `keep_for`.
  void keep(const at::Tensor& tensor) const {
    if (stream_) keep_for(tensor, *stream_);
  }

  // What is launched from now on is ordered after `event`.
  void follow(const Ready& event) const {
    if (stream_) event->block(*stream_);
  }

  class Launch {
   public:
    // `ready`: what the lane is ordered after, instead of all that the caller's stream holds.
    Launch(Lane& lane, std::vector<Pending>& started, const Ready& ready = {})
        : device_(lane.device_), started_(started) {
      if (device_.is_cpu()) return;
      (ready ? ready : mark(device_))->block(*lane.stream_);
      guard_.emplace(*lane.stream_);
    }

    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    ~Launch() {
      if (finished_) return;
      afterwards_.clear();  // nothing is computed from a part
      try {
        finish();
      } catch (...) {  // the device has failed, or there is no memory even for this
      }
    }

    void add(WorkPtr work) {
      if (work == nullptr) return;  // a collective that ran on the current stream may return no handle
      if (device_.is_cpu()) {
        works_.push_back(std::move(work));
      } else {
        work->wait();  // orders this lane after the collective; the host does not wait
      }
    }

    // What is computed from the result: now, in the lane's order, or (CPU) once by the thread that waits.
    void then(std::function<void()> follow) {
      if (!device_.is_cpu()) return follow();
      afterwards_.push_back(std::move(follow));
    }

    // Tells `started`, too.
    Pending finish() {
      finished_ = true;
      if (device_.is_cpu()) {
        started_.emplace_back(std::move(works_), std::move(afterwards_));
      } else {
        auto event = std::make_shared<c10::Event>(device_.type());
        event->record(guard_->current_stream());
        guard_.reset();
        started_.emplace_back(std::move(event));
      }
      return started_.back();
    }

   private:
    c10::Device device_;
    std::optional<c10::StreamGuard> guard_;
    std::vector<WorkPtr> works_;
    std::vector<std::function<void()>> afterwards_;
    std::vector<Pending>& started_;
    bool finished_ = false;
  };

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  // absent on the CPU
};

}  // namespace zerocompile
