// What a random program decides: drawn by a seed, or as a program that was kept says.
//
// Note [Kept programs]
// A program is kept as text, so that it stays the same program when others are drawn: a line for the system, then one for each step,
// with what it does and what it decided, by name. What is not there was decided 0, or no, and so is whatever programs decide later
// that this one knew nothing of: a name keeps its meaning, and a 0 changes nothing. A number that is too large now is taken modulo.
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/link/sim_random.h"

namespace offload::core_test {

class Choices {
 public:
  struct Step {
    std::string act;
    std::map<std::string, std::uint64_t, std::less<>> decided;
  };
  using Steps = std::vector<Step>; // the system's first

  /// `writesDown` what it decides.
  explicit Choices(std::uint64_t seed, bool writesDown = false) : random_(seed), writesDown_(writesDown) {}
  explicit Choices(Steps kept, bool writesDown = false)
      : random_(0), isKept_(true), writesDown_(writesDown), kept_(std::move(kept)) {}

  static Steps parse(std::string_view text) {
    Steps steps;
    std::istringstream lines{std::string(text)};
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      Step step;
      if (!(words >> step.act)) continue;
      for (std::string word; words >> word;) {
        const auto at = word.find('=');
        if (at == std::string::npos) throw Error("no decision: " + word);
        step.decided[word.substr(0, at)] = std::stoull(word.substr(at + 1));
      }
      steps.push_back(std::move(step));
    }
    return steps;
  }
  static std::string textOf(const Steps& steps) {
    std::ostringstream text;
    for (const auto& [act, decided] : steps) {
      text << act;
      for (const auto& [what, number] : decided) text << ' ' << what << '=' << number;
      text << '\n';
    }
    return text.str();
  }

  /// What has been decided until now, to be kept.
  std::string text() const {
    return textOf(made_);
  }
  /// Whether the program goes on: until its last line, or for so many steps.
  bool hasMore(std::size_t steps) const {
    return isKept_ ? begun_ < kept_.size() && kept_[begun_].act != "end" : begun_ <= steps;
  }

  /// Begins the system, or the next step.
  void begin(const char* act) {
    ++begun_;
    if (writesDown_) made_.push_back({act, {}});
  }
  /// What the step does, which `draw` says where the program is not a kept one.
  template <class Draw>
  std::string_view act(Draw draw) {
    const std::string_view act = isKept_ ? std::string_view(kept_[begun_ - 1].act) : draw(random_);
    if (writesDown_) made_.back().act = act;
    return act;
  }

  /// A number in [0, n). Of a step each is asked for once.
  std::uint64_t below(std::string_view what, std::uint64_t n) {
    return below(what, n, random_);
  }
  bool oneIn(std::string_view what, std::uint64_t n) {
    return oneIn(what, n, random_);
  }
  /// The same of numbers of its own, so that what is drawn otherwise stays the same for each seed.
  std::uint64_t below(std::string_view what, std::uint64_t n, SimRandom& random) {
    return decide(what, isKept_ ? (n == 0 ? 0 : kept(what) % n) : random.below(n));
  }
  bool oneIn(std::string_view what, std::uint64_t n, SimRandom& random) {
    return decide(what, isKept_ ? kept(what) != 0 : random.oneIn(n)) != 0;
  }

 private:
  std::uint64_t kept(std::string_view what) const {
    if (begun_ > kept_.size()) return 0;
    const auto& decided = kept_[begun_ - 1].decided;
    const auto found = decided.find(what);
    return found == decided.end() ? 0 : found->second;
  }
  std::uint64_t decide(std::string_view what, std::uint64_t number) {
    if (writesDown_ && number != 0 && !made_.back().decided.emplace(what, number).second) {
      throw Error("decided twice in one step: " + std::string(what));
    }
    return number;
  }

  SimRandom random_;
  const bool isKept_ = false;
  const bool writesDown_ = false;
  const Steps kept_;
  std::size_t begun_ = 0;
  Steps made_;
};

} // namespace offload::core_test
