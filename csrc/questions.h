// What the runtime asks the other ranks, through Python.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "text.h"

namespace zerocompile {

// [Note: re-entry] What asks the other ranks is Python code, in the middle of a gather or of a reduction, with our
// mutex held. Python runs signal handlers between its instructions on the main thread, so a handler that saves a
// checkpoint (Lightning's for SLURM) or reads a parameter would come back in here on the same thread, which owns the
// mutex: its collectives would run before those that were announced, and tear-down would free what the interrupted call
// goes on with. So whatever changes anything raises. Other threads wait for the mutex.
class Questions {
 public:
  std::function<std::vector<int64_t>(std::vector<int64_t>)> agree;     // rank 0's order of reductions
  std::function<std::string(int64_t, std::string)> compare;            // a gather: what another rank gathers instead
  std::function<std::string(int64_t, std::string, bool)> unite;        // the used flags
  // Called once a second while this rank waits: for what, its stream ("gather", "reduction") and number there; may
  // raise.
  std::function<void(std::string, std::string, int64_t)> waiting;

  // Before what comes next in a stream, after a collective that this rank could not start, and which: it raises unless
  // all ranks could not start that one.
  std::function<void(std::string)> failed;

  // Turns, see [Note: turns] in ranks/turns.py. All three return which units this rank has to gather now, as
  // `Gathers::take_turn` writes them. `take` gets what this rank wants, and returns it if that is what is gathered.
  // `arrive` gets where all ranks meet, and returns "" when all are there. `fail` gets why this rank fails, and returns
  // "" when all will hear of a failure.
  std::function<std::string(std::string)> take, arrive, fail;

  // A gather in user code outside of steps, of which unit; null: nobody asks. It may raise: see [Note: gathers outside
  // of steps] in ranks/consistency.py.
  std::function<void(std::string)> outside;
  bool in_step = false;
  bool evaluates = false;  // a step without a backward

  void set_turns(decltype(take) new_take, decltype(arrive) new_arrive, decltype(fail) new_fail) {
    take = flagged(std::move(new_take));
    arrive = flagged(std::move(new_arrive));
    fail = flagged(std::move(new_fail));
  }

  void set_outside(decltype(outside) new_outside) { outside = flagged(std::move(new_outside)); }

  void ask_outside(const std::string& unit) const {
    if (outside != nullptr && !in_step) outside(unit);
  }

  void set(decltype(agree) new_agree, decltype(compare) new_compare, decltype(unite) new_unite,
           decltype(waiting) new_waiting, decltype(failed) new_failed) {
    agree = flagged(std::move(new_agree));
    compare = flagged(std::move(new_compare));
    unite = flagged(std::move(new_unite));
    waiting = flagged(std::move(new_waiting));
    failed = flagged(std::move(new_failed));
  }

  // On the CPU a rank that waits looks about once a second whether the others still come: one may have died, have
  // failed in a window that this rank is still in, or wait for this one in something else.
  std::function<void()> look(const std::string& what, const char* stream, int64_t number) const {
    if (waiting == nullptr) return nullptr;
    return [this, what, stream, number] { waiting(what, stream, number); };
  }

  void clear() {
    set(nullptr, nullptr, nullptr, nullptr, nullptr);
    set_outside(nullptr);
    set_turns(nullptr, nullptr, nullptr);
  }

  bool asking() const { return asking_; }

  void check_entry(const char* what, int64_t rank) const {
    TORCH_CHECK(!asking_,
                text("zerocompile: `", what, "` was called on rank ", rank, " while this rank was asking the others ",
                     "what they gather or reduce next, so by a signal handler that Python has run in between. Its ",
                     "collectives would be mixed with those of the call that it has interrupted. Let the handler note ",
                     "the signal, and act on it between two steps (for example in `on_train_batch_end`)"));
  }

 private:
  template <typename Result, typename... Arguments>
  std::function<Result(Arguments...)> flagged(std::function<Result(Arguments...)> function) {
    if (function == nullptr) return nullptr;
    return [function = std::move(function), this](Arguments... arguments) {
      struct Running {
        explicit Running(bool& flag) : flag(flag) { flag = true; }
        ~Running() { flag = false; }
        bool& flag;
      };
      const Running running(asking_);
      return function(std::move(arguments)...);
    };
  }

  bool asking_ = false;
};

// [Note: collectives that could not be started] A rank that could not start a collective, such as for lack of memory, is
// one behind the others. What it starts next would be answered by that one, with values of other units. So before that
// the ranks meet. If all of them have failed in the same collective, after the same ones, they go on. Else this rank
// raises, now and whenever it is asked for another collective of the stream. The others, which stand in the one that
// is missing, hear that it waits for them, or that it has ended.
class NotStarted {
 public:
  void note(std::string what) { what_ = std::move(what); }
  void forget() { what_.clear(); }
  bool any() const { return !what_.empty(); }

  void meet(const Questions& questions, int64_t rank) {
    if (!any()) return;
    TORCH_CHECK(!asked_, text("zerocompile: rank ", rank, " could not start ", what_, ", where the other ranks did not ",
                              "fail. Its collectives would not match theirs any more. Train on from the last ",
                              "checkpoint (`ckpt_path=`)"));
    asked_ = true;
    if (questions.failed != nullptr) questions.failed(what_);
    asked_ = false;
    forget();
  }

 private:
  std::string what_;    // "": nothing
  bool asked_ = false;  // the ranks have met, and did not agree
};

}  // namespace zerocompile
