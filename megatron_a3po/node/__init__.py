"""The program of the example: each node trains on some of its GPUs and serves rollouts on the others."""
