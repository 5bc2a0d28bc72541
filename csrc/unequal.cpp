// Ranks that do unequal work, and take part in each other's gathers.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <cctype>
#include <utility>

#include "collectives.h"
#include "gathers.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

// After a unit's number: it is gathered in full precision, see [Note: low gathers]; the ranks agree on scales before,
// see [Note: float8 gathers].
constexpr char kWide = 'w', kScales = 's';

struct Turn {
  int64_t unit;
  bool wide, scales;
};

std::vector<Turn> units_of(const std::string& turn, size_t count) {
  std::vector<Turn> units;
  size_t at = 0;
  while (at < turn.size()) {
    int64_t number = 0;
    const auto first = at;
    for (; at < turn.size() && std::isdigit(static_cast<unsigned char>(turn[at])) && at - first < 9; ++at) {
      number = 10 * number + (turn[at] - '0');
    }
    const char kind = at > first && at < turn.size() ? turn[at] : ',';
    const bool wide = kind == kWide, scales = kind == kScales;
    at += wide || scales;
    const bool ends = at == turn.size() || turn[at] == ',';
    TORCH_CHECK(at > first && ends && number < static_cast<int64_t>(count),
                text("zerocompile: the ranks gather `", turn, "`, which names no units of this rank's"));
    units.push_back({number, wide, scales});
    ++at;
  }
  TORCH_CHECK(!units.empty(), "zerocompile: it is another rank's turn to gather, and it names no unit");
  return units;
}

}  // namespace

// [Note: unequal work] Between `begin_unequal` and `end_unequal` each rank may gather what it likes, in any order, and
// any number of times. Every gather there has a number, and the first rank that comes to a number decides what is
// gathered (`take_turn`, through the store). All ranks take part in it. A rank that wanted something else takes part
// with memory of its own that it gives up at once (`serve`), and tries the next number. Where ranks wait for each other
// (the end of this, of a backward, a barrier) the first to come serve the others' gathers (`meet_others`). So all ranks
// launch the same collectives in the same order. What a rank has gathered, what it predicts, and what it keeps are its
// own then: nothing is predicted or started ahead, nothing counts as part of the sequence of gathers that the ranks
// know, and what is not in use is dropped at both ends, after which all ranks go on from the same state.
void Gathers::begin_unequal() {
  TORCH_CHECK(!unequal_, "zerocompile: unequal work has begun already");
  not_started_.meet(questions_, registry_.global_rank());
  drop_unused(/*but=*/-1);
  order_.restart();
  unequal_ = true;
}

void Gathers::end_unequal(bool raised) {
  if (registry_.is_shut_down() || !std::exchange(unequal_, false)) return;
  drop_unused(/*but=*/-1, raised);
  forget_scales();
  if (raised) forget_secondary();
  order_.restart();
}

// Returns when it is this rank's turn to gather these units, and the other ranks take part. The result: whether all of
// them agree on scales before.
bool Gathers::take_turn(const Units& units, bool full) {
  if (registry_.world() == 1 || questions_.take == nullptr) return needs_scales(units, full);
  TORCH_CHECK(!not_started_.any(),
              text("zerocompile: rank ", registry_.global_rank(), " has failed in a gather inside ",
                   "`strategy.unequal()`, in which the other ranks wait for it, so it cannot gather more ",
                   "there. Let the exception leave the context"));
  while (true) {
    bool scales = false;
    std::string wanted;
    for (auto index : units) {
      const auto& unit = registry_.units()[index];
      const bool wide = widens(unit, full), old = !wide && needs_scales(unit, full);  // what is served may change it
      wanted += text(wanted.empty() ? "" : ",", index);
      if (wide || old) wanted += wide ? kWide : kScales;
      scales = scales || old;
    }
    const auto turn = questions_.take(wanted);
    if (turn == wanted) return scales;
    serve(turn);
  }
}

// Takes part in a gather that this rank does not ask for.
void Gathers::serve(const std::string& turn) {
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  std::vector<Pending> started;
  std::vector<std::pair<int64_t, GatheredValue>> served;  // parameters
  std::string names;
  const auto keep = [&] {
    for (const auto& [i, v] : served) lane_.keep(v.full);
  };
  try {
    const auto units = units_of(turn, units_.size());
    bool agrees = false;
    for (const auto& [index, wide, scales] : units) {
      const auto& unit = registry_.units()[index];
      take_late({index});
      names += text(names.empty() ? "" : "`, `", unit.name);
      if (const auto written = std::exchange(of(unit).written, {})) written->block(current_stream(registry_.device()));
      write_back_all(unit);  // what user code has written counts
      agrees = agrees || scales;
    }
    if (agrees) agree_on_scales();
    for (const auto& [index, wide, scales] : units) {
      for (auto i : registry_.units()[index].parameters) {
        const auto& p = record(i);
        if (p.replicated) continue;
        GatheredValue v;
        allocate(p, wide ? p.dtype : of(p).low.value_or(p.dtype), v);
        if (v.full.numel() == 0) continue;
        counts_.gather_bytes += static_cast<int64_t>(v.full.nbytes());
        served.emplace_back(i, std::move(v));
      }
    }
    Lane::Launch launch(lane_, started);
    RowsByDtype calls;
    for (const auto& [i, v] : served) {
      calls[v.full.scalar_type()].push_back(rows_to_move(record(i), v));
    }
    counts_.served += static_cast<int64_t>(calls.size());
    move(calls, units.front().unit, launch);
    launch.finish();
  } catch (...) {
    keep();  // see [Note: unfinished launches]
    not_started_.note(text("the gather of unit `", names, "` for another rank"));
    throw;
  }
  keep();
  started_ += 1;
  if (!registry_.device().is_cpu()) return;
  const auto what = text("the gather of unit `", names, "` for another rank");
  wait_for(started.front(), registry_.device(), what, registry_.global_rank(),
           questions_.look(what, "gather", started_));
}

// Returns when all ranks have come to `what`; until then this one serves them.
void Gathers::meet_others(const std::string& what) {
  if (!unequal_ || registry_.world() == 1 || questions_.arrive == nullptr) return;
  TORCH_CHECK(!not_started_.any(), text("zerocompile: rank ", registry_.global_rank(), " has failed in a gather inside ",
                                        "`strategy.unequal()`, so it cannot come to ", what));
  for (auto turn = questions_.arrive(what); !turn.empty(); turn = questions_.arrive(what)) serve(turn);
}

// An exception leaves: all ranks hear of it at their next turn.
void Gathers::tell_failure(const std::string& why) {
  if (!unequal_ || not_started_.any() || registry_.world() == 1 || questions_.fail == nullptr) return;
  for (auto turn = questions_.fail(why); !turn.empty(); turn = questions_.fail(why)) serve(turn);
}

}  // namespace zerocompile
