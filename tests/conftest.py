"""Settings of the process that have to be made before JAX starts its CPU backend."""

import os

# Pallas' GPU interpreter runs every warpgroup of a kernel in a thread that blocks in a
# callback. XLA's CPU backend has as many threads as cores, so that on two cores three
# waiting roles stop the fourth for ever; this is how many it is to have instead.
# (xla/pjrt/utils.cc, DefaultThreadPoolSize; seen with jax 0.11.2, 2026-11-29.)
os.environ.setdefault("NPROC", "16")
