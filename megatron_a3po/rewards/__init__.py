"""Score responses in other processes, because a reward function may hang, fork, use up the memory or die.

The trainer imports `worker_pool`, which starts workers. A worker is `worker` as a program; it imports no torch.
"""
