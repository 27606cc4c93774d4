#include "tessera/checkpoint/detail/folder.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"

namespace tessera::detail {
namespace {

constexpr std::string_view kClaim = ".claim-";
// More jobs than ever save at once: who meets so many others gives up.
constexpr int kMostClaims = 100;

// Of a name that is no claim: 0.
std::uint64_t claim_of(const std::string& name) {
  return name.starts_with(kClaim) ? std::strtoull(name.c_str() + kClaim.size(), nullptr, 10) : 0;
}

}  // namespace

CheckpointFolder::CheckpointFolder(std::shared_ptr<CheckpointIO> io,
                                   const CheckpointOptions& options)
    : io_(std::move(io)),
      keep_last_(static_cast<std::size_t>(std::max(options.keep_last, 0))),
      remove_incomplete_(options.remove_incomplete) {}

WriteHold CheckpointFolder::hold() {
  try {
    if (auto lock = io_->lock()) return {std::move(lock), 0};
  } catch (const NotAvailable& locks) {
    try {
      return {nullptr, claim()};
    } catch (const NotAvailable& claims) {
      if (!std::exchange(told_of_locks_, true))
        warn({concat(locks.what(), ", and ", claims.what(), "; that no other job saves in '",
                     io_->where(""),
                     "' at the same time is up to you, and what interrupted saves left stays")});
    }
    return {};
  }
  throw CheckpointLocked("'", io_->where(""),
                         "': another job saves or removes a checkpoint there at ",
                         "this moment, and holds '", io_->where(".lock"),
                         "': wait until it has ended, or give each job a folder of its own");
}

WriteHold CheckpointFolder::hold_for_save() {
  auto held = hold();
  if (std::exchange(remove_incomplete_, false) && held.lock) warn(tessera::remove_incomplete(*io_));
  return held;
}

std::uint64_t CheckpointFolder::highest_claim() const {
  std::uint64_t highest = 0;
  for (const std::string& name : io_->list("")) highest = std::max(highest, claim_of(name));
  return highest;
}

std::uint64_t CheckpointFolder::claim() {
  const auto name = [](std::uint64_t n) { return concat(kClaim, n); };
  std::uint64_t mine = highest_claim() + 1;
  for (int tries = 0; !io_->put(name(mine), "", true); ++mine)
    if (++tries == kMostClaims)
      throw CheckpointLocked("'", io_->where(""), "': other jobs save there all the time");
  try {
    for (const std::string& other : io_->list(""))
      if (const std::uint64_t n = claim_of(other); n > 0 && n < mine) io_->remove(other);
  } catch (const std::exception& e) {
    warn({concat("an earlier claim was to be removed: ", e.what())});
  }
  return mine;
}

void CheckpointFolder::confirm(const WriteHold& hold) {
  if (hold.claim == 0 || highest_claim() == hold.claim) return;
  throw CheckpointLocked("'", io_->where(""),
                         "': another job has begun to save or remove a checkpoint there, "
                         "and this one gives way: give each job a folder of its own");
}

std::uint64_t CheckpointFolder::next_sequence(const WriteHold& hold) {
  std::vector<std::string> unread;
  const std::uint64_t highest = highest_sequence(*io_, unread);
  // Those that were there before can all be outnumbered by what was known when all could be read.
  if (!unread.empty() && !known_sequence_)
    throw FileError("'", io_->where(""),
                    "' may hold later checkpoints than those that can be read, and the new "
                    "one must come after them: ",
                    unread.front(), "; make it readable, or move it out of the folder");
  warn(unread);
  // Claims differ, so that two jobs never give one number.
  known_sequence_ = std::max(std::max(highest, known_sequence_.value_or(0)) + 1, hold.claim);
  return *known_sequence_;
}

void CheckpointFolder::retain() {
  if (keep_last_ == 0) return;
  std::vector<CheckpointName> all;
  try {
    all = list_checkpoints(*io_);
  } catch (const std::exception& e) {
    warn({concat("no earlier checkpoint was removed: ", e.what())});
  }
  {
    const std::lock_guard guard(mutex_);
    std::erase_if(all, [&](const CheckpointName& one) { return protected_.contains(one.name); });
  }
  for (std::size_t i = 0; i + keep_last_ < all.size(); ++i) {
    try {
      remove_checkpoint(*io_, all[i].name);
    } catch (const std::exception& e) {
      warn({concat("checkpoint '", all[i].name, "' was to be removed: ", e.what())});
    }
  }
}

std::string CheckpointFolder::to_resume() const {
  std::vector<DamagedCheckpoint> damaged;
  const std::vector<CheckpointName> whole = list_checkpoints(*io_, &damaged);
  std::vector<std::string> names;
  for (const CheckpointName& one : whole) names.push_back(printable(one.name));
  for (const DamagedCheckpoint& one : damaged) {
    if (!whole.empty() && one.sequence && *one.sequence < whole.back().sequence) continue;
    throw CheckpointDamaged(
        "'", printable(one.name), "' in '", io_->where(""), "' is damaged, and ",
        one.sequence ? "is the latest" : "may be the latest", ": ", one.damage, "; ",
        names.empty() ? "no other one is whole" : "whole, earliest first, are " + list(names),
        ". Name the one to go on from, or move the damaged one out of the folder");
  }
  return whole.empty() ? "" : whole.back().name;
}

void CheckpointFolder::protect(const std::vector<std::string>& names) {
  const std::lock_guard guard(mutex_);
  protected_ = {names.begin(), names.end()};
}

void CheckpointFolder::warn(const std::vector<std::string>& what) {
  const std::lock_guard guard(mutex_);
  warnings_.insert(warnings_.end(), what.begin(), what.end());
}

std::vector<std::string> CheckpointFolder::warnings() const {
  const std::lock_guard guard(mutex_);
  return warnings_;
}

}  // namespace tessera::detail
