#pragma once
// What happens on one rank is known on all: an error of any rank is thrown on every rank.

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// The error that is being handled as a text with its type in front; errors between ranks
/// (CommError) are thrown on. Called from a catch block.
std::string caught_error();
/// Throws what caught_error() made, with `before` in front of its message.
[[noreturn]] void throw_error(const std::string& error, const std::string& before);

/// Runs `body` on every rank. If it throws on any, every rank throws the first such rank's error,
/// with its rank in the message. `same`: what chooses the calls that follow, which all ranks give
/// alike, or every rank throws InvalidArgument. Collective.
void together(const Group& group, const char* call, const std::function<void()>& body,
              const CallOptions& options, const std::string& same = "");
/// Runs `body` on the group's first rank; what it throws is thrown on all. Collective.
void on_first_rank(const Group& group, const char* call, const std::function<void()>& body,
                   const CallOptions& options);

/// Several texts of any bytes as one, for a call that moves one, and back.
std::string packed(const std::vector<std::string>& texts);
std::vector<std::string> unpacked(const std::string& text);

}  // namespace tessera::detail
