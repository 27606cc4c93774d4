#pragma once
// The job's secret in a file that only its user can read: how it reaches the other ranks where the
// launcher passes nothing on. The store tells every process that connects the name of the file,
// which reveals nothing; a process of another user cannot open it.
//
//   const SecretFile file(other_hosts);                           // rank 0, until all ranks are in
//   std::optional<std::string> secret = read_secret_file(name);   // the others

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/pinned.h"

namespace tessera::detail {

/// A secret in a file, which the destructor removes.
class SecretFile : Pinned {
 public:
  /// Makes a new secret in a new file of mode 0600: in /tmp/tessera-<user id>, or, with
  /// `other_hosts`, in the home folder, $HOME/.tessera, which the hosts of a cluster share. Uses
  /// the other folder if the first cannot be used. Throws RendezvousError if neither can.
  explicit SecretFile(bool other_hosts);
  ~SecretFile();
  /// 32 hexadecimal digits.
  const std::string& name() const { return name_; }
  const std::string& secret() const { return secret_; }

 private:
  const std::string name_, secret_;
  std::string folder_;
};

bool is_secret_file_name(std::string_view name);
/// The content of the file of this name, if one of this user exists. Symbolic links, files of
/// others and files that others can read are ignored.
std::optional<std::string> read_secret_file(const std::string& name);
/// The folders that are searched, for messages.
std::string secret_folders();

}  // namespace tessera::detail
