"""The machine that a process runs on: launcher, threads, memory, disk, terminal, clock. No MPI."""
