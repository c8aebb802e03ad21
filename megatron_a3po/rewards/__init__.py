"""What a response is worth, computed in processes of their own: a reward function may hang, fork, eat memory or die.

The trainer's process uses `pool` and `shaping`. Workers import the rest, and no torch.
"""
