"""How bytes move: one interface (`base`), over real MPI (`mpi`) and over virtual ranks in one process (`virtual`)."""
