#pragma once
// Ranks that were configured differently get an error, not a hang.

#include <string>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Collective. Throws MismatchError on every rank of the group unless all ranks gave the same text;
/// the message shows the first line that differs, with the ranks on either side. Costs one exchange
/// of 8 bytes a rank when the texts agree. `subject` says what is compared ("the plan of the
/// process groups", "the parameters of the module").
void require_agreement(const Group& group, const std::string& subject, const std::string& text);

}  // namespace tessera
