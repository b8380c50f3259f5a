"""The experiments of the paper: data, tasks, sweeps, tables and figures."""
