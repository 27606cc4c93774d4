#pragma once
// All orders of samples.

#include "tessera/data/orders/fixed_order.h"
#include "tessera/data/orders/length_orders.h"
#include "tessera/data/orders/mixture_order.h"
#include "tessera/data/orders/order.h"
