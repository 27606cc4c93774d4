# The MPI part on real processes, under the MPI library's own launcher.

foreach(program mpi_test mpi_interop_test mpi_faults)
  add_executable(${program} ${program}.cpp)
  target_link_libraries(${program} PRIVATE Tessera::tessera tessera_mpi GTest::gtest)
  tessera_use_full_pch(${program})
endforeach()

tessera_mpi_test(mpi_single TARGET mpi_test RANKS 1 2 ARGUMENTS single)
tessera_mpi_test(mpi_multiple TARGET mpi_test RANKS 3 4 ARGUMENTS multiple)
tessera_mpi_test(mpi_serialized TARGET mpi_test RANKS 2 ARGUMENTS serialized)
tessera_mpi_test(mpi_interop_single TARGET mpi_interop_test RANKS 1 2 4 ARGUMENTS single TIMEOUT 60)
tessera_mpi_test(mpi_interop_multiple TARGET mpi_interop_test RANKS 3 ARGUMENTS multiple TIMEOUT 60)

# Faults: each must end within its time, by itself or by the launcher, and say this.
function(mpi_fault fault prints)
  tessera_mpi_test(mpi_fault_${fault} TARGET mpi_faults RANKS 2 ARGUMENTS ${fault} TIMEOUT 40 PRINTS "${prints}")
endfunction()
mpi_fault(fatal "tessera: rank 1 of 2 on [^ ]+: the mesh has 3 holes. Ending the MPI job")
mpi_fault(throws "rank 1 on [^ ]+ leaves MPI without finalising it, because an exception is in flight")
mpi_fault(killed "rank 1 .*signal 9|BAD TERMINATION")
mpi_fault(group_timeout "rank 0: group: TimeoutError after the limit, missing 1: group 'all' of ranks .0, 1.: after 500 ms ranks .1. have not come")
mpi_fault(late_blocking "all_reduce: TimeoutError after the limit.*all_reduce did not complete within 500 ms.*second call: CommError")
mpi_fault(late_started "all_reduce: TimeoutError after the limit.*all_reduce did not complete within 500 ms.*second call: CommError")
mpi_fault(late_receive "receive: TimeoutError after the limit, missing 1: receive did not complete within 500 ms; it waits for rank .1.")
mpi_fault(stopped_inside "tessera: rank 0 in group 'mpi': all_reduce did not end within its limit of 500 ms although all ranks had begun it")
mpi_fault(abort "rank 0: PeerLostError: all_reduce: the group was aborted while the call waited")
mpi_fault(sizes "CommError: receive: rank 1 sent 8 bytes where this rank expects 12.*the group still works")
