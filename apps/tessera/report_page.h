#pragma once
// The page that `tessera report` writes.

#include <vector>

#include "report_log.h"
#include "tessera/files/page.h"

namespace tessera::app {

/// The runs beside each other. `refresh`: seconds after which a browser reads the page again; 0:
/// never.
Page report_page(const std::vector<RunLog>& runs, int refresh);

}  // namespace tessera::app
