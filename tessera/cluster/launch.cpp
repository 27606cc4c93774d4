#include "tessera/cluster/launch.h"
