"""From a batch of trajectories to the microbatches of every rank: `balance` assigns them, `packing` packs them."""
