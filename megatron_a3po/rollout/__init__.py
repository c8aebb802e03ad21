"""The way of the data, from a prompt to a training batch.

    PromptSet.training_prompt     which prompt has group number g
    RolloutCollector              issues groups and collects them, as far as StalenessBuffer.admit allows
      Sampler.sample_group        a prompt -> Responses, by the rollout servers
      Rewarder.reward_group       Responses -> TrajectoryGroup, by the reward workers
    StalenessBuffer.take          groups -> the next batch, in issue order, with the age of every token checked
    RolloutSource.next_batch      the batch on every rank

`rank_zero` builds these parts on rank 0. `Ledger` accounts for every group, `RolloutState` is what a checkpoint keeps,
and `Evaluator` takes other prompts through the same sampler and rewarder.
"""
