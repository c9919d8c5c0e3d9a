# shellcheck shell=bash
# Environment for ranks on AMD Instinct, to be sourced from `slurm.setup` of a site file, or copied into its `env`.

# Caches of compiled kernels: on a shared file system their locks fail, so one folder a node, made before ranks start.
export MIOPEN_USER_DB_PATH=${TMPDIR:-/tmp}/miopen-$USER
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
mkdir -p "$MIOPEN_USER_DB_PATH"

# RCCL between nodes goes over these; name your site's.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0}
export NCCL_NET_GDR_LEVEL=PHB

# Slingshot: the default memory monitor makes a second process group hang; userfaultfd needs a kernel from 5.12 on.
export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-userfaultfd}

# MPI carries no device memory here, and a GPU-aware Cray MPICH beside RCCL can deadlock.
export MPICH_GPU_SUPPORT_ENABLED=0
