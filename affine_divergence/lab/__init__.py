# The experiments: data, trials, training in stacks, storage, statistics, reports.
