#include "tessera/checkpoint/detail/folder.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"

namespace tessera::detail {

namespace {

void make_folders(const std::string& path, FileOperations& operations) {
  if (path == "." || path == "/" || path.empty()) return;
  const std::string above = folder_of(path);
  try {
    if (operations.make_folder(path)) operations.sync_folder(above);
  } catch (const FileError&) {
    if (above == path) throw;
    make_folders(above, operations);
    if (operations.make_folder(path)) operations.sync_folder(above);
  }
}

}  // namespace

CheckpointFolder::CheckpointFolder(std::string path, const CheckpointOptions& options)
    : path_(std::move(path)),
      operations_(options.operations),
      keep_last_(static_cast<std::size_t>(std::max(options.keep_last, 0))),
      remove_incomplete_(options.remove_incomplete) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
}

void CheckpointFolder::make() const { make_folders(path_, *operations_); }

std::shared_ptr<const void> CheckpointFolder::lock() {
  const std::string file = concat(path_, "/.lock");
  try {
    if (auto lock = operations_->lock(file)) return lock;
  } catch (const NotAvailable& e) {
    if (!std::exchange(told_of_locks_, true))
      warn({concat(e.what(), "; that no other job saves in '", path_,
                   "' at the same time is up to you, and what interrupted saves left stays")});
    return nullptr;
  }
  throw CheckpointLocked(
      concat("'", path_, "': another job saves or removes a checkpoint there at ",
             "this moment, and holds '", file,
             "': wait until it has ended, or give each job a folder of its own"));
}

std::shared_ptr<const void> CheckpointFolder::lock_for_save() {
  auto held = lock();
  if (std::exchange(remove_incomplete_, false) && held)
    warn(tessera::remove_incomplete(path_, *operations_));
  return held;
}

std::uint64_t CheckpointFolder::next_sequence() {
  std::vector<std::string> unread;
  const std::uint64_t highest = highest_sequence(path_, unread);
  // Those that were there before can all be outnumbered by what was known when all could be read.
  if (!unread.empty() && !known_sequence_)
    throw FileError(concat("'", path_,
                           "' may hold later checkpoints than those that can be read, and the new "
                           "one must come after them: ",
                           unread.front(), "; make it readable, or move it out of the folder"));
  warn(unread);
  known_sequence_ = std::max(highest, known_sequence_.value_or(0)) + 1;
  return *known_sequence_;
}

void CheckpointFolder::retain() {
  if (keep_last_ == 0) return;
  std::vector<CheckpointName> all;
  try {
    all = list_checkpoints(path_);
  } catch (const FileError& e) {
    warn({concat("no earlier checkpoint was removed: ", e.what())});
  }
  {
    const std::lock_guard guard(mutex_);
    std::erase_if(all, [&](const CheckpointName& one) { return protected_.contains(one.name); });
  }
  for (std::size_t i = 0; i + keep_last_ < all.size(); ++i) {
    try {
      remove_checkpoint(path_, all[i].name, *operations_);
    } catch (const FileError& e) {
      warn({concat("checkpoint '", all[i].name, "' was to be removed: ", e.what())});
    }
  }
}

std::string CheckpointFolder::to_resume() const {
  std::vector<DamagedCheckpoint> damaged;
  const std::vector<CheckpointName> whole = list_checkpoints(path_, &damaged);
  std::vector<std::string> names;
  for (const CheckpointName& one : whole) names.push_back(printable(one.name));
  for (const DamagedCheckpoint& one : damaged) {
    if (!whole.empty() && one.sequence && *one.sequence < whole.back().sequence) continue;
    throw CheckpointDamaged(concat(
        "'", printable(one.name), "' in '", path_, "' is damaged, and ",
        one.sequence ? "is the latest" : "may be the latest", ": ", one.damage, "; ",
        names.empty() ? "no other one is whole" : "whole, earliest first, are " + list(names),
        ". Name the one to go on from, or move the damaged one out of the folder"));
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
