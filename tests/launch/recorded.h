#pragma once
// Environments as launchers set them: the variables that count, and some that stand beside them.

#include <map>
#include <string>
#include <vector>

namespace tessera::test {

using Variables = std::map<std::string, std::string>;

inline const Variables slurm{{"SLURM_JOB_ID", "0001234"},
                             {"SLURM_NTASKS", "4"},
                             {"SLURM_PROCID", "2"},
                             {"SLURM_LOCALID", "0"},
                             {"SLURM_NODEID", "1"},
                             {"SLURM_NNODES", "2"},
                             {"SLURM_STEP_NODELIST", "n[1-2]"},
                             {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};

inline const Variables torchrun{{"TORCHELASTIC_RUN_ID", "none"},
                                {"RANK", "3"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "1"},
                                {"LOCAL_WORLD_SIZE", "2"},
                                {"GROUP_RANK", "1"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "29500"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

inline const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                {"OMPI_COMM_WORLD_NODE_RANK", "1"}};

inline const Variables hydra{
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

/// LSB_DJOB_RANKFILE is to be added: it names a file.
inline const Variables jsrun{{"LSB_JOBID", "1234"},
                             {"JSM_NAMESPACE_RANK", "2"},
                             {"JSM_NAMESPACE_LOCAL_RANK", "0"},
                             {"JSM_NAMESPACE_SIZE", "4"}};

inline const Variables plain{
    {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};

inline const Variables ours{{"TESSERA_RANK", "1"},       {"TESSERA_WORLD_SIZE", "3"},
                            {"TESSERA_LOCAL_RANK", "1"}, {"TESSERA_LOCAL_SIZE", "3"},
                            {"TESSERA_NODE_RANK", "0"},  {"TESSERA_ADDRESS", "127.0.0.1"},
                            {"TESSERA_PORT", "40123"},   {"RANK", "1"},
                            {"WORLD_SIZE", "3"},         {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "3"},   {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", "40123"}};

/// The script of sbatch itself: part of an allocation, not of a step.
inline const Variables sbatch{{"SLURM_JOB_ID", "77"},
                              {"SLURM_NTASKS", "8"},
                              {"SLURM_PROCID", "0"},
                              {"SLURM_LOCALID", "0"},
                              {"SLURM_NODEID", "0"},
                              {"SLURM_NNODES", "2"},
                              {"SLURM_JOB_NODELIST", "n[1-2]"},
                              {"SLURM_TASKS_PER_NODE", "4(x2)"},
                              {"SLURM_JOB_NAME", "train"}};

inline Variables join(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

}  // namespace tessera::test
