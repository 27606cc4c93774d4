# Two hosts on one machine: network namespaces joined by a virtual cable. Needs root; elsewhere the tests are skipped and say so.
tessera_test(netns TORCH SOURCES netns_test.cpp TIMEOUT 300 LABELS system)
