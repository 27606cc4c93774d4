#pragma once
// require_agreement: ranks that were configured differently get an error, not a hang.

#include <string>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Compares `text` across the ranks of `group` (collective). `subject` names what is compared in
/// the message ("the plan of the process groups", "the parameters of the module"). Costs one
/// exchange of 8 bytes per rank when the texts agree.
///
/// Throws MismatchError on every rank unless all ranks gave the same text; the message shows the
/// first line that differs, with the ranks on either side.
void require_agreement(const Group& group, const std::string& subject, const std::string& text);

}  // namespace tessera
