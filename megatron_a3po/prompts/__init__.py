"""From a dataset or a task to prompts: `load` reads the configuration, `dataset` or `tasks` finds questions, `encoder`
turns them into token ids, and `prompts` puts them in order."""
